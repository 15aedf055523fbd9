"""The trainer: one loop over optimizer steps. Its parts sit in files of their own."""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gem_core.config import Config, resolve
from gem_core.errors import ConfigError, NumericsError, RunError
from gem_core.metrics.contract import result_record
from gem_core.ops import use_policy
from gem_core.plugins import manager
from gem_core.sources.contract import Source
from gem_core.train import state
from gem_core.train.build import agreed_total, build_parts, build_source, check_hashed, flops_of, hashed_of, task_names, tells, total_steps
from gem_core.train.callbacks import tell
from gem_core.train.continuous import Recency, warm_start
from gem_core.train.contract import Callback, Results, RunInfo, RunResult
from gem_core.train.evaluate import Best, evaluate, rehearse
from gem_core.train.feed import Fed, Feed, grouped
from gem_core.train.header import head_lines, header, plan_lines
from gem_core.train.heldout import HeldOut
from gem_core.train.logs import JsonLines, Progress, TensorBoard, kernel_choices
from gem_core.train.measure import Meter, peak, peak_memory
from gem_core.train.offline import hashed_in
from gem_core.train.optim import schedule_factor
from gem_core.train.pack import save_packed
from gem_core.train.runfolder import RunFolder, device_name, environment, summary_record, writing
from gem_core.train.runtime import runtime
from gem_core.train.saving import Saver
from gem_core.train.shards import State
from gem_core.train.signals import Stopped, StopRequest
from gem_core.train.step import Outcome, Outcomes, TrainStep
from gem_core.train.watchdog import Watchdog, lost_contact

MAX_SKIPPED = 100
"""Consecutive steps with a non-finite loss after which skipping gives up."""

SETTLE_S = 20.0
"""How long one of several processes that fails waits for a checkpoint that is being written. torchrun kills it after 30 s."""

MAX_SAVED = 10
"""Offending batches kept a run and rank."""


class Trainer:
    """Runs one configuration; see ``gem_core.train``. Methods stand in the order in which things happen."""

    def __init__(
        self,
        config: Config,
        *,
        run_dir: str | Path | None = None,
        resume: bool = False,
        overwrite: bool = False,
        callbacks: Sequence[Callback] = (),
        quiet: bool = False,
    ) -> None:
        self.resolved = resolve(config)
        self.config = self.resolved.config
        self.tasks = task_names(self.config.features)
        path = Path(run_dir) if run_dir is not None else Path(self.config.run.dir) / self.config.run.name
        self.folder = RunFolder(path, self.config.train.keep_checkpoints)
        self.resume, self.overwrite = resume, overwrite
        self.given_callbacks = callbacks
        self.progress = None if quiet else Progress()

    def run(self) -> RunResult:
        self.started = time.perf_counter()
        kernels = self.config.kernels
        policy, stop = use_policy(kernels.default, kernels.ops), StopRequest()
        with ExitStack() as stack:
            joined = stack.enter_context(runtime(self.config))
            stack.callback(self._release)
            self.stop, self.choices = stack.enter_context(stop), stack.enter_context(kernel_choices())
            stack.enter_context(policy)
            watch = Watchdog(joined.rank, joined.world, self.config.parallel.timeout_s, self.folder.path)
            self.watch = stack.enter_context(watch)
            self.runtime = replace(joined, progress=watch.progress)
            try:
                return self._run()
            except BaseException as error:
                if joined.world > 1 and lost_contact(error):
                    raise watch.explain(error) from error
                raise

    def _run(self) -> RunResult:
        self._prepare()
        try:
            self._each("on_start")
            try:
                return self._finish(self._loop())
            except Stopped:
                self._take(self.outcomes.ready(all=True))
                return self._finish("interrupted")
        except BaseException as error:
            if self.runtime.world == 1:  # several ranks first tell each other, see `_release`
                self.saver.settle()
            self._each("on_error", error)
            if isinstance(error, torch.OutOfMemoryError):
                raise RunError(
                    f"the device has too little memory: {str(error).splitlines()[0]}",
                    where=f"step {self.info.step + 1}",
                    fix="lower data.batch_size (train.accumulate keeps the samples a step), or use more devices",
                ) from error
            raise

    # Preparation

    def _release(self) -> None:
        """Let others train in the run folder when nothing is written there any more. The writing of several ranks may wait for one that
        is lost: for as long as it does, or this process lives, the folder stays locked."""
        saver = getattr(self, "saver", None)
        if saver is None or saver.settle(0):
            self.folder.release()
            return
        self._say(f"waiting up to {SETTLE_S:g} s for the checkpoint that is being written")
        if saver.settle(SETTLE_S):
            self.folder.release()
            return
        self._say(f"the checkpoint is still being written: {self.folder.path} stays locked until it is, or this process has ended")
        saver.afterwards(self.folder.release)

    def _prepare(self) -> None:
        rt, train = self.runtime, self.config.train
        continues = rt.on_main(lambda: self.folder.check(self.resume, self.overwrite))
        if continues:
            self.folder.check_config(self.config)
            self.folder.check_fitted(self.config)
        source = build_source(self.resolved, "train", rt)
        held_out = build_source(self.resolved, "eval", rt)
        check_hashed(held_out, hashed_of(source))
        rehearse(held_out, self.config.eval, self.tasks, self.config.features)
        self.parts = build_parts(self.resolved, rt)
        self.total = agreed_total(rt, total_steps(self.config, source))
        schedule_factor(train.schedule, train.schedule.warmup_steps, self.total)  # refuses a decay without an end before anything runs
        epochs = None if train.steps else train.epochs
        self.feed = Feed(source, rt.device, epochs, flops_of(self.parts.model), rt, self._stops)
        self.meter = Meter(rt.device, peak(device_name(rt.device), self.parts.precisions()))
        self.step = TrainStep(self.parts, self.config, rt, self.meter)
        self.outcomes = Outcomes(rt.device)
        self.info = RunInfo(self.config, self.folder.path, self.parts.model, self.total, rt.rank, rt.world)
        self.saver = Saver(self.folder.checkpoints, rt, background=train.checkpoint_async)
        self.save_s = 0.0
        self.best = Best.of(self.config.eval, self.tasks, retrieval=self.config.features.next_item is not None)
        self.results: Results | None = None
        self.record: dict[str, Any] = {}
        self.evaluated_at = self.saved_at = -1
        self.due = self.nothing_left = False
        self.position: dict[str, Any] | None = None
        self.partition: str | None = None
        self.warm: dict[str, Any] | None = None
        self._check_partitions(source)
        after = train.tables.evict_after
        self.recency = None if after is None else Recency(self.parts, self.config, rt, after)
        self.window = {"loss": 0.0, "weight": 0.0, "grad_norm": 0.0}
        self.skipped = self.skipped_in_a_row = self.saved_batches = 0
        self.wall_before = self.saving_s = 0.0
        self.guard_values: Mapping[str, Any] = {}
        if hasattr(self.parts.guard, "watch"):
            self.parts.guard.watch(HeldOut(self.resolved, self.parts, rt))
        self.callbacks = self._build_callbacks()
        self._seed()
        if not continues and train.warm_start is not None:
            check_hashed(source, hashed_in(RunFolder(Path(train.warm_start))))
            self.warm = warm_start(self.parts, self.step.dense, self.config, self.runtime)
        rt.on_main(lambda: self.folder.create(self.config, self.resume))
        self.fitted = rt.on_main(lambda: self.folder.keep_fitted(self.config))
        if continues:
            self._restore()
        else:
            if self.resume:
                rt.on_main(lambda: self.folder.trim(0))
                self._say(f"there is no checkpoint in {self.folder.path} yet; the run starts at step 0")
            if self.warm is not None:
                self._say(f"starting with step {self.warm['step']} of {self.warm['run']}")
        self.header = self._header()
        self.info.header = self.header
        if rt.main:
            self.folder.write_config(self.config)
            self.folder.write_json(self.folder.header, self.header)

    def _check_partitions(self, source: Source) -> None:
        wanted = {"eval.before_training": "to evaluate before training"} if self.config.eval.before_training else {}
        wanted |= {} if self.config.train.tables.evict_after is None else {"train.tables.evict_after": "to count"}
        for where, what in wanted.items():
            if not hasattr(source, "partition_source"):
                raise ConfigError(
                    f"the source {self.config.data.source!r} has no partitions {what}",
                    where=where,
                    fix="use a source that follows partitions, or leave it out",
                )

    def _seed(self) -> None:
        """Each rank draws numbers of its own."""
        seed = self.config.run.seed + 7919 * self.runtime.rank
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)

    def _header(self) -> dict[str, Any]:
        """The content of run.json; what the strategies have to say is printed too."""
        config, parts, rt = self.config, self.parts, self.runtime
        plan = plan_lines(parts)
        for line in (*head_lines(config, parts, rt, self.total), *plan):
            self._say(line)
        told = {
            "plan": plan,
            "fitted": self.fitted,
            **tells(self.feed.source),
            "mfu_peak": {"name": self.meter.peak.name, "flops_per_s": self.meter.peak.flops, "reason": self.meter.peak.reason},
            "resumed_from": self.info.step or None,
            "warm_start": self.warm,
        }
        return header(config, parts, rt, told)

    def _build_callbacks(self) -> list[Callback]:
        named = {name: manager().find("callback", name).build(options) for name, options in self.resolved.callbacks.items()}
        named |= {f"given {i}": callback for i, callback in enumerate(self.given_callbacks)}
        self.stateful = {name: callback for name, callback in named.items() if hasattr(callback, "state_dict")}
        own: list[Callback] = []
        if self.runtime.main:
            own = [JsonLines(self.folder)]
            own += [TensorBoard(self.folder)] if self.config.train.tensorboard else []
            own += [self.progress] if self.progress is not None else []
        return [*own, *named.values()]

    # The loop

    def _loop(self) -> str:
        if self.nothing_left:
            self._say(f"step {self.info.step} of {self.total} is reached; nothing is left to train")
            return "finished"
        info = self.info
        self.parts.module.train()
        if self.due and (status := self._do_due()) is not None:
            return status
        if self._has_lost_patience():
            return "early_stopped"
        self.meter.mark(None)
        if self.config.train.checkpoint_every is not None:
            # before the first step, since reading tables between two others may average their replicas
            self.saver.prepare({"model": self.parts.dense_state(), "tables": self.parts.table_state()})
        for batches, following in grouped(self.feed, self.config.train.accumulate, self.step.looks_ahead):
            status = self._one(batches, following)
            if status is not None:
                return status
            self.watch.note(info.step, "waiting for data")
        stopping = self._take(self.outcomes.ready(all=True))
        return "interrupted" if stopping or self.feed.stopped else "finished"

    def _one(self, batches: Sequence[Fed], following: Fed | None) -> str | None:
        """One step and what is due after it; returns how the run ends if it ends here."""
        info = self.info
        self.meter.mark("data")
        if info.step == self.total and (status := self._do_due()) is not None:
            return status
        self._begin_partitions(batches)
        lr = self.step.set_lr(schedule_factor(self.config.train.schedule, info.step, self.total))
        info.step += 1
        self.watch.note(info.step, "training step")
        vector = self.step(batches, self.stop.requested is not None, following)
        if self.recency is not None:
            for fed in batches:
                self.recency.note(fed.batch)
        self.outcomes.push(info.step, vector, batches)
        self.guard_values = self.parts.guard.on_step(info.step, vector[0] / vector[1])
        self._write_decisions()
        self.position = batches[-1].position
        self.meter.steps += 1
        for fed in batches:
            self.meter.count(fed.host.size, fed.tokens, fed.flops, fed.imbalance)
        return self._after_step(lr, batches)

    def _after_step(self, lr: float, batches: Sequence[Fed]) -> str | None:
        """Log, evaluate and save where they are due; returns how the run ends if it ends here."""
        step, train, every = self.info.step, self.config.train, self.config.eval.every
        last = step == self.total
        logs = last or step % train.log_every == 0
        self.due = every is not None and step % every == 0
        if "kernels" not in self.header:
            self._complete_header(batches[0])
            if train.checkpoint_every is not None:
                self.saver.prepare({"optimizer": dict(self.step.dense.state_items())})
        stopping = self._take(self.outcomes.ready(all=logs or self.due or self._saves()))
        self._saved(self.saver.finished())
        self._each("on_step", self._log_record(lr) if logs else None)
        if stopping:
            self._take(self.outcomes.ready(all=True))
            return "interrupted"
        if last:  # epochs end with their batches: where one is cut into more than the first, there is a step after the last, see `_one`
            return None if train.steps is None else "finished"
        return self._do_due()

    def _saves(self) -> bool:
        every = self.config.train.checkpoint_every
        return every is not None and self.info.step % every == 0

    def _complete_header(self, fed: Fed) -> None:
        """What the first step tells: FLOPs, chosen kernels, what a followed log's columns hold.

        :raises DataError: they hold something else than in the run to start from."""
        if fed.flops is not None and fed.host.size:
            self.header["flops_per_sample"] = fed.flops / fed.host.size
        self.header["kernels"] = sorted(self.choices)
        self.header |= tells(self.feed.source)
        if self.warm is not None:
            check_hashed(self.feed.source, hashed_in(RunFolder(Path(self.warm["run"]))))
        if self.runtime.main:
            self.folder.write_json(self.folder.header, self.header)

    def _take(self, outcomes: Sequence[Outcome]) -> bool:
        """Account for finished steps; whether some rank was asked to stop.

        :raises NumericsError: a loss or gradient was not finite and is not to be skipped.
        """
        stopping = False
        for outcome in outcomes:
            stopping |= outcome.stop
            self.info.samples += outcome.samples
            if outcome.bad_loss or outcome.bad_gradient:
                self._nonfinite(outcome)
                continue
            self.skipped_in_a_row = 0
            self.window["loss"] += outcome.loss
            self.window["weight"] += outcome.weight
            self.window["grad_norm"] = outcome.grad_norm
        return stopping

    def _nonfinite(self, outcome: Outcome) -> None:
        kept = ""
        if self.saved_batches < MAX_SAVED:
            stem = self.folder.nonfinite / f"step-{outcome.step}-rank-{self.runtime.rank}"
            with writing(stem):
                save_packed(stem, [fed.host for fed in outcome.batches])
            self.saved_batches += 1
            kept = f"; its batches are in {stem}.json (gem_core.train.pack.load_packed)"
        what = "loss" if outcome.bad_loss else "gradients"
        self.skipped += 1
        self.skipped_in_a_row += 1
        if outcome.bad_loss and self.config.train.nonfinite == "skip" and self.skipped_in_a_row < MAX_SKIPPED:
            self._say(f"step {outcome.step}: the loss is not finite; the step was skipped{kept}")
            return
        self.saver.settle(None if self.runtime.world == 1 else SETTLE_S)
        saved = self.folder.checkpoints.steps()
        raise NumericsError(
            f"the {what} of step {outcome.step} {'is' if outcome.bad_loss else 'are'} not finite"
            + (f", like {self.skipped_in_a_row - 1} steps before it" if self.skipped_in_a_row > 1 else "")
            + kept,
            where=str(self.folder.path),
            fix=(f"resume from step {saved[-1]} (--resume) after" if saved else "start again after")
            + " looking at the batches, lowering the learning rates or setting train.clip_norm"
            + (' (train.nonfinite = "skip" passes over such a loss)' if outcome.bad_loss and self.config.train.nonfinite == "stop" else ""),
        )

    def _write_decisions(self) -> None:
        take = getattr(self.parts.guard, "take_decisions", None)
        for decision in () if take is None else take():
            self._say("guard: " + ", ".join(f"{k} {v}" for k, v in decision.items()))
            if self.runtime.main:
                self.folder.append(self.folder.decisions, decision)

    def _log_record(self, lr: float) -> dict[str, Any]:
        weight = self.window["weight"]
        record = {
            "step": self.info.step,
            "epoch": self.position["epoch"] if self.position else 0,
            "samples": self.info.samples,
            "loss": self.window["loss"] / weight if weight else None,
            "lr": lr,
            "grad_norm": self.window["grad_norm"],
            "skipped": self.skipped,
            **self.meter.window(self.runtime.world),
            "checkpoint_s": self.saving_s,
            "memory_bytes": peak_memory(self.runtime.device),
            "time": self._wall(),
            **{key: float(value) for key, value in self.guard_values.items()},
        }
        self.window = dict.fromkeys(self.window, 0.0)
        self.saving_s = 0.0
        return record

    # Evaluation, checkpoints, the end

    def _begin_partitions(self, batches: Sequence[Fed]) -> None:
        """Of each partition whose first batch is here: evaluate on it with ``eval.before_training``, and give back rows with
        ``evict_after``."""
        found = dict.fromkeys(fed.position["source"].get("partition") for fed in batches)
        new = [partition for partition in found if partition != self.partition]
        for partition in new if self.config.eval.before_training else ():
            self._evaluate(final=True, partition=partition)
        for partition in new:
            freed = {} if self.recency is None else self.recency.turn()
            if freed:
                self._say(f"before {partition}: " + ", ".join(f"{n:,} rows of {table}" for table, n in freed.items()) + " begin anew")
            self.partition = partition

    def _do_due(self) -> str | None:
        """The evaluation and the checkpoint that are due at this step; an evaluation that a stop keeps from its end, or from beginning, is
        made up for when the run goes on. Returns how the run ends if it ends here."""
        if self.due:
            self._evaluate()
            if self._has_lost_patience():
                return "early_stopped"
        if self._saves():
            self._checkpoint()
        return None

    def _has_lost_patience(self) -> bool:
        patience, best = self.config.eval.patience, self.best
        lost = patience is not None and best.worse >= patience
        if lost:
            self._say(f"no better {best.task}.{best.metric} in {patience} evaluations: stopping early")
        return lost

    def _evaluate(self, final: bool = False, partition: str | None = None) -> None:
        """Evaluate, on the evaluation split or on a partition of the training source; ``final`` leaves the search for the best alone.

        :raises Stopped: the run was asked to stop meanwhile.
        """
        started = time.perf_counter()
        self.watch.note(self.info.step, "evaluation")
        source = build_source(self.resolved, "eval", self.runtime) if partition is None else self.feed.source.partition_source(partition)  # type: ignore[attr-defined]
        module, model, rt = self.parts.module, self.parts.model, self.runtime
        self.results, samples = evaluate(module, model, source, self.config.eval, self.tasks, rt, stops=self._stops)
        self.evaluated_at = self.info.step if partition is None else -1
        self.due &= partition is not None  # before a checkpoint of the best parameters tells it
        self.record = {
            "step": self.info.step,
            "samples": self.info.samples,
            **result_record(self.results),
            "eval_samples": samples,
            "eval_s": time.perf_counter() - started,
            **({} if partition is None else {"partition": partition}),
        }
        self._each("on_eval", self.results, self.record)
        why = None if final else self.best.says_nothing(self.results)
        if why is not None and (self.config.eval.patience is not None or self.config.eval.restore_best):
            name = f"{self.best.task}.{self.best.metric}"
            self._say(f"step {self.info.step}: {name} is undefined ({why}): this evaluation counts neither as better nor as worse")
        if not final and self.best.update(self.results, self.info.step) and self.config.eval.restore_best:
            self._checkpoint()
            self._wait_for_checkpoint()
            self.runtime.on_main(lambda: self.folder.checkpoints.mark_best(self.info.step))
        self.meter.mark(None)

    def _checkpoint(self) -> None:
        if self.saved_at == self.info.step:
            return
        started = time.perf_counter()
        self.watch.note(self.info.step, "checkpoint")
        parts, rt = self.parts, self.runtime
        own = {"rng": state.rng_state(rt.device), "feed": self.position, "guard": getattr(parts.guard, "rank_state", dict)()}
        ranks = rt.gather_objects(own)
        shared = {
            "guard": parts.guard.state_dict(),
            "best": self.best.state_dict(),
            "recency": None if self.recency is None else self.recency.state_dict(),
            # copies, since they are written while training goes on
            "callbacks": {name: copy.deepcopy(callback.state_dict()) for name, callback in self.stateful.items()},
            "window": dict(self.window),
            "skipped": [self.skipped, self.skipped_in_a_row],
            "due": self.due,
            "total": {"steps": self.total, "of": self._length()},
            "wall_s": self._wall(),
        }
        meta = {"samples": self.info.samples, "model": self.config.model.name, "fitted": self.fitted, **environment(rt.device)}
        self._wait_for_checkpoint()
        path = self.saver.save(self.info.step, meta=meta, parts=self._tensors(), shared=shared, ranks=ranks)
        self.saved_at = self.info.step
        self.save_s = time.perf_counter() - started
        self.saving_s += self.save_s
        self._saved(path)
        self.meter.mark(None)

    def _tensors(self) -> dict[str, dict[str, State]]:
        return {"model": self.parts.dense_state(), "optimizer": dict(self.step.dense.state_items()), "tables": self.parts.table_state()}

    def _wait_for_checkpoint(self) -> None:
        self.watch.note(self.info.step, "checkpoint")
        self._saved(self.saver.wait())

    def _saved(self, path: Path | None) -> None:
        if path is not None:
            self._each("on_checkpoint", path, self.save_s)

    def _restore(self) -> None:
        store, rt = self.folder.checkpoints, self.runtime
        checkpoint, damaged = state.newest(store, rt)
        moved = rt.on_main(lambda: store.set_aside(damaged))
        for step, problem in damaged.items():
            self._say(f"checkpoint of step {step} not usable: {problem}")
        if damaged:
            self._say(f"the run goes on from step {checkpoint.step}" + (f"; set aside: {', '.join(map(str, moved))}" if moved else ""))
        state.load_parameters(self.parts, checkpoint)
        state.load_optimizer(self.parts, self.step.dense, checkpoint)
        shared = checkpoint.state("shared")
        state.load_guard(self.parts, checkpoint)
        self.best.load_state_dict(shared["best"])
        self._keep_best()
        if self.recency is not None and shared.get("recency") is not None:
            self.recency.load_state_dict(shared["recency"])
        for name, callback in self.stateful.items():
            if name in shared["callbacks"]:
                callback.load_state_dict(shared["callbacks"][name])
        self.window, self.wall_before, self.due = shared["window"], shared["wall_s"], shared.get("due", False)
        self.skipped, self.skipped_in_a_row = shared["skipped"]
        self.info.step, self.info.samples = checkpoint.step, int(checkpoint.meta["samples"])
        self.saved_at = checkpoint.step
        self.position = state.load_rank(checkpoint, self.parts, self.runtime)
        if self.position is not None:
            self.feed.load_position(self.position)
            self.partition = self.position["source"].get("partition")
        self._go_on_to(shared.get("total"))
        for line in state.version_changes(checkpoint):
            self._say(line)
        if self.runtime.main:
            self.folder.trim(checkpoint.step, evaluates=self.due or self.nothing_left)
        self._say(f"resumed at step {checkpoint.step} from {checkpoint.path}")

    def _length(self) -> list[int | None]:
        """What the number of steps follows from, beside the data."""
        train = self.config.train
        return [train.steps, train.epochs, train.accumulate, self.config.data.batch_size, self.runtime.world]

    def _go_on_to(self, planned: dict[str, Any] | None) -> None:
        """The last step as it was ``planned`` before, or from here on if the epochs are now cut into other steps."""
        step = self.info.step
        last = agreed_total(self.runtime, total_steps(self.config, self.feed.source, step, self.feed.epoch))
        self.nothing_left = last is not None and step >= last
        same = planned is not None and planned["of"] == self._length()
        self.total = self.info.total_steps = planned["steps"] if planned is not None and same else last

    def _keep_best(self) -> None:
        """The checkpoint of the best step stays until a better one is there: what the run had marked may be another one, as after a kill
        before it was, or where the run goes on from an older checkpoint."""
        step, store = self.best.step, self.folder.checkpoints
        if not self.config.eval.restore_best or step is None:
            return
        if self.runtime.on_main(lambda: step in store.steps()):
            self.runtime.on_main(lambda: store.mark_best(step))
            return
        self._say(f"there is no checkpoint of step {step}, the best so far: the search for the best begins anew")
        self.best.value, self.best.step, self.best.worse = None, None, 0

    def _finish(self, status: str) -> RunResult:
        if status == "finished" and self.info.step and not self.info.samples:
            fix = "look at what the source refused: `gemrec data validate` lists it"
            raise RunError(f"{self.info.step} steps held no sample: nothing was learned", where=str(self.folder.path), fix=fix)
        if status == "interrupted":
            self._say(f"stopping after step {self.info.step}{f' ({self.stop.requested})' if self.stop.requested else ''}")
            self._checkpoint()
        elif self.config.eval.restore_best:
            if self.evaluated_at != self.info.step:
                self._evaluate()
            if self.best.step not in (None, self.info.step):
                self._say(f"the best parameters are those of step {self.best.step}")
                state.load_parameters(self.parts, state.opened(self.folder.checkpoints, self.best.step, self.runtime))
                self._evaluate(final=True)
                self.saved_at = -1  # what this step's checkpoint holds, if it has one, are not the best parameters
            self._checkpoint()
        else:
            self._checkpoint()
            if self.evaluated_at != self.info.step:
                self._evaluate()
        self._wait_for_checkpoint()
        memory = max(self.runtime.gather_objects(peak_memory(self.runtime.device)))
        summary = summary_record(self.info, status, self.results, self.record, self.best.step, self._wall(), memory)
        if self.runtime.main:
            self.folder.write_json(self.folder.summary, summary)
        self._each("on_end", summary)
        return RunResult(self.folder.path, status, self.info.step, self.info.samples, summary["tasks"], summary, self.runtime.main)

    # Helpers

    def _stops(self) -> bool:
        return self.stop.requested is not None

    def _wall(self) -> float:
        return self.wall_before + time.perf_counter() - self.started

    def _say(self, line: str) -> None:
        if self.runtime.main and self.progress is not None:
            self.progress.say(line)

    def _each(self, event: str, *arguments: Any) -> None:
        tell(self.callbacks, event, self.info, *arguments)

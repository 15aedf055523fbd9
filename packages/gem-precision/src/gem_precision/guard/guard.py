"""Samples the sites, judges them, moves them.

Nothing waits for the device: the sums of a sample and every loss are copied to pinned memory and judged ``lag`` steps later, on every rank
at the same step and, since the sums are added over the ranks first, with the same result: also for sites that only some ranks have, as
those of experts that are spread, or that only some have sampled. For that, several ranks tell each other what they have sampled, by flags
that the hosts exchange in the steps that are, and by name where something is sampled for the first time.

::

    recipe --(wgrad operand bad)--> wgrad in bf16 --(bad)--> bf16          up one level after `quiet` clean samples,
       \\-----(fprop or dgrad operand bad)------------------>/              twice as many after each further demotion

While a site is demoted its recipe is still tried on the operands of the sampled steps, only to be measured; attention is not tried, and
comes back after as many samples of the others.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gem_core.errors import NumericsError
from gem_core.train.runtime import OnItsWay
from gem_precision.guard.config import GuardConfig
from gem_precision.guard.losses import LossWatch
from gem_precision.guard.metrics import Metrics, metrics, violations
from gem_precision.site import SUMS, Site

log = logging.getLogger("gem_precision.guard")

CUDA_LAG = 2


@dataclass(frozen=True)
class Decision:
    """One move of one site. ``evidence``: the metrics of the operand that caused it, or the loss."""

    step: int
    site: str
    before: str
    after: str
    reason: str
    evidence: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        numbers = ", ".join(f"{k} {v:.4g}" for k, v in self.evidence.items())
        return f"step {self.step}: {self.site}: {self.before} -> {self.after}: {self.reason}" + (f" ({numbers})" if numbers else "")


@dataclass
class _Record:
    """What the guard remembers of a site."""

    strikes: int = 0
    clean: int = 0
    demotions: int = 0
    worst: dict[str, dict[str, float]] = field(default_factory=dict)


class NumericsGuard:
    """See the module's docstring. ``others``: (module, precision, why) of what is not a site, for `describe`."""

    def __init__(self, sites: Sequence[Site], config: GuardConfig | None = None, *, others: Sequence[tuple[str, str, str]] = ()) -> None:
        self.sites = {s.name: s for s in sites}
        self.config = config or GuardConfig()
        self.others = tuple(others)
        self.decisions: list[Decision] = []
        self.records = {name: _Record() for name in self.sites}
        self.losses = LossWatch(self.config)
        self.alarm = 0
        self.step = 0
        self._pending: deque[tuple[int, str, list[tuple[str, str]], OnItsWay]] = deque()
        self._evaluate: Callable[[int], float] | None = None
        self.drift = 0.0
        self._told = 0
        self._turn = 0
        self._known: dict[tuple[str, str], None] = {}
        """Sites and operands that some rank has sampled, in the same order on all ranks."""
        self._arm(1)

    # What the trainer asks for

    def describe(self) -> Sequence[tuple[str, str, str]]:
        last = {d.site: d for d in self.decisions}
        mine = []
        for site in self.sites.values():
            why = str(last[site.name]) if site.level and site.name in last else site.why
            precision = site.precision
            if site.few_rows is not None:
                precision, why = "bf16", f"calls of {site.few_rows} rows: fewer than {site.min_rows} do not pay for quantised weights"
            mine.append((site.name, precision, why))
        return (*mine, *self.others)

    def on_step(self, step: int, loss: Tensor) -> Mapping[str, Any]:
        """After the optimizer step ``step`` of mean loss ``loss`` (a scalar tensor; the same on all ranks).

        :raises NumericsError: the losses stay non-finite although every site is at its safest level, and ``stop_after`` says so.
        """
        if not self.config.enabled:
            return {}
        self.step = step
        self._pending.append((step, "loss", [], OnItsWay(loss.detach().double().reshape(1, 1))))
        self._collect(step, loss.device)
        lag = CUDA_LAG if loss.is_cuda else 0
        while self._pending and self._pending[0][0] <= step - lag:
            self._receive()
        if self._evaluate is not None and step % self.config.drift_every == 0:
            self._compare(step)
        self._arm(step + 1)
        return self._scalars()

    @property
    def capturable(self) -> bool:
        """Whether steps may be recorded and replayed while `recording` names them: random bits drawn on the host may not."""
        return all(site.generator is None for site in self.sites.values())

    def recording(self) -> tuple[int, ...] | None:
        """The level of every site in the coming step; None if that step is sampled, which a replayed step is not."""
        return None if self._due(self.step + 1) else tuple(site.level for site in self.sites.values())

    def watch(self, evaluate: Callable[[int], float]) -> None:
        """Every ``drift_every`` steps compare ``evaluate(drift_rows)``, the model's NE on held-out rows, with the same under `shadow`."""
        self._evaluate = evaluate

    def take_decisions(self) -> list[dict[str, Any]]:
        """What was decided since the last call."""
        new, self._told = self.decisions[self._told :], len(self.decisions)
        return [asdict(d) for d in new]

    @contextmanager
    def shadow(self) -> Iterator[None]:
        """Inside, every site computes at its safest level."""
        before = {name: site.level for name, site in self.sites.items()}
        try:
            for site in self.sites.values():
                site.move(len(site.levels) - 1)
            yield
        finally:
            for name, level in before.items():
                self.sites[name].move(level)

    def state_dict(self) -> dict[str, Any]:
        return {
            "levels": {name: site.level for name, site in self.sites.items()},
            "records": {name: asdict(record) for name, record in self.records.items()},
            "decisions": [asdict(d) for d in self.decisions],
            "losses": list(self.losses.history),
            "nonfinite": self.losses.nonfinite_in_a_row,
            "alarm": self.alarm,
            "step": self.step,
            "turn": self._turn,
            "drift": self.drift,
            "pending": [(step, what, keys, sent.received()) for step, what, keys, sent in self._pending],
        }

    def rank_state(self) -> dict[str, Any]:
        """What each rank has of its own: where its noise stands."""
        return {"generators": {name: site.generator.get_state() for name, site in self.sites.items() if site.generator is not None}}

    def load_rank_state(self, state: dict[str, Any]) -> None:
        for name, stored in state["generators"].items():
            site = self.sites.get(name)
            if site is not None and site.generator is not None:
                site.generator.set_state(stored.cpu().clone())  # aligned: what is read from a checkpoint need not be

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Sites that the state does not know stay as they are; unknown ones of the state are ignored with a warning. The empty state of a
        recipe that has nothing to watch changes nothing."""
        if not state:
            return
        for name in set(state["levels"]) - set(self.sites):
            log.warning("the checkpoint knows a site %s that this model does not have", name)
        for name, site in self.sites.items():
            if name in state["levels"]:
                site.move(min(int(state["levels"][name]), len(site.levels) - 1))
                self.records[name] = _Record(**state["records"][name])
        self.decisions = [Decision(**d) for d in state["decisions"]]
        self._told = len(self.decisions)
        self.losses.history.clear()
        self.losses.history.extend(state["losses"])
        self.losses.nonfinite_in_a_row = state["nonfinite"]
        # arming counts the turn of the sample that may be due next
        self.alarm, self.step, self.drift = state["alarm"], state["step"], state.get("drift", 0.0)
        self._turn = state["turn"] - self._due(self.step + 1)
        self._pending.clear()
        for step, what, keys, values in state.get("pending", ()):
            self._pending.append((step, what, keys, OnItsWay(values)))
        self._arm(self.step + 1)

    # Sampling

    def _arm(self, step: int) -> None:
        due = self._due(step)
        self._turn += due
        for site in self.sites.values():
            site.sampling, site.turn = due, self._turn
            site.samples.clear()

    def _due(self, step: int) -> bool:
        return self.config.enabled and (self.alarm > 0 or step % self.config.sample_every == 0 or step == 1)

    def _collect(self, step: int, device: torch.device) -> None:
        if not self._due(step):
            return
        own = {(name, operand): sums for name, site in self.sites.items() for operand, sums in site.samples.items()}
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        keys = self._of_all_ranks(own) if several else list(own)
        none = torch.zeros(len(SUMS), dtype=torch.float64, device=device)
        sums = torch.stack([own.get(key, none) for key in keys]) if keys else none.new_zeros(0, len(SUMS), device="cpu")
        if several and keys:
            amax = sums[:, 0].contiguous()
            dist.all_reduce(amax, dist.ReduceOp.MAX)
            dist.all_reduce(sums)
            sums[:, 0] = amax
        self._pending.append((step, "sample", keys, OnItsWay(sums)))
        if self.alarm:
            self.alarm -= 1

    def _of_all_ranks(self, own: Collection[tuple[str, str]]) -> list[tuple[str, str]]:
        """What any rank has sampled, in one order."""
        flags = torch.tensor([not all(key in self._known for key in own), *(key in own for key in self._known)], dtype=torch.int32)
        dist.all_reduce(flags)
        news, *counts = flags.tolist()
        sampled = [key for key, count in zip(self._known, counts, strict=True) if count]
        if news:
            found: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(found, [key for key in own if key not in self._known])
            new = list(dict.fromkeys(key for keys in found for key in keys))
            self._known |= dict.fromkeys(new)
            sampled += new
        return sampled

    def _receive(self) -> None:
        step, what, keys, sent = self._pending.popleft()
        values = sent.received()
        if what == "loss":
            self._judge_loss(step, float(values))
        else:
            self._judge_sample(step, keys, values.tolist())

    # Judging

    def _judge_loss(self, step: int, loss: float) -> None:
        trouble = self.losses.see(loss)
        if trouble is None:
            return
        self.alarm = self.config.alarm_steps
        if trouble == "spike" and self.config.on_spike == "shelter":
            self._shelter(step, f"loss spike above {self.losses.limit():.4g}", {"loss": loss})
        if trouble == "nonfinite" and self.losses.nonfinite_in_a_row > self.config.alarm_steps:
            # sampling every step found no culprit
            self._shelter(step, f"{self.losses.nonfinite_in_a_row} losses in a row are not finite", {})
            limit = self.config.stop_after
            if limit and self.losses.nonfinite_in_a_row >= limit + self.config.alarm_steps and self._all_safe():
                raise NumericsError(
                    f"{self.losses.nonfinite_in_a_row} losses in a row are not finite, with every site in its safest precision",
                    where=f"step {step}",
                    fix="the cause is not low precision: look at the learning rate and at the data of these steps",
                )

    def _all_safe(self) -> bool:
        return all(site.level == len(site.levels) - 1 for site in self.sites.values())

    def _judge_sample(self, step: int, keys: list[tuple[str, str]], rows: list[list[float]]) -> None:
        by_site: dict[str, dict[str, dict[str, float]]] = {}
        for (name, operand), sums in zip(keys, rows):
            by_site.setdefault(name, {})[operand] = metrics(sums)
        for site in self.sites.values():
            if site.name in by_site:
                self._judge_site(step, site, by_site[site.name])
            elif site.kind == "attention" and site.level:
                self._judge_site(step, site, {})

    def _judge_site(self, step: int, site: Site, operands: dict[str, dict[str, float]]) -> None:
        record, config = self.records[site.name], self.config
        record.worst = operands
        faults: list[tuple[str, str, bool]] = []
        for operand, m in operands.items():
            if operand != "dy":
                faults += [(operand, which, grave) for which, grave in violations(m, config)]
        if not faults:
            record.strikes, record.clean = 0, record.clean + 1
            if site.level and record.demotions < config.max_demotions and record.clean >= self._quiet(record):
                self._move(step, site, site.level - 1, f"{record.clean} clean samples", {})
                record.clean = 0
            return
        record.clean, record.strikes = 0, record.strikes + 1
        grave = [f for f in faults if f[2]]
        operand, which, _ = (grave or faults)[0]
        target = self._target(site, [f[0] for f in faults])
        if target > site.level and (grave or self.alarm or record.strikes >= config.patience):
            evidence = {which: operands[operand][which], "amax": operands[operand]["amax"], "sqnr_db": operands[operand]["sqnr_db"]}
            self._demote(step, site, target, f"{operand}: {which}", evidence)

    def _quiet(self, record: _Record) -> int:
        return self.config.quiet * 2 ** max(record.demotions - 1, 0)

    @staticmethod
    def _target(site: Site, operands: Sequence[str]) -> int:
        """The first level at which none of the bad operands is quantised."""
        last = len(site.levels) - 1
        if site.kind in ("linear", "grouped"):
            for level in range(site.level, last):
                policy = site.levels[level][1]
                if not any(getattr(policy, operand.split(".")[0]).quantised for operand in operands):
                    return level
        return last

    def _demote(self, step: int, site: Site, level: int, reason: str, evidence: Metrics) -> None:
        record = self.records[site.name]
        record.demotions, record.strikes, record.clean = record.demotions + 1, 0, 0
        self._move(step, site, level, reason, evidence)

    def _move(self, step: int, site: Site, level: int, reason: str, evidence: Metrics) -> None:
        before = site.precision
        site.move(level)
        decision = Decision(step, site.name, before, site.precision, reason, dict(evidence))
        self.decisions.append(decision)
        log.warning("%s", decision)

    def _shelter(self, step: int, reason: str, evidence: Metrics) -> None:
        for site in self.sites.values():
            if site.level < len(site.levels) - 1:
                # no fault of the site: it comes back after one quiet period
                self.records[site.name].clean = self.records[site.name].strikes = 0
                self._move(step, site, len(site.levels) - 1, reason, evidence)

    def _compare(self, step: int) -> None:
        """NE in the precisions in force against NE in bf16, same parameters, same rows; too much drift demotes the site whose operands had
        the largest error in the last sample."""
        assert self._evaluate is not None
        running = [s for s in self.sites.values() if s.level < len(s.levels) - 1]
        if not running:
            self.drift = 0.0
            return
        low = self._evaluate(self.config.drift_rows)
        with self.shadow():
            high = self._evaluate(self.config.drift_rows)
        if not high > 0:
            return
        # a NaN is more drift than any threshold
        self.drift = low / high - 1
        if self.drift <= self.config.max_drift:
            return
        worst = max(running, key=lambda s: self._error(s.name))
        evidence = {"ne": low, "shadow_ne": high, "relative_error": self._error(worst.name)}
        self._demote(step, worst, len(worst.levels) - 1, "NE drift", evidence)

    def _error(self, name: str) -> float:
        return max((m["relative_error"] for m in self.records[name].worst.values()), default=0.0)

    def _scalars(self) -> dict[str, float]:
        operands = [m for r in self.records.values() for o, m in r.worst.items() if o != "dy"]
        demoted = sum(site.level > 0 for site in self.sites.values())
        scalars = {"guard_demoted": float(demoted), "guard_decisions": float(len(self.decisions)), "guard_drift": self.drift}
        if operands:
            scalars["guard_min_sqnr_db"] = min(m["sqnr_db"] for m in operands)
            scalars["guard_max_underflow"] = max(m["underflow"] for m in operands)
            scalars["guard_max_relative_error"] = max(m["relative_error"] for m in operands)
        return scalars

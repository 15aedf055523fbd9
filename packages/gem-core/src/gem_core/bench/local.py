"""A model's parts alone on one device: time, FLOPs and floor of each, and the local MFU that all of them together reach.

Every layer is called with the inputs that it had in a real forward pass, forward and backward, while nothing else runs; on a CUDA device as
a replayed graph, so that it is not the host's launches that are measured. Tables (look-up, backward pass, update) and the dense optimizer
are parts of a step too, but no layers: they have no FLOPs, and the local MFU is that of the layers.

The floor of a part is the longer of its FLOPs (the least that it needs, `gem_core.model.flops`) over the matrix product rate and its least
bytes over the copy rate, both rates measured in the same run (`gem_core.bench.ceilings`). What the floors are a share of is told twice: of
the parts alone, and of a whole training step, as the configuration has it (``train.capture``), of the same batch in the same run. Least
bytes are 3 times inputs and parameters and twice outputs (read once forward; backward inputs are read and their gradients written, and
gradients of outputs read), those of AdamW 28 a parameter (parameter and two moments read and written, the gradient read; with a copy in 16
bits that is written, the gradient has 16 bits too).
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gem_core.batch import Batch
from gem_core.bench import page
from gem_core.bench.ceilings import ceilings, seconds
from gem_core.bench.step import repeated
from gem_core.config import Config, resolve
from gem_core.doctor_run import machine_memory
from gem_core.errors import ConfigError, DeviceError, RunError
from gem_core.model.tables import sparse_group
from gem_core.ops import use_policy
from gem_core.ops.remember import recording
from gem_core.requests import expanded
from gem_core.train.build import Parts, build_parts, build_source
from gem_core.train.measure import Meter, peak
from gem_core.train.runfolder import device_name, environment
from gem_core.train.runtime import runtime
from gem_core.train.step import TrainStep

_PARTS = {
    r"features": "features",
    r"entries\.[^.]+": "events",
    r"layers\.\d+\.blocks\.[^.]+\.pffn": "pffn",
    r"layers\.\d+\.blocks\.[^.]+\.attention": "attention",
    r"layers\.\d+\.blocks\.[^.]+\.ffn": "ffn",
    r"layers\.\d+\.pools\.[^.]+": "pooling",
    r"layers\.\d+\.(interaction|mix|gates\.\d+)": "interaction",
    r"heads": "heads",
}
"""Modules of the gem model (whole names) and the part that their FLOPs are counted under."""


@dataclass(frozen=True)
class Part:
    """``calls`` modules of one kind: seconds forward, seconds forward and backward, training FLOPs and least bytes of all of them;
    ``least_flops``: those that it needs at least, where the definition asks for more; ``replayed``: as a CUDA graph; ``layer``: its FLOPs
    count."""

    name: str
    calls: int
    forward_s: float
    total_s: float
    flops: float
    bytes: float
    least_flops: float
    replayed: bool = False
    layer: bool = True


def measure(config: Config, *, repeats: int = 10) -> dict[str, Any]:
    """Times of the parts of ``config``'s model on one batch of its training source; see the module.

    :raises ConfigError: the model is not the gem model, whose parts are known here.
    :raises DeviceError: a step needs more memory than a CPU has.
    """
    resolved = resolve(config)
    config = resolved.config
    if config.model.name != "gem":
        raise ConfigError(f"the parts of the model {config.model.name!r} are not known", where="model.name", fix="measure the model gem")
    with runtime(config) as rt, use_policy(config.kernels.default, config.kernels.ops):
        parts = build_parts(resolved, rt)
        model: Any = parts.model.train()
        host = next(iter(build_source(resolved, "train", rt)))
        held_against = peak(device_name(rt.device), parts.precisions())
        step = TrainStep(parts, config, rt, Meter(rt.device, held_against))
        step.set_lr(0.0)
        if rt.device.type == "cpu":
            check_step(parts, host)
        step_s = repeated(parts, step, host, rt)
        step.forget()
        batch = host.to(rt.device)
        calls = _record(model, rt.device, lambda: parts.module(batch))
        flops, least = model.flops(host), model.least_flops(host)
        layers = [_time(name, group, (flops.get(name, 0.0), least.get(name, 0.0)), rt.device, repeats) for name, group in calls.items()]
        found = [*layers, _tables(parts, step, batch, repeats), _optimizer(step, rt.device, repeats)]
        limits = ceilings(rt.device)
        gemm, copy = limits.gemm * 1e12, limits.copy * 1e12
        floors = sum(_floor(p, gemm, copy) for p in found)
        return {
            "parts": [_row(part, gemm, copy, held_against.flops) for part in found],
            "local_mfu": _share(sum(p.flops for p in layers), sum(p.total_s for p in layers), held_against.flops),
            "floor_share": floors / sum(p.total_s for p in found),
            "floors_s": floors,
            "parts_s": sum(p.total_s for p in found),
            "step_s": step_s,
            "step_floor_share": floors / step_s,
            "step_floor_share_at_best": sum(_floor(p, limits.best_gemm * 1e12, copy) for p in found) / step_s,
            "step_floor_share_by_definition": sum(max(p.flops / gemm, p.bytes / copy) for p in found) / step_s,
            "captured": config.train.capture,
            "gemm_tflops": limits.gemm,
            "best_gemm_tflops": limits.best_gemm,
            "copy_tb_per_s": limits.copy,
            "samples": host.size,
            "tokens": host.tokens,
            "parameters": parts.parameter_counts(),
            "mfu_peak": {"name": held_against.name, "flops_per_s": held_against.flops, "reason": held_against.reason},
            **environment(rt.device),
        }


def check_step(parts: Parts, host: Batch) -> None:
    """Like `gem_core.train.build.check_room`, of a step: what forward passes of a few samples keep for the backward pass, and of twice as
    many, tells what that of all of them does.

    :raises DeviceError: that, the parameters and their optimizer's state are more than the machine's memory.
    """
    room, few = machine_memory(), -(-host.size // 32)
    if room is None or host.size < 2 * few:
        return
    (less, kept), (more, kept_of_more) = (_kept(parts, host.select_range(0, n)) for n in (few, 2 * few))
    slope = (kept_of_more - kept) / (more - less)
    each = slope * (host.size + host.tokens) / host.size
    tables = parts.tables.table_set.tables if parts.tables is not None else ()  # type: ignore[attr-defined]
    state = (
        16 * parts.dense_count + sum(t.rows * (t.dim * (4 if t.dtype == "fp32" else 2) + 4) for t in tables) + max(0.0, kept - slope * less)
    )
    if state + each * host.size <= room:
        return
    fits = int((room - state) / each)
    whole, read, there = ((n / 2**30) for n in (state + each * host.size, each * host.size, room))
    raise DeviceError(
        f"a step of {host.size:,} samples takes at least {whole:.1f} GiB, {read:.1f} of them for what the backward pass reads, and there "
        f"are {there:.1f} GiB of memory",
        where="data.batch_size",
        fix=f"lower it (--batch-size), to less than {fits:,}" if fits > 1 else "measure a smaller preset",
    )


def _kept(parts: Parts, host: Batch) -> tuple[int, int]:
    """Samples and events of a batch, and the bytes beside parameters that a forward pass keeps for its backward pass."""
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = parts.module(expanded(host))  # held until all is counted: an address that is free is given out again
    for parameter in parts.model.parameters():
        kept.pop(parameter.untyped_storage().data_ptr(), None)
    del output
    return host.size + host.tokens, sum(kept.values())


def _tables(parts: Parts, step: TrainStep, batch: Batch, repeats: int) -> Part:
    """Look-up of a batch, backward pass and update of the tables."""
    tables, device = parts.tables, step.runtime.device
    assert tables is not None
    group = sparse_group(expanded(batch), tables.table_set.lookups)

    def look_up() -> list[Tensor]:
        return [t for t in _tensors(tables(group)) if t.requires_grad]

    outputs = look_up()
    gradients = [torch.randn_like(t) for t in outputs]
    read = group.values.numel() / len(group.keys) * sum(4.0 * tables.table_set.table(k.table).dim for k in tables.table_set.lookups)
    good = torch.ones((), dtype=torch.bool, device=device)
    update = step.tables.step if step.tables is not None else getattr(tables, "after_backward", lambda _good: None)

    def both() -> None:
        torch.autograd.backward(look_up(), gradients)
        update(good)

    forward, total = (statistics.median(seconds(run, device, repeats)) for run in (look_up, both))
    return Part("tables", 1, forward, total, 0.0, 3.0 * read + 2.0 * sum(t.nbytes for t in outputs), 0.0, layer=False)


def _optimizer(step: TrainStep, device: torch.device, repeats: int) -> Part:
    """Gradient norm and AdamW of the dense part."""
    dense = step.dense
    read = {name: dense.copies.get(name, p) for name, p in dense.parameters.items()}
    gradients = {name: torch.randn_like(p) for name, p in read.items()}
    good = torch.ones((), dtype=torch.bool, device=device)

    def run() -> None:
        for name, p in read.items():
            p.grad = gradients[name]
        dense.step(good, step.config.train.clip_norm, dense.grad_norm())

    total = statistics.median(seconds(run, device, repeats))
    return Part("optimizer", 1, 0.0, total, 0.0, 28.0 * sum(p.numel() for p in dense.parameters.values()), 0.0, layer=False)


def table(result: dict[str, Any]) -> str:
    """The result as aligned Markdown."""
    lines = ["| part | calls | forward ms | total ms | TFLOP/s | MFU | floor ms | floor / time |", "|" + "---|" * 8]
    for p in result["parts"]:
        mfu = "n/a" if p["mfu"] is None else f"{p['mfu']:.1%}"
        lines.append(
            f"| {p['part']} | {p['calls']} | {p['forward_ms']:.2f} | {p['total_ms']:.2f} | {p['tflops']:.0f} | {mfu} "
            f"| {p['floor_ms']:.2f} | {p['floor_share']:.0%} |"
        )
    whole = "n/a" if result["local_mfu"] is None else f"{result['local_mfu']:.1%}"
    lines.append(f"| all | | | {result['parts_s'] * 1e3:.2f} | | {whole} | {result['floors_s'] * 1e3:.2f} | {result['floor_share']:.0%} |")
    lines.append(f"| step | | | {result['step_s'] * 1e3:.2f} | | | {result['floors_s'] * 1e3:.2f} | {result['step_floor_share']:.0%} |")
    return "\n".join(lines) + "\n"


def write(result: dict[str, Any], out: Path, preset: str) -> None:
    """``local-<preset>.json`` and ``.md`` in ``out``."""
    head = f"# Parts of `{preset}` alone\n\n{page.machine(result)}; {result['samples']} samples, {result['tokens']} events; "
    head += f"matrix product {result['gemm_tflops']:.0f} TFLOP/s (the best one {result['best_gemm_tflops']:.0f}), "
    head += f"copy {result['copy_tb_per_s']:.2f} TB/s in this run.\n\n"
    launched = ", ".join(p["part"] for p in result["parts"] if not p["replayed"])
    tail = f"\nMFU of `all` is that of the layers. Launched by the host, not replayed: {launched}. `step`: training on the same batch, "
    tail += f"{'captured' if result['captured'] else 'not captured'}; with the rate of the best product the floors are "
    tail += f"{result['step_floor_share_at_best']:.0%} of it. Floors are made with the FLOPs that a part needs at least, MFU with "
    tail += f"those of its definition, with which the floors would be {result['step_floor_share_by_definition']:.0%} of the step.\n"
    page.write(out, f"local-{preset}", result, head + table(result) + tail)


@dataclass(frozen=True)
class Call:
    """A module with the arguments of one call, and the dtype of autocast that it ran under."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    autocast: torch.dtype | None

    def __call__(self, device: torch.device) -> Any:
        with torch.autocast(device.type, dtype=self.autocast, enabled=self.autocast is not None):
            return self.module(*self.args, **self.kwargs)


def _record(model: nn.Module, device: torch.device, run: Callable[[], Any]) -> dict[str, list[Call]]:
    """Runs the model once and keeps what each part was called with, detached."""
    calls: dict[str, list[Call]] = {}
    hooks = []
    for path, module in model.named_modules():
        name = next((part for pattern, part in _PARTS.items() if re.fullmatch(pattern, path)), None)
        if name is not None:

            def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], name: str = name) -> None:
                autocast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
                calls.setdefault(name, []).append(Call(module, _leaves(args), _leaves(kwargs), autocast))

            hooks.append(module.register_forward_pre_hook(keep, with_kwargs=True))
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def _leaves(value: Any) -> Any:
    """A copy of nested arguments whose floating tensors are leaves that want gradients if the originals did."""
    if isinstance(value, Tensor):
        return value.detach().requires_grad_(value.requires_grad) if value.is_floating_point() else value
    if isinstance(value, (tuple, list)):
        return type(value)(_leaves(v) for v in value)
    if isinstance(value, dict):
        return {k: _leaves(v) for k, v in value.items()}
    return value


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for v in value:
            yield from _tensors(v)
    elif isinstance(value, dict):
        for v in value.values():
            yield from _tensors(v)
    elif is_dataclass(value) and not isinstance(value, type):
        for f in fields(value):
            yield from _tensors(getattr(value, f.name))


def _time(name: str, group: list[Call], flops: tuple[float, float], device: torch.device, repeats: int) -> Part:
    timed = [_time_call(call, device, repeats) for call in group]
    forward, total, moved = (sum(values) for values in zip(*timed))
    return Part(name, len(group), forward, total, float(flops[0]), moved, float(flops[1]), device.type == "cuda")


def _time_call(call: Call, device: torch.device, repeats: int) -> tuple[float, float, float]:
    """Seconds forward, seconds forward and backward, least bytes."""
    # One stream for all of it: backward passes synchronise with the stream that their parameters' nodes were made on, and a recording
    # cannot wait for another one.
    side = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
    with nullcontext() if side is None else torch.cuda.stream(side):
        shapes = [(t.shape, t.dtype) for t in _tensors(call(device)) if t.requires_grad]
        inputs = [t for t in _tensors((call.args, call.kwargs)) if t.requires_grad] + [
            p for p in call.module.parameters() if p.requires_grad
        ]
        gradients = [torch.randn(shape, dtype=dtype, device=device) for shape, dtype in shapes]

        def both() -> tuple[Tensor | None, ...]:
            made = [t for t in _tensors(call(device)) if t.requires_grad]
            return torch.autograd.grad(made, inputs, gradients, allow_unused=True)

        read = [t for t, grad in zip(inputs, both()) if grad is not None]
        forward, total = (_alone(run, side, device, repeats) for run in (lambda: call(device), both))
    return forward, total, 3.0 * sum(t.nbytes for t in read) + 2.0 * sum(g.nbytes for g in gradients)


def _alone(run: Callable[[], Any], side: torch.cuda.Stream | None, device: torch.device, repeats: int) -> float:
    """Seconds of one run, the median; on a CUDA device of a recorded one.

    :raises RunError: it waits for the device, so that it cannot be recorded.
    """
    if side is None:
        return statistics.median(seconds(run, device, repeats))
    for _ in range(2):
        run()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    try:
        with recording(), torch.cuda.graph(graph, stream=side):
            run()
    except RuntimeError as error:
        raise RunError(f"a part cannot be recorded: {error}", fix="choose kernels that wait for no device") from error
    found = statistics.median(seconds(graph.replay, device, repeats))
    graph.reset()
    return found


def _floor(part: Part, gemm: float, copy: float) -> float:
    return max(part.least_flops / gemm, part.bytes / copy)


def _share(flops: float, seconds: float, best: float | None) -> float | None:
    return None if best is None or not seconds else flops / seconds / best


def _row(part: Part, gemm: float, copy: float, best: float | None) -> dict[str, Any]:
    floor = _floor(part, gemm, copy)
    return {
        "part": part.name,
        "calls": part.calls,
        "forward_ms": part.forward_s * 1e3,
        "total_ms": part.total_s * 1e3,
        "replayed": part.replayed,
        "layer": part.layer,
        "tflops": part.flops / part.total_s / 1e12,
        "mfu": _share(part.flops, part.total_s, best),
        "flops": part.flops,
        "least_flops": part.least_flops,
        "bytes": part.bytes,
        "floor_ms": floor * 1e3,
        "floor_share": floor / part.total_s,
    }

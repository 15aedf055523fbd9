"""Times the eager implementations on a CPU, forward and backward, beside the reference and padded torch attention.

``python -m gem_kernels.eager.bench [--batch 512] [--heads 4] [--width 32] [--mean 50] [--threads 2] [--clock wall] [--json FILE]``

History lengths are log-normal (σ = 1, given mean, at most 512). Each row's result is checked against the reference first; variants are
timed in turn, the median counts. ``--clock cpu`` takes process time, which other processes disturb less.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gem_core import ops
from gem_core.jagged import lengths_to_offsets

Run = Callable[[], Any]


def lengths(batch: int, mean: float, seed: int = 0, longest: int = 512) -> Tensor:
    """``[B]`` int64 log-normal lengths, σ = 1, before clipping of the given mean."""
    draw = torch.randn(batch, generator=torch.Generator().manual_seed(seed))
    return torch.exp(draw - 0.5).mul(mean).round().clamp(0, longest).long()


def cases(args: argparse.Namespace) -> dict[str, tuple[Callable[[str], Run], Run | None, list[Tensor]]]:
    """Name -> (ours by implementation, padded torch attention or None, the leaves)."""
    torch.manual_seed(0)
    long = lengths(args.batch, args.mean)
    offsets, longest, n = lengths_to_offsets(long), int(long.max()), int(long.sum())
    heads, width = args.heads, args.width

    def rows(count: int) -> Tensor:
        return torch.randn(count, heads, width, requires_grad=True)

    q, k, v = rows(n), rows(n), rows(n)
    few = lengths_to_offsets(torch.full((args.batch,), 16))
    few_k, few_v, seeds = rows(16 * args.batch), rows(16 * args.batch), rows(8)
    flags: dict[str, Any] = {"max_q_len": longest, "max_k_len": longest}
    table = torch.randn(heads, 2 * 64 + 1, requires_grad=True)

    def padded(x: Tensor) -> Tensor:
        return ops.jagged_to_padded(x, offsets, longest).transpose(1, 2)

    key_mask = (torch.arange(longest) < long[:, None])[:, None, None, :]
    key_mask = key_mask | (long == 0)[:, None, None, None]

    def back(x: Tensor) -> Tensor:
        return ops.padded_to_jagged(x.transpose(1, 2), offsets)

    def sdpa(mask: Tensor | None, causal: bool) -> Run:
        return lambda: back(F.scaled_dot_product_attention(padded(q), padded(k), padded(v), attn_mask=mask, is_causal=causal))

    def pooled() -> Tensor:
        shared = seeds.transpose(0, 1).expand(args.batch, -1, -1, -1)
        return F.scaled_dot_product_attention(shared, padded(k), padded(v), attn_mask=key_mask).transpose(1, 2).flatten(0, 1)

    scale = width**-0.5
    qkv = [q, k, v]

    def attend(**options: Any) -> Callable[[str], Run]:
        return lambda backend: lambda: ops.jagged_attention(q, k, v, offsets, **flags, **options, backend=backend)

    def point(**options: Any) -> Callable[[str], Run]:
        return lambda backend: lambda: ops.gdpa(q, k, v, offsets, scale_in=scale, **flags, **options, backend=backend)

    def cross(backend: str) -> Run:
        return lambda: ops.gdpa(q, few_k, few_v, offsets, few, max_q_len=longest, max_k_len=16, backend=backend)

    def pool(backend: str) -> Run:
        return lambda: ops.jagged_attention(seeds, k, v, None, offsets, broadcast_q=True, max_k_len=longest, backend=backend)

    def block(backend: str) -> Run:
        return lambda: ops.block_attention(q, k, v, offsets, backend=backend)

    return {
        "softmax full": (attend(), sdpa(key_mask, False), qkv),
        "softmax causal": (attend(causal=True), sdpa(None, True), qkv),
        "softmax causal window 32": (attend(causal=True, window=32), None, qkv),
        "softmax causal bias": (attend(causal=True, bias=ops.RelativeBias(table)), None, [*qkv, table]),
        "block 64": (block, None, qkv),
        "gdpa silu causal": (point(activation="silu", causal=True), None, qkv),
        "gdpa gelu, 16 keys": (cross, None, [q, few_k, few_v]),
        "pooling by 8 seeds": (pool, pooled, [seeds, k, v]),
    }


def measure(variants: dict[str, Run], leaves: list[Tensor], repeats: int, clock: Callable[[], float]) -> dict[str, tuple[float, float]]:
    """Median (forward, backward) milliseconds of each variant, timed in turn."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
    for turn in range(repeats + 1):
        for name, run in variants.items():
            begin = clock()
            out = run()
            middle = clock()
            torch.autograd.grad(out.square().sum(), leaves)
            if turn:
                times[name].append((middle - begin, clock() - middle))
    return {n: (1e3 * statistics.median(f for f, _ in t), 1e3 * statistics.median(b for _, b in t)) for n, t in times.items()}


def check(name: str, ours: Run, reference: Run, leaves: list[Tensor]) -> None:
    """Refuse to time a wrong result."""
    torch.testing.assert_close(ours(), reference(), rtol=1e-4, atol=1e-4, msg=lambda m: f"{name}: {m}")
    pairs = zip(*(torch.autograd.grad(run().square().sum(), leaves) for run in (ours, reference)))
    for grad, expected in pairs:
        torch.testing.assert_close(grad, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()), msg=lambda m: f"{name}: {m}")


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(prog="python -m gem_kernels.eager.bench", description=__doc__)
    options.add_argument("--batch", type=int, default=512)
    options.add_argument("--heads", type=int, default=4)
    options.add_argument("--width", type=int, default=32)
    options.add_argument("--mean", type=float, default=50.0)
    options.add_argument("--threads", type=int, default=torch.get_num_threads())
    options.add_argument("--repeats", type=int, default=7)
    options.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    options.add_argument("--rows", default="", help="only rows whose name contains this")
    options.add_argument("--no-reference", action="store_true", help="do not time the reference (the check still runs it)")
    options.add_argument("--json", type=Path)
    return options


def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    torch.set_num_threads(args.threads)
    clock = time.perf_counter if args.clock == "wall" else time.process_time
    results: dict[str, Any] = {}
    print(f"B {args.batch}, H {args.heads}, D {args.width}, mean length {args.mean:g}, {args.threads} threads, {args.clock} ms, fwd / bwd")
    for name, (ours, padded, leaves) in cases(args).items():
        if args.rows not in name:
            continue
        check(name, ours("eager"), ours("reference"), leaves)
        variants: dict[str, Run] = {"eager": ours("eager")}
        if not args.no_reference:
            variants["reference"] = ours("reference")
        if padded is not None:
            variants["padded sdpa"] = padded
        found = measure(variants, leaves, args.repeats, clock)
        results[name] = found
        print(f"{name:28s}" + "   ".join(f"{n} {f:8.2f} / {b:8.2f}" for n, (f, b) in found.items()), flush=True)
    if args.json:
        about = {
            "torch": torch.__version__,
            "cpu": platform.processor() or platform.machine(),
            "seed": 0,
            **vars(args),
            "json": str(args.json),
        }
        args.json.write_text(json.dumps({"about": about, "milliseconds": results}, indent=1))


if __name__ == "__main__":
    main()

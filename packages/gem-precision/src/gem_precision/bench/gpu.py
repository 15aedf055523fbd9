"""Quantise kernels against the copy rate and ``torch.compile``, and FP8 linears against bf16. Needs a CUDA device.

Every variant is checked before it is timed. Times are medians of CUDA-graph replays, the variants interleaved, with an eager column.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gem_core import ops
from gem_core.errors import DeviceError, NumericsError
from gem_core.ops.contract import OpPrecision
from gem_precision.formats import quantize_mx
from gem_precision.fused import ACTIVATIONS
from gem_precision.kernels.quantize import TILES, quantize_matrix
from gem_precision.linear import LowPrecisionLinear, convert_linear
from gem_precision.policy import LinearPolicy, Operand, fp8_linear, mx_linear
from gem_precision.site import Site

ROWS = 262_144
FLOORS = {"y": 26.0, "dx": 25.0, "dw": 24.0}


def require_cuda() -> str:
    """Name of the device.

    :raises DeviceError: there is none.
    """
    if not torch.cuda.is_available():
        raise DeviceError("this benchmark needs a CUDA device", where="gemrec bench precision", fix="run it on a GPU machine")
    return torch.cuda.get_device_name()


def interleaved(variants: Mapping[str, Callable[[], Any]], rounds: int = 15) -> dict[str, dict[str, float]]:
    """{variant: {"graph_ms", "eager_ms"}}: medians over rounds in which every variant takes its turn, one after the other.

    A turn is as many calls in a row as take about five milliseconds, so that the time to submit a graph is not measured.
    """
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    side = torch.cuda.Stream()
    for name, run in variants.items():
        with torch.cuda.stream(side):
            for _ in range(3):
                run()
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            run()
    turns = {name: max(1, math.ceil(5.0 / min(_mean(graph.replay, 1) for _ in range(2)))) for name, graph in graphs.items()}
    times: dict[str, dict[str, list[float]]] = {name: {"graph_ms": [], "eager_ms": []} for name in variants}
    for _ in range(rounds):
        for name, run in variants.items():
            times[name]["graph_ms"].append(_mean(graphs[name].replay, turns[name]))
            times[name]["eager_ms"].append(_mean(run, turns[name]))
    return {name: {kind: statistics.median(values) for kind, values in t.items()} for name, t in times.items()}


def _mean(run: Callable[[], Any], times: int) -> float:
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(times):
        run()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) / times


def quantise_rates(columns: int = 1024, tiles: Mapping[str, list[dict[str, Any]]] | None = None) -> list[dict[str, Any]]:
    """MX 1x32 of ``[262144, columns]`` bf16 in one direction and in both, against a device copy and ``torch.compile`` of the codec.

    ``share``: bytes that must move / time, over the copy rate of the same run (outside a graph, where a copy is a kernel).
    """
    require_cuda()
    x = torch.randn(ROWS, columns, device="cuda", dtype=torch.bfloat16)
    operand = Operand()
    compiled = torch.compile(lambda t: (lambda q: (q.data, q.scales))(quantize_mx(t)))
    wanted = quantize_mx(x[:4096])
    for found in (quantize_matrix(x, operand).rows, quantize_matrix(x, operand, operand).rows):
        assert found is not None
        if not torch.equal(found.data[:4096].view(torch.uint8), wanted.data.view(torch.uint8)):
            raise NumericsError("the kernel differs from the codec", where="quantize_matrix")
    target = torch.empty_like(x)
    variants: dict[str, Callable[[], Any]] = {
        "copy": lambda: target.copy_(x),
        "torch.compile": lambda: compiled(x),
    }
    tiles = tiles or {"rows": [TILES["gluon_rows"]], "both": [TILES["gluon_both_mx"]]}
    for tile in tiles["rows"]:
        variants[f"one direction {tile}"] = partial(quantize_matrix, x, operand, tile=tile)
    for tile in tiles["both"]:
        variants[f"both {tile}"] = partial(quantize_matrix, x, operand, operand, tile=tile)
    size = x.numel()
    moved = {"copy": 4 * size, "torch.compile": size * (2 + 33 / 32), "one": size * (2 + 33 / 32), "both": size * (2 + 66 / 32)}
    times = interleaved(variants)
    times["copy"]["graph_ms"] = times["copy"]["eager_ms"]
    copy_rate = moved["copy"] / times["copy"]["eager_ms"]
    rows = []
    for name, t in times.items():
        rate = moved[name if name in moved else name.split()[0]] / t["graph_ms"]
        rows.append({"variant": name, **t, "gb_per_s": rate / 1e6, "share": rate / copy_rate})
    return rows


BEFORES = ("plain", "norm", "relu", "silu", "gelu")
"""What comes before a linear."""


def linear_speed(
    k: int, n: int, policies: Mapping[str, LinearPolicy] | None = None, befores: Sequence[str] = BEFORES, rows: int = ROWS
) -> list[dict[str, Any]]:
    """Forward and backward of a ``k -> n`` linear, quantising included, against bf16; plain, behind a norm, behind activations.

    :raises NumericsError: an output or gradient below the SQNR floors; nothing is timed then.
    """
    require_cuda()
    policies = policies or {"fp8-block": fp8_linear("block"), "fp8-rowwise": fp8_linear("rowwise", wgrad=False)}
    x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    g = torch.randn(rows, n, device="cuda", dtype=torch.bfloat16)
    plain = nn.Linear(k, n, bias=False, device="cuda", dtype=torch.bfloat16)
    nets: dict[str, nn.Module] = {"bf16": plain}
    for name, policy in policies.items():
        linear = nn.Linear(k, n, bias=False, device="cuda", dtype=torch.bfloat16)
        linear.weight.data.copy_(plain.weight.data)
        nets[name] = convert_linear(linear, Site(name, "linear", [(name, policy)]))
    rows_out = []
    for step in befores:
        variants: dict[str, Callable[[], Any]] = {}
        results: dict[str, tuple[Tensor, ...]] = {}
        for name, net in nets.items():
            forward = _behind(step, x, net)

            def both(forward: Callable[[], Tensor] = forward, net: Any = net) -> tuple[Tensor, ...]:
                y = forward()
                return (y, *torch.autograd.grad(y, (x, net.weight), g))

            variants[name], results[name] = both, both()
        for name in policies:
            _check(results["bf16"], results[name], f"{name} {step} {k} -> {n}")
        del results
        times = interleaved(variants)
        for name, t in times.items():
            ratio = times["bf16"]["graph_ms"] / t["graph_ms"]
            rows_out.append({"recipe": name, "before": step, "k": k, "n": n, **t, "ratio": ratio})
    return rows_out


def _behind(before: str, x: Tensor, net: nn.Module) -> Callable[[], Tensor]:
    if before == "plain":
        return lambda: net(x)
    if before == "norm":
        return lambda: net.after_norm(x, "rms", 1e-6) if isinstance(net, LowPrecisionLinear) else net(ops.norm(x))
    return lambda: net.after_activation(x, before) if isinstance(net, LowPrecisionLinear) else net(ACTIVATIONS[before](x))


def attention_speed(samples: int = 512, longest: int = 1024, heads: int = 4, width: int = 128) -> list[dict[str, Any]]:
    """Forward, and forward with backward, of self-attention over ``samples`` histories of 1 to ``longest`` events: bf16 against quantised.

    :raises NumericsError: a result below 15 dB against bf16.
    """
    require_cuda()
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, longest + 1, (samples,), generator=generator)
    offsets = F.pad(lengths.cumsum(0), (1, 0)).to("cuda", torch.int32)
    n = int(lengths.sum())
    q, k, v, g = (torch.randn(n, heads, width, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    for t in (q, k, v):
        t.requires_grad_()
    flops = 4.0 * heads * width * float(lengths.double().square().sum())
    precisions = {"bf16": None, "fp8": OpPrecision(block=(128, 128)), "mxfp8": OpPrecision()}
    found = []
    for op in ("jagged_attention", "gdpa"):
        options = {"activation": "fast_gelu", "scale_in": width**-0.5} if op == "gdpa" else {}
        runs: dict[str, Callable[[], Tensor]] = {}
        for name, precision in precisions.items():
            runs[name] = partial(getattr(ops, op), q, k, v, offsets, max_q_len=longest, max_k_len=longest, precision=precision, **options)
        reference = runs["bf16"]().detach()
        for name in ("fp8", "mxfp8"):
            _check((reference.flatten(1),), (runs[name]().detach().flatten(1),), f"{op} {name}", {"out": 15.0})
        forward = interleaved({name: torch.no_grad()(run) for name, run in runs.items()})
        both = interleaved({name: partial(_with_gradients, run, (q, k, v), g) for name, run in runs.items()})
        for name in precisions:
            ms, total = forward[name]["graph_ms"], both[name]["graph_ms"]
            found.append(
                {
                    "op": op, "precision": name, "forward_ms": ms, "both_ms": total, "forward_tflops": flops / ms / 1e9,
                    "ratio": forward["bf16"]["graph_ms"] / ms, "ratio_both": both["bf16"]["graph_ms"] / total,
                }
            )  # fmt: skip
    return found


def _with_gradients(run: Callable[[], Tensor], inputs: tuple[Tensor, ...], g: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(run(), inputs, g)


def _check(reference: tuple[Tensor, ...], found: tuple[Tensor, ...], where: str, floors: Mapping[str, float] = FLOORS) -> None:
    for name, a, b in zip(floors, reference, found):
        a, b = a.detach()[:8192].double(), b.detach()[:8192].double()
        sqnr = float(10 * torch.log10(a.square().sum() / (a - b).square().sum()))
        if not sqnr >= floors[name]:
            raise NumericsError(f"{name} has {sqnr:.1f} dB, the floor is {floors[name]:.0f}", where=where)


SHAPES: Mapping[tuple[int, int], Sequence[str]] = {
    (512, 512): ("plain", "norm"),
    (512, 1536): ("plain", "norm"),
    (1024, 1024): BEFORES,
    (1024, 2048): ("plain", "norm"),
    (1024, 3072): ("plain", "norm"),
    (2048, 2048): BEFORES,
    (4096, 4096): BEFORES,
}
"""(k, n) that the table of refused shapes is made of, and what is timed before them."""


def run(out: Path, shapes: Mapping[tuple[int, int], Sequence[str]] = SHAPES) -> dict[str, Any]:
    """Everything; writes ``precision.json`` and the speed table ``speed-sm_XX.json`` (see `gem_precision.speed`) into ``out``."""
    device = require_cuda()
    major, minor = torch.cuda.get_device_capability()
    block, rowwise = {"fp8-block": fp8_linear("block")}, {"fp8-rowwise": fp8_linear("rowwise", wgrad=False)}
    if major >= 10:
        block["mxfp8"] = mx_linear()
    candidates = {
        "rows": [TILES["gluon_rows"], {"ROWS": 32, "WIDTH": 128, "num_warps": 4}, TILES["mx"]],
        "both": [TILES["gluon_both_mx"], TILES["gluon_both"], TILES["mx_both"]],
    }
    header = {
        "device": device,
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "rows": ROWS,
        "command": "gemrec bench precision",
    }
    result = header | {"quantise": quantise_rates(tiles=candidates)}
    speeds = []
    for (k, n), befores in shapes.items():
        # two passes over every operand: a plain square tells
        speeds += linear_speed(k, n, rowwise, ("plain",))[1:] if k == n else []
        speeds += linear_speed(k, n, block, befores)
    result |= {"linear": speeds, "attention": attention_speed()}
    out.mkdir(parents=True, exist_ok=True)
    (out / "precision.json").write_text(json.dumps(result, indent=1) + "\n")
    family = {"fp8-block": "fp8128", "fp8-rowwise": "fp80", "mxfp8": "mx32"}
    rules = [
        {"family": family[r["recipe"]], "k": r["k"], "n": r["n"], "ratio": round(r["ratio"], 3)}
        for r in speeds
        if r["recipe"] in family and r["before"] == "plain"
    ]
    (out / f"speed-sm_{major}{minor}.json").write_text(json.dumps(header | {"rules": rules}, indent=1) + "\n")
    return result

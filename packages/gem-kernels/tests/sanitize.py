"""Every implementation of this package at small shapes, to be run under compute-sanitizer::

    python packages/gem-kernels/tests/sanitize.py                                     # compiles, without the tool
    compute-sanitizer --tool memcheck  --error-exitcode 1 python packages/gem-kernels/tests/sanitize.py
    compute-sanitizer --tool racecheck --error-exitcode 1 python packages/gem-kernels/tests/sanitize.py

``--ops`` and ``--impls`` choose among ops and implementations. Processes that are given the same empty folder as ``--share`` divide the
calls among themselves; ``--seconds`` begins no call after that time, so that the tool still reports.
``--control`` runs kernels of a few lines instead, whose order is plain: what racecheck reports of them it cannot see, see
`sanitize_control.py`.
With ``--target-processes application-only --kernel-name-exclude kns=at6native`` the tool leaves compilers and PyTorch's own kernels alone.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import sanitize_control
import torch
from torch import Tensor

from gem_core import ops, plugins
from gem_core.hookspecs import KernelSpec
from gem_core.ops import dispatch
from gem_core.ops.contracts import contracts
from gem_core.ops.explain import problem_of
from gem_core.testing.kernel_cases import Call, Draw, cases
from gem_core.testing.kernels import flat
from gem_kernels import triton
from gem_kernels.triton.hopper import launch

DENSE = {
    "norm_linear": {"x": (200, 320), "w": (136, 320), "b": (136,)},
    "linear_norm": {"x": (200, 136), "w": (320, 136), "b": (320,)},
    "mlp": {"x": (200, 128), "w1": (256, 128), "b1": (256,), "w2": (128, 256), "b2": (128,)},
}
"""Shapes of tensors: rows that fill no tile, rows of two tiles."""
FEW = "few keys, backward candidate "


def few_keys(op: str) -> Call:
    """Attention of samples with up to 128 keys, some without keys or rows; as many as there are SMs."""
    draw, times = Draw(torch.bfloat16, "cuda"), 14
    fixed = {"q_offsets": draw.offsets((0, 1, 65, 200, 128) * times), "k_offsets": draw.offsets((3, 0, 64, 99, 128) * times)}
    rows = {"q": 394 * times, "k": 294 * times, "v": 294 * times}
    return Call({n: draw.packed(m, 2, 128) for n, m in rows.items()}, lambda t: t | fixed | {"max_q_len": 200, "max_k_len": 128})


@contextmanager
def backward_candidate(number: int) -> Iterator[None]:
    """The Hopper backward pass takes this one of its candidates, the last one where there are fewer."""
    usual = launch.choose

    def choose(kernel: str, facts: object, info: object, offered: Callable[[], list[dict]], run: object) -> dict:
        found = offered()
        return found[min(number, len(found) - 1) if kernel == "hopper.backward" else 0]

    launch.choose = choose
    try:
        yield
    finally:
        launch.choose = usual


def hopper_call(op: str) -> Call:
    """The conformance kit's cases are too narrow for the Hopper kernels."""
    draw = Draw(torch.bfloat16, "cuda")
    if op in DENSE:
        return Call({n: draw.normal(*shape) for n, shape in DENSE[op].items()}, lambda t: t)
    if op == "norm_gdpa":
        fixed = {"q_offsets": draw.offsets((300, 5)), "k_offsets": draw.offsets((128, 70)), "max_q_len": 300, "max_k_len": 128}
        return Call({"q": draw.packed(305, 2, 128), "k": draw.packed(198, 2, 128), "v": draw.packed(198, 2, 128)}, lambda t: t | fixed)
    more = {"activation": "silu"} if op == "gdpa" else {}
    offsets = draw.offsets((0, 1, 65, 200, 128))
    if op == "block_attention":
        angle = draw.normal(200, 64).float()
        fixed = {"offsets": offsets, "rotary": (angle.cos(), angle.sin())}
        return Call({n: draw.packed(394, 2, 128) for n in ("q", "k", "v")}, lambda t: t | fixed)
    fixed = {"q_offsets": offsets, "max_q_len": 200, "max_k_len": 200, "causal": True, **more}
    return Call({n: draw.packed(394, 2, 64) for n in ("q", "k", "v")}, lambda t: t | fixed, dict.fromkeys(("q", "k", "v"), 394), 394)


def run(call: Call, op: str, backend: str) -> None:
    leaves = {n: t.detach().requires_grad_() for n, t in call.tensors.items()}
    results: list[Tensor] = [r for r in flat(getattr(ops, op)(**call.arguments(leaves), backend=backend)) if r.requires_grad]
    if results:
        torch.autograd.grad(results, list(leaves.values()), [torch.ones_like(r) for r in results], allow_unused=True)


def calls(wanted: list[str], impls: list[str]) -> Iterator[tuple[KernelSpec, str, Callable[[Draw], Call]]]:
    """Every implementation's cases with their names, those of the Hopper family first."""
    for spec in sorted(triton.specs(), key=lambda s: not s.name.startswith("hopper")):
        if spec.op not in contracts() or (wanted and spec.op not in wanted) or (impls and spec.name not in impls):
            continue
        hopper = spec.name.startswith("hopper")
        found = {n: case for n, case in cases(spec.op).items() if n != "many short samples" and (hopper or not n.startswith("width"))}
        if hopper:
            found = (found if spec.op == "norm_gdpa" else {}) | {"hopper": lambda _draw, op=spec.op: hopper_call(op)}
            if spec.name == "hopper-only":
                found |= {f"{FEW}{i}": lambda _draw, op=spec.op: few_keys(op) for i in range(3)}
        for name, case in found.items():
            yield spec, name, case


def claim(folder: Path | None, number: int) -> bool:
    """Whether this process is the first to ask for call ``number``."""
    try:
        return folder is None or not (folder / str(number)).touch(exist_ok=False)
    except FileExistsError:
        return False


def main() -> None:
    began = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", nargs="*", default=[])
    parser.add_argument("--impls", nargs="*", default=[])
    parser.add_argument("--share", type=Path)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--control", action="store_true")
    given = parser.parse_args()
    if given.control:
        sanitize_control.main()
        return
    plugins.manager()
    torch.zeros(1, device="cuda")
    print(f"{time.monotonic() - began:.1f} s: ready", flush=True)
    ran = 0
    for number, (spec, name, case) in enumerate(calls(given.ops, given.impls)):
        if time.monotonic() - began > given.seconds:
            print("out of time")
            break
        if not claim(given.share, number):
            continue
        call = case(Draw(torch.bfloat16, "cuda"))
        with dispatch.offering(spec):
            if not spec.supports(problem_of(spec.op, **call.arguments(call.tensors))):
                continue
            with backward_candidate(int(name.removeprefix(FEW))) if name.startswith(FEW) else nullcontext():
                run(call, spec.op, spec.name)
        torch.cuda.synchronize()
        print(f"{time.monotonic() - began:.1f} s: {spec.op} {spec.name}: {name}", flush=True)
        ran += 1
    print(f"{ran} calls, forward and backward")


if __name__ == "__main__":
    main()

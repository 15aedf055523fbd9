"""The reference implementations pass the conformance kit, and the kit catches what it should."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from gem_core import ops
from gem_core.hookspecs import KernelSpec
from gem_core.ops import dispatch
from gem_core.ops.contract import no
from gem_core.testing.kernels import KernelConformance, poisoned_empty

REFERENCE = {spec.op: spec for spec in ops.builtin_specs()}
IN_FP32 = ("jagged_attention", "gdpa", "jagged_split", "jagged_expand", "jagged_to_padded", "padded_to_jagged")

for _op, _spec in REFERENCE.items():
    _name = f"Test{_op.title().replace('_', '')}"
    _dtypes = (torch.float32,) if _op in IN_FP32 else (torch.float32, torch.bfloat16)
    globals()[_name] = type(_name, (KernelConformance,), {"spec": _spec, "dtypes": _dtypes})


# --- the kit itself: each fault below must be found by the rule named beside it ---

GDPA = REFERENCE["gdpa"]


def forward_only(change: Any) -> KernelSpec:
    """The gdpa reference with ``change`` made to its result."""

    def forward(problem: Any, *tensors: Any) -> Any:
        out, saved = GDPA.forward(problem, *tensors)
        return change(problem, out, tensors), saved

    return dataclasses.replace(GDPA, name="faulty", forward=forward)


def backward_only(change: Any) -> KernelSpec:
    def backward(problem: Any, saved: Any, dout: Any, needs: Any) -> Any:
        return change(GDPA.backward(problem, saved, dout, needs), saved, dout)

    return dataclasses.replace(GDPA, name="faulty", backward=backward)


def _unwritten(problem: Any, out: Any, tensors: Any) -> Any:
    result = torch.empty_like(out)
    result[1:] = out[1:]
    return result


def _slack_read(problem: Any, out: Any, tensors: Any) -> Any:
    if tensors[3] is not None:
        out[int(tensors[3][-1]) :] = 1.0
    return out


def _writes_input(problem: Any, out: Any, tensors: Any) -> Any:
    tensors[0][:1].zero_()
    return out


def _swaps_kv_gradients(grads: Any, saved: Any, dout: Any) -> Any:
    return grads[0], grads[2], grads[1], *grads[3:]


def _drops_bias_gradient(grads: Any, saved: Any, dout: Any) -> Any:
    return (*grads[:5], None if grads[5] is None else torch.zeros_like(grads[5]), grads[6])


def _leaks(problem: Any, out: Any, tensors: Any) -> Any:
    return out + 0 * tensors[1][: int(tensors[4][-1])].sum().to(out.dtype)


def _contiguous(t: torch.Tensor) -> torch.Tensor:
    """The memory of ``t`` read as if its rows lay one after another."""
    return t.as_strided(t.shape, torch.empty(t.shape).stride()) if t.numel() else t


def _without_k(problem: Any, saved: Any, dout: Any, needs: Any) -> Any:
    grads = GDPA.backward(problem, saved, dout, needs)
    return grads if needs[0] or grads[1] is None else (grads[0], torch.zeros_like(grads[1]), *grads[2:])


def _of_rows(problem: Any, *tensors: Any) -> Any:
    return GDPA.forward(problem, _contiguous(tensors[0]), *tensors[1:])


def _of_rows_backward(problem: Any, saved: Any, dout: Any, needs: Any) -> Any:
    return GDPA.backward(problem, saved, _contiguous(dout), needs)


def _without_option(problem: Any, *tensors: Any) -> Any:
    return GDPA.forward(dataclasses.replace(problem, options=tuple(o for o in problem.options if o[0] != "causal")), *tensors)


def _needs_samples(problem: Any, out: Any, tensors: Any) -> Any:
    tensors[4].diff().max()
    return out


FAULTS = {
    "off by 1e-3": (forward_only(lambda p, out, t: out * 1.001), "test_matches_reference", "full"),
    "one element": (forward_only(lambda p, out, t: _one_wrong(out)), "test_matches_reference", "full"),
    "unwritten": (forward_only(_unwritten), "test_matches_reference", "full"),
    "slack": (forward_only(_slack_read), "test_matches_reference", "full"),
    "gradients swapped": (backward_only(_swaps_kv_gradients), "test_matches_reference", "full"),
    "no bias gradient": (backward_only(_drops_bias_gradient), "test_matches_reference", "position bias"),
    "writes its input": (forward_only(_writes_input), "test_inputs_are_left_alone", None),
    "leaks": (forward_only(_leaks), "test_neighbours_do_not_leak", None),
    "gradients together only": (dataclasses.replace(GDPA, name="faulty", backward=_without_k), "test_only_wanted_gradients", None),
    "strides": (dataclasses.replace(GDPA, name="faulty", forward=_of_rows), "test_strided_inputs", None),
    "strides of gradients": (dataclasses.replace(GDPA, name="faulty", backward=_of_rows_backward), "test_noncontiguous_gradient", None),
    "ignores causal": (
        dataclasses.replace(GDPA, name="faulty", forward=_without_option), "test_matches_reference", "causal, fewer keys than queries",
    ),
    "no empty batch": (forward_only(_needs_samples), "test_matches_reference", "empty batch"),
    "random": (forward_only(lambda p, out, t: out + 1e-7 * torch.randn_like(out)), "test_deterministic", None),
    "refuses all": (dataclasses.replace(GDPA, name="faulty", supports=lambda p: no("never")), "test_supports_something", None),
    "no reason": (dataclasses.replace(GDPA, name="faulty", supports=lambda p: no("")), "test_supports_something", None),
}  # fmt: skip


def _one_wrong(out: torch.Tensor) -> torch.Tensor:
    if out.numel():
        out.view(-1)[0] += 0.1
    return out


@pytest.mark.parametrize("fault", FAULTS)
def test_kit_finds(fault: str) -> None:
    spec, rule, case = FAULTS[fault]
    kit = type("Kit", (KernelConformance,), {"spec": spec})()
    arguments = {"case": case, "dtype": torch.float32} if case else {"dtype": torch.float32}
    if rule == "test_supports_something":
        arguments = {}
    told = rule.removeprefix("test_").replace("_", " ")
    with dispatch.offering(spec), pytest.raises(AssertionError, match=f"rule '{told}' is broken: "):
        getattr(kit, rule)(**arguments)


def test_poisoned_empty_restores() -> None:
    before = torch.empty, torch.Tensor.new_empty
    with poisoned_empty():
        assert torch.empty(3).isnan().all()
        assert torch.ones(2).new_empty(4).isnan().all()
    assert (torch.empty, torch.Tensor.new_empty) == before

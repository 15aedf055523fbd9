"""Conformance kit for kernels: subclass `KernelConformance` in a test file, and pytest runs what every implementation of an op must keep.

    from gem_core.testing.kernels import KernelConformance

    class TestMine(KernelConformance):
        spec = KernelSpec("gdpa", "mine", forward, backward, supports)
        device = "cuda"
        dtypes = (torch.float32, torch.bfloat16)

Results and gradients are compared with the float64 reference on the same numbers. The bounds come from the arithmetic: with ε the spacing
of the dtype at 1, the error relative to the norm of the whole tensor is at most ε for results and 2 ε for gradients of a 16-bit dtype, 1e-5
in float32 (products accumulated in fp32), 1e-10 in float64; no single element is off by more than 8 times that of the largest one. Where a
gradient is 0 because terms cancel, its error is measured against the gradient of the result. Cases that the implementation says it does not
support are skipped with its reason; it must support one at least.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from gem_core import ops
from gem_core.hookspecs import KernelSpec
from gem_core.ops import dispatch
from gem_core.ops.contract import Problem
from gem_core.ops.contracts import contracts
from gem_core.ops.explain import problem_of
from gem_core.testing.kernel_cases import MANY_SAMPLES, Call, Case, Draw, cases
from gem_core.testing.rules import Rules

SMALL_CASES = {
    "jagged_attention": "causal, fewer keys than queries",
    "gdpa": "bias, candidates, context",
    "block_attention": "rotary",
    "norm": "rms, affine",
    "norm_linear": "rms, affine",
    "linear_norm": "rms, affine",
    "mlp": "norm rms, biases, residual",
    "norm_gdpa": "cross",
}
"""The case by which rules that are not about options are tested, if the implementation supports it."""


def bound(dtype: torch.dtype, gradient: bool) -> float:
    """Largest relative error of a correct implementation."""
    if dtype == torch.float64:
        return 1e-10
    if dtype == torch.float32:
        return 1e-5
    return torch.finfo(dtype).eps * (2 if gradient else 1)


def compare(actual: Tensor, expected: Tensor, limit: float, what: str, scale: float = 0.0) -> None:
    """Fail with ``what`` unless ``actual`` is ``expected`` (float64) within ``limit``; infinities must be the same.

    ``scale`` takes the place of the norm of ``expected`` where that is 0.
    """
    assert actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    got, want = actual.detach().double().cpu(), expected.detach().double().cpu()
    assert not got.isnan().any(), f"{what}: {int(got.isnan().sum())} of {got.numel()} elements are NaN"
    infinite = want.isinf()
    same = torch.equal(got[infinite], want[infinite]) and not bool(got[~infinite].isinf().any())
    assert same, f"{what}: infinities differ"
    error, want = (got - want)[~infinite], want[~infinite]
    if error.numel() == 0:
        return
    norm, largest = float(want.norm()), float(want.abs().max())
    if norm <= 1e-9 * scale:
        norm = largest = scale
    size, worst = float(error.norm()), float(error.abs().max())
    assert size <= limit * norm, f"{what}: relative error {size / max(norm, 1e-300):.2e} > {limit:.1e}"
    assert worst <= 8 * limit * largest, f"{what}: an element is off by {worst:.2e}, the largest is {largest:.2e} (limit {limit:.1e})"


@contextmanager
def poisoned_empty() -> Iterator[None]:
    """For a with-block, torch.empty and its kin give NaN (integers: the largest), so that an element nobody wrote is seen."""
    before = {name: getattr(torch, name) for name in ("empty", "empty_like", "empty_strided")}
    new_empty = Tensor.new_empty

    def poison(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(make)
        def made(*args: Any, **kwargs: Any) -> Tensor:
            x = make(*args, **kwargs)
            if x.is_floating_point():
                return x.fill_(torch.nan)
            return x if x.dtype == torch.bool else x.fill_(torch.iinfo(x.dtype).max)

        return made

    try:
        for name, make in before.items():
            setattr(torch, name, poison(make))
        Tensor.new_empty = poison(new_empty)  # type: ignore[method-assign]
        yield
    finally:
        for name, make in before.items():
            setattr(torch, name, make)
        Tensor.new_empty = new_empty  # type: ignore[method-assign]


@contextmanager
def deterministic() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def flat(result: Any) -> list[Tensor]:
    """The float tensors of a public function's result, in order."""
    if isinstance(result, Tensor):
        return [result] if result.is_floating_point() else []
    return [t for part in result for t in flat(part)]


class KernelConformance(Rules):
    """Set ``spec``; override ``device``, ``dtypes``, or ``only`` (names of cases) to test less at a time."""

    spec: KernelSpec
    device: str = "cpu"
    dtypes: Sequence[torch.dtype] = (torch.float32,)
    only: Sequence[str] | None = None

    def pytest_generate_tests(self, metafunc: Any) -> None:
        if "case" in metafunc.fixturenames:
            names = [n for n in cases(self.spec.op) if self.only is None or n in self.only]
            metafunc.parametrize("case", names)
        if "dtype" in metafunc.fixturenames:
            metafunc.parametrize("dtype", self.dtypes, ids=[str(d).removeprefix("torch.") for d in self.dtypes])

    @pytest.fixture(autouse=True)
    def _offered(self) -> Iterator[None]:
        with dispatch.offering(self.spec):
            yield

    # --- the rules ---

    def test_supports_something(self) -> None:
        """It supports one problem at least, and gives a reason for each that it refuses."""
        answers = [self.spec.supports(self.problem(case(Draw(self.dtypes[0], self.device)))) for case in cases(self.spec.op).values()]
        assert any(answers), f"no case is supported: {answers[0].reason}"
        assert all(a.reason for a in answers if not a), "a refusal must give its reason"

    def test_matches_reference(self, case: str, dtype: torch.dtype) -> None:
        """Results, in the tensors' dtype, and all gradients; slack rows give zeros and get zeros; every element is written."""
        draw = Draw(dtype, self.device, torch.int32 if len(case) % 2 else torch.int64)
        call = self.supported(cases(self.spec.op)[case], draw)
        with poisoned_empty():
            results, grads = self.run(call, self.spec.name)
        self.check(call, results, grads, dtype)

    def test_only_wanted_gradients(self, dtype: torch.dtype) -> None:
        """Each gradient alone is the one it is among all."""
        call = self.small(dtype)
        _, every = self.run(call, self.spec.name)
        for name in call.tensors:
            _, alone = self.run(call, self.spec.name, (name,))
            compare(alone[name], every[name], bound(dtype, True), f"gradient of {name} when it is the only one wanted")

    def test_strided_inputs(self, dtype: torch.dtype) -> None:
        """Views with a row stride, as from a fused projection, are read where they are."""
        call = self.small(dtype)
        strided = copy.copy(call)
        strided.tensors = {n: _with_row_stride(t) for n, t in call.tensors.items()}
        results, grads = self.run(strided, self.spec.name)
        self.check(call, results, grads, dtype)

    def test_noncontiguous_gradient(self, dtype: torch.dtype) -> None:
        """The gradient of the result may have any strides."""
        call = self.small(dtype)
        _, grads = self.run(call, self.spec.name, weigh=lambda w: w.mT.contiguous().mT if w.dim() > 1 else w)
        _, expected = self.reference(call)
        for name, grad in grads.items():
            compare(grad, expected[name], bound(dtype, True), f"gradient of {name} from a non-contiguous gradient")

    def test_neighbours_do_not_leak(self, dtype: torch.dtype) -> None:
        """NaN in one sample changes no other sample's result."""
        if "k_offsets" not in contracts()[self.spec.op].tensors and self.spec.op != "block_attention":
            pytest.skip("this op has no samples")
        call = self.small(dtype, _has_own_keys)
        arguments = call.arguments(call.tensors)
        keys, queries = _offsets(arguments)
        assert keys is not None
        assert queries is not None
        bounds = keys.tolist()
        sick = max(range(len(bounds) - 1), key=lambda b: bounds[b + 1] - bounds[b])
        poisoned = copy.copy(call)
        poisoned.tensors = {n: t.clone() for n, t in call.tensors.items()}
        for name in ("k", "v"):
            poisoned.tensors[name][bounds[sick] : bounds[sick + 1]] = torch.nan
        rows = queries.tolist()
        healthy = torch.ones(call.tensors["q"].shape[0], dtype=torch.bool)
        healthy[rows[sick] : rows[sick + 1]] = False
        (clean, *_), _ = self.run(call, self.spec.name)
        (result, *_), _ = self.run(poisoned, self.spec.name)
        compare(result[healthy], clean[healthy], bound(dtype, False), "results of samples beside one that is full of NaN")

    def test_pairs_with_reference(self, dtype: torch.dtype) -> None:
        """Saved tensors are the contract's: forward and backward may each be another implementation's."""
        if self.spec.backward is None:
            pytest.skip("has no backward of its own")
        call = self.small(dtype)
        other = next(s for s in ops.builtin_specs() if s.op == self.spec.op)
        for forward, backward in ((self.spec, other), (other, self.spec)):
            pair = KernelSpec(self.spec.op, "pair", forward.forward, backward.backward, self.spec.supports)
            with dispatch.offering(pair):
                results, grads = self.run(call, "pair")
            self.check(call, results, grads, dtype)

    def test_deterministic(self, dtype: torch.dtype) -> None:
        """With deterministic algorithms on, repeated runs agree bit for bit."""
        call = self.small(dtype)
        with deterministic():
            problem = self.problem(call)
            if not self.spec.supports(problem):
                pytest.skip(self.spec.supports(problem).reason)
            first, second = self.run(call, self.spec.name), self.run(call, self.spec.name)
        assert all(torch.equal(a, b) for a, b in zip(first[0], second[0])), "results differ between runs"
        for name in first[1]:
            assert torch.equal(first[1][name], second[1][name]), f"gradients of {name} differ between runs"

    def test_inputs_are_left_alone(self, dtype: torch.dtype) -> None:
        """Neither the forward nor the backward pass writes to the tensors that it is given."""
        call = self.small(dtype)
        before = {n: t.clone() for n, t in call.tensors.items()}
        self.run(call, self.spec.name)
        for name, t in call.tensors.items():
            assert torch.allclose(t, before[name], rtol=0, atol=0, equal_nan=True), f"{name} was changed"

    @pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
    def test_compiled(self) -> None:
        """Under torch.compile(fullgraph=True) results and gradients are the same; opcheck finds nothing."""
        dtype = self.dtypes[0]
        call = self.small(dtype)
        torch._dynamo.reset()
        results, grads = self.run(call, self.spec.name, wrap=lambda f: torch.compile(f, backend="aot_eager", fullgraph=True))
        self.check(call, results, grads, dtype)

    @pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
    def test_opcheck(self) -> None:
        """`torch.library.opcheck`: schema, no aliases, fake kernel, autograd registration."""
        dtype = self.dtypes[0]
        call = self.small(dtype)
        seen: list[tuple[Any, tuple[Any, ...]]] = []
        with _recording(self.spec.op, seen):
            self.run(call, self.spec.name)
        op, args = seen[0]
        checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
        # opcheck compares gradients of two runs more closely than atomic additions repeat
        with deterministic():
            if self.spec.supports(self.problem(call)):
                torch.library.opcheck(op, _finite(args), test_utils=checks)
                return
        torch.library.opcheck(op, _finite(args), test_utils=checks[:3])

    def test_many_samples(self) -> None:
        """More (sample, head) pairs than a CUDA grid has rows in y."""
        if not self.device.startswith("cuda"):
            pytest.skip("a limit of CUDA grids")
        if self.spec.op not in MANY_SAMPLES:
            pytest.skip("this op has no samples")
        dtype = self.dtypes[0]
        call = self.supported(MANY_SAMPLES[self.spec.op], Draw(dtype, self.device))
        results, grads = self.run(call, self.spec.name)
        self.check(call, results, grads, dtype)

    # --- how they are tested ---

    def problem(self, call: Call) -> Problem:
        tensors = {n: t.detach().requires_grad_() for n, t in call.tensors.items()}
        return problem_of(self.spec.op, **call.arguments(tensors))

    def supported(self, case: Case, draw: Draw) -> Call:
        """The case's call, or a skip with the implementation's reason."""
        call = case(draw)
        answer = self.spec.supports(self.problem(call))
        if not answer:
            pytest.skip(f"{self.spec.name}: {answer.reason}")
        return call

    def small(self, dtype: torch.dtype, fits: Callable[[dict[str, Any]], bool] = lambda arguments: True) -> Call:
        """A call for rules that are not about options: the telling case if it is supported and fits, else the first that does."""
        known = cases(self.spec.op)
        for name in (SMALL_CASES.get(self.spec.op), *known):
            if name is None:
                continue
            call = known[name](Draw(dtype, self.device))
            if fits(call.arguments(call.tensors)) and self.spec.supports(self.problem(call)):
                return call
        pytest.skip(f"{self.spec.name} supports no such case in {dtype}")

    def run(
        self,
        call: Call,
        backend: str,
        wanted: Sequence[str] | None = None,
        *,
        wrap: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda f: f,
        weigh: Callable[[Tensor], Tensor] = lambda w: w,
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Results, and gradients of a fixed weighting of them, through the public function."""
        public = wrap(getattr(ops, self.spec.op))
        wanted = tuple(call.tensors) if wanted is None else wanted
        leaves = {n: t.detach().requires_grad_(n in wanted) for n, t in call.tensors.items()}
        results = flat(public(**call.arguments(leaves), backend=backend))
        weights = [weigh(w.to(r.dtype).to(r.device)) for w, r in zip(_weights(results), results)]
        roots = [(r, w) for r, w in zip(results, weights) if r.requires_grad]
        grads = torch.autograd.grad([r for r, _ in roots], [leaves[n] for n in wanted], [w for _, w in roots], allow_unused=True)
        return [r.detach() for r in results], {n: torch.zeros_like(leaves[n]) if g is None else g for n, g in zip(wanted, grads)}

    def reference(self, call: Call) -> tuple[list[Tensor], dict[str, Tensor]]:
        """The same in float64 on the CPU by the reference."""
        host = copy.copy(call)
        host.tensors = {n: t.detach().cpu().double() for n, t in call.tensors.items()}
        host.arguments = lambda t: _to_cpu(call.arguments(t))
        return self.run(host, ops.REFERENCE)

    def check(self, call: Call, results: list[Tensor], grads: dict[str, Tensor], dtype: torch.dtype) -> None:
        expected, expected_grads = self.reference(call)
        assert results[0].dtype == dtype, f"result 0 has dtype {results[0].dtype}, the tensors {dtype}"
        scale = float(torch.stack([w.norm() for w in _weights(results)]).norm())
        for i, (got, want) in enumerate(zip(results, expected)):
            compare(got, want, bound(dtype, False), f"result {i}")
        if call.out_slack is not None:
            slack = results[0][call.out_slack :]
            assert not slack.any(), "slack rows of the result are not zero"
        for name, got in grads.items():
            if name in call.slack:
                assert not got[call.slack[name] :].any(), f"slack rows of {name} get a gradient that is not zero"
            assert got.dtype == call.tensors[name].dtype, (
                f"the gradient of {name} has dtype {got.dtype}, the tensor {call.tensors[name].dtype}"
            )
            compare(got, expected_grads[name], bound(dtype, True), f"gradient of {name}", scale)


def _offsets(arguments: dict[str, Any]) -> tuple[Tensor | None, Tensor | None]:
    """Of the keys and of the queries."""
    queries = arguments.get("q_offsets", arguments.get("offsets"))
    keys = arguments.get("k_offsets")
    return queries if keys is None else keys, queries


def _has_own_keys(arguments: dict[str, Any]) -> bool:
    """Whether each of several samples has queries, and keys that no other one reads."""
    _, queries = _offsets(arguments)
    return arguments.get("kv_index") is None and queries is not None and queries.numel() > 2


def _weights(results: Sequence[Tensor]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(r.shape, generator=generator, dtype=torch.float64) for r in results]


def _with_row_stride(t: Tensor) -> Tensor:
    """The same values as a view of a tensor three times as wide, NaN beside them."""
    if t.dim() < 2:
        return t
    wide = torch.full((t.shape[0], 3 * t[0].numel() if t.shape[0] else 3), torch.nan, dtype=t.dtype, device=t.device)
    if t.shape[0] == 0:
        return t
    view = wide[:, t[0].numel() : 2 * t[0].numel()].view(t.shape)
    view.copy_(t)
    return view


def _to_cpu(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.cpu()
    if isinstance(value, dict):
        return {k: _to_cpu(v) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(_to_cpu(v) for v in value)
    if isinstance(value, ops.RelativeBias):
        return ops.RelativeBias(*(_to_cpu(getattr(value, f)) for f in ("position", "time", "time_edges", "q_times", "k_times")))
    return value


def _finite(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """opcheck compares runs with ==, so NaN in slack rows must go."""
    return tuple(
        a.detach().nan_to_num().requires_grad_(a.requires_grad) if isinstance(a, Tensor) and a.is_floating_point() else a for a in args
    )


@contextmanager
def _recording(op: str, seen: list[tuple[Any, tuple[Any, ...]]]) -> Iterator[None]:
    """Note the custom op and the arguments that the public function calls it with."""
    packet = getattr(torch.ops.gem, op)
    overload = packet.default

    class Recorder:
        def default(self, *args: Any) -> Any:
            seen.append((overload, args))
            return overload(*args)

    namespace = torch.ops.gem
    setattr(namespace, op, Recorder())
    try:
        yield
    finally:
        setattr(namespace, op, packet)


__all__ = ["KernelConformance", "bound", "compare", "deterministic", "poisoned_empty"]

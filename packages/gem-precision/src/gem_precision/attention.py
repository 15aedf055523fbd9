"""`jagged_attention` and `gdpa` with quantised operands, emulated: the numbers that a low-precision attention kernel must give.

- Q, K, V and dO are quantised once, per head, in blocks that begin at each sample's first row; every GEMM reads the same codes. Blocks of
  32x32 are MXFP8's; 128x128, with the same power-of-two scales, are what Hopper's FP8 products can take. Under ``kv_index`` a request's
  rows are quantised by themselves, and so are a sample's own candidates.
- Forward P of the softmax lies in [0, 1] because the row maximum is known, so its scale is the constant that puts 1 as high as the format
  allows without overflow (E4M3: 2^-8): no amax is needed. The row sum is taken of P before rounding, so lse is exact.
- Elsewhere (P of gdpa, P in backward, dS) scales come from the amax of strips of 32 along the contraction (64 with blocks of 128, the
  tile of the FP8 kernel), or of squares for dS, which is contracted both ways.
- delta of the softmax backward is the row sum of P dP in the same arithmetic as dP, so that the gradient of a row with one visible key
  is exactly zero.

All sums are fp32. ``precision.probabilities``, ``dscores`` and ``backward`` (dO) may each be "bf16".
"""

from __future__ import annotations

import torch
from torch import Tensor

from gem_core.hookspecs import KernelSpec
from gem_core.ops import activations
from gem_core.ops.attention_reference import Gradients, Inputs, Sample, Saved, pointwise
from gem_core.ops.contract import YES, OpPrecision, Problem, Supported, no
from gem_core.ops.contracts import GDPA
from gem_precision.attention_site import report
from gem_precision.formats import BLOCKS, ELEMENTS, element, encode, quantize_blocks
from gem_precision.formats.elements import decode

NAME = "mx_emulated"
FP8_BLOCK = (128, 128)


def supports(problem: Problem) -> Supported:
    p = problem.precision
    if p is None:
        return no("only for problems with a precision")
    if any(dtype == torch.float64 for _, dtype in problem.dtypes):
        return no("float64 is not quantised")
    for name in (p.operands, p.probabilities, p.dscores, p.backward):
        if name != "bf16" and name not in ELEMENTS:
            return no(f"no element format {name!r}")
    if p.block not in (*BLOCKS, FP8_BLOCK):
        return no(f"no blocks of {p.block[0]}x{p.block[1]}")
    return YES


def _coded(x: Tensor, elem: str, block: tuple[int, int], rule: str, name: str | None = None) -> Tensor:
    """``x [..., R, C]`` through the format and back, fp32; reported as ``name`` while the module around is being measured."""
    if elem == "bf16":
        return x.to(torch.bfloat16).float()
    q = quantize_blocks(x, element(elem), block, rule)  # type: ignore[arg-type]
    if name is not None and (tell := report()) is not None:
        tell(name, x, q)
    return q.dequantize(torch.float32)


def _unit_interval(p: Tensor, elem: str) -> Tensor:
    """``p`` in [0, 1] through the format with the constant scale 2^-emax."""
    if elem == "bf16":
        return p.to(torch.bfloat16).float()
    chosen = element(elem)
    return decode(encode(p * 2.0**chosen.emax, chosen), chosen) * 2.0**-chosen.emax


class _CodedInputs(Inputs):
    """Q, K and V through their format, one head and one sample (or request) at a time."""

    def __init__(self, problem: Problem, tensors: Saved) -> None:
        super().__init__(problem, tensors)
        assert problem.precision is not None
        self.precision: OpPrecision = problem.precision

    def _code(self, rows: Tensor, name: str) -> Tensor:
        """``[L, H, D]`` -> ``[H, L, D]``"""
        return _coded(rows.transpose(0, 1), self.precision.operands, self.precision.block, self.precision.scale_rule, name)

    def queries(self, s: Sample) -> Tensor:
        return self._code(self.t["q"][s.q], "q")

    def keys(self, s: Sample, name: str) -> Tensor:
        rows = self._code(self.t[name][s.k], name)
        if s.shared:
            rows = torch.cat([rows, self._code(self.t[f"target_{name}"][s.own], name)], dim=1)
        return rows.repeat_interleave(self.groups, dim=0)

    def upstream(self, dout: Tensor) -> Tensor:
        """``[L, H, Dv]`` -> ``[H, L, Dv]`` in the format of backward."""
        return _coded(dout.transpose(0, 1), self.precision.backward, self.precision.block, self.precision.scale_rule)

    def strips(self, p: Tensor, along: int) -> Tensor:
        """P for a GEMM that contracts along its last dim, or (``along`` -2) the one before."""
        width = 64 if self.precision.block == FP8_BLOCK else 32
        return _coded(p, self.precision.probabilities, (1, width) if along == -1 else (width, 1), self.precision.scale_rule)

    def dscores(self, ds: Tensor) -> Tensor:
        block = FP8_BLOCK if self.precision.block == FP8_BLOCK else (32, 32)
        return _coded(ds, self.precision.dscores, block, self.precision.scale_rule)


def jagged_attention_forward(problem: Problem, *tensors: Tensor | None) -> tuple[tuple[Tensor, Tensor], Saved]:
    inputs = _CodedInputs(problem, tensors)
    q, v = inputs.t["q"], inputs.t["v"]
    out = q.new_zeros(inputs.out_rows(), q.shape[1], v.shape[2])
    lse = torch.full((q.shape[1], out.shape[0]), -torch.inf, dtype=inputs.dtype, device=q.device)
    for s in inputs.samples():
        if s.lk == 0 or s.lq == 0:
            continue
        visible = inputs.visible(s)
        scores = inputs.scores(s, problem.option("scale")).masked_fill(~visible, -torch.inf)
        top = scores.amax(2, keepdim=True)
        top = torch.where(top == -torch.inf, 0.0, top)
        p = torch.exp(scores - top)
        total = p.sum(2, keepdim=True)
        weighted = _unit_interval(p, inputs.precision.probabilities) @ inputs.keys(s, "v")
        result = torch.where(total > 0, weighted / total, 0.0)
        out[s.out] = (problem.option("out_scale") * result).transpose(0, 1).to(q.dtype)
        lse[:, s.out] = (top + total.log()).squeeze(2)
    return (out, lse), (*tensors, out, lse)


def jagged_attention_backward(problem: Problem, saved: Saved, dout: Tensor, needs: tuple[bool, ...]) -> Saved:
    count = len(GDPA.tensors)
    inputs, lse = _CodedInputs(problem, saved[:count]), saved[count + 1]
    assert lse is not None
    gradients = Gradients(inputs)
    scale = problem.option("scale")
    for s in inputs.samples():
        if s.lk == 0 or s.lq == 0:
            continue
        visible = inputs.visible(s)
        p = torch.exp(inputs.scores(s, scale) - lse[:, s.out].to(inputs.dtype)[:, :, None])
        p = torch.where(visible, p, 0.0)
        d = problem.option("out_scale") * inputs.upstream(dout[s.out])
        dp = d @ inputs.keys(s, "v").transpose(1, 2)
        ds = p * (dp - (p * dp).sum(2, keepdim=True))
        dv = inputs.strips(p, -2).transpose(1, 2) @ d
        gradients.add(s, inputs.dscores(ds), dv, scale)
    return gradients.result(needs)


def gdpa_forward(problem: Problem, *tensors: Tensor | None) -> tuple[Tensor, Saved]:
    inputs = _CodedInputs(problem, tensors)
    q, v = inputs.t["q"], inputs.t["v"]
    out = q.new_zeros(inputs.out_rows(), q.shape[1], v.shape[2])
    for s in inputs.samples():
        weights = pointwise(problem, inputs.scores(s, problem.option("scale_in")), activations.act, inputs.visible(s))
        out[s.out] = (inputs.strips(weights, -1) @ inputs.keys(s, "v")).transpose(0, 1).to(q.dtype)
    return out, tensors


def gdpa_backward(problem: Problem, saved: Saved, dout: Tensor, needs: tuple[bool, ...]) -> Saved:
    inputs = _CodedInputs(problem, saved)
    gradients = Gradients(inputs)
    scale = problem.option("scale_in")
    for s in inputs.samples():
        scores, visible = inputs.scores(s, scale), inputs.visible(s)
        d = inputs.upstream(dout[s.out])
        dv = inputs.strips(pointwise(problem, scores, activations.act, visible), -2).transpose(1, 2) @ d
        ds = pointwise(problem, scores, activations.act_grad, visible) * (d @ inputs.keys(s, "v").transpose(1, 2))
        gradients.add(s, inputs.dscores(ds), dv, scale)
    return gradients.result(needs)


def specs() -> list[KernelSpec]:
    """The emulated kernels; anything faster that supports a problem with a precision goes before them."""
    return [
        KernelSpec("jagged_attention", NAME, jagged_attention_forward, jagged_attention_backward, supports, priority=1),
        KernelSpec("gdpa", NAME, gdpa_forward, gdpa_backward, supports, priority=1),
    ]

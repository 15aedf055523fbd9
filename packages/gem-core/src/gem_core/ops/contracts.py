"""The tensors of every op: order, what is optional, what is saved, what receives gradients.

Shapes and meanings are in the docstrings of the public functions. Results that exist for backward only are fp32 (fp64 for fp64 inputs):
``rstd``, ``mean`` and ``out_rstd`` have one value a row. ``mean`` is absent for RMSNorm, ``mean`` and ``rstd`` of `mlp` without a norm:
forward gives None for what is absent, backward receives an empty tensor.

- norm, norm_linear, mlp: ``mean`` and ``rstd`` belong to the norm of ``normed``; the hidden activations of mlp are recomputed.
- linear_norm: ``rstd`` belongs to z = x wᵀ + b. The normalised row is ``y`` itself for an affine-free norm; with norm_weight or norm_bias
  backward recomputes z from x, w and b.
- norm_gdpa: ``mean`` and ``rstd`` belong to the LayerNorm of q over H·D, ``out_rstd`` to the RMSNorm of o, whose normalised row is out − q.
- jagged_attention: ``lse [H, Nq]`` is an output without gradient.
"""

from __future__ import annotations

from gem_core.ops.contract import NORMED, OpContract

_ATTENTION_TENSORS = (
    "q", "k", "v", "q_offsets", "k_offsets", "num_targets", "target_k", "target_v", "context_len", "kv_index",
    "bias_position", "bias_time", "bias_time_edges", "bias_q_times", "bias_k_times", "q_scale", "k_scale", "v_scale",
)  # fmt: skip
_ATTENTION_OPTIONAL = frozenset(_ATTENTION_TENSORS) - {"q", "k", "v", "k_offsets"}
_ATTENTION_GRADS = ("q", "k", "v", "target_k", "target_v", "bias_position", "bias_time")

JAGGED_ATTENTION = OpContract(
    op="jagged_attention",
    tensors=_ATTENTION_TENSORS,
    outputs=("out", "lse"),
    saved=(*_ATTENTION_TENSORS, "out", "lse"),
    differentiable=_ATTENTION_GRADS,
    optional=_ATTENTION_OPTIONAL,
    differentiable_outputs=("out",),
)
GDPA = OpContract(
    op="gdpa",
    tensors=_ATTENTION_TENSORS,
    outputs=("out",),
    saved=_ATTENTION_TENSORS,
    differentiable=_ATTENTION_GRADS,
    optional=_ATTENTION_OPTIONAL,
    differentiable_outputs=("out",),
)
_BLOCK_TENSORS = ("q", "k", "v", "offsets", "rotary_cos", "rotary_sin", "rotary_rows")
BLOCK_ATTENTION = OpContract(
    op="block_attention",
    tensors=_BLOCK_TENSORS,
    outputs=("out",),
    saved=_BLOCK_TENSORS,
    differentiable=("q", "k", "v"),
    optional=frozenset({"rotary_cos", "rotary_sin", "rotary_rows"}),
    differentiable_outputs=("out",),
)
NORM = OpContract(
    op="norm",
    tensors=("x", "weight", "bias", "residual"),
    outputs=("y", "residual_out"),
    saved=(NORMED, "weight", "bias", "mean", "rstd"),
    differentiable=("x", "weight", "bias"),
    optional=frozenset({"weight", "bias", "residual"}),
    differentiable_outputs=("y", "residual_out"),
)
NORM_LINEAR = OpContract(
    op="norm_linear",
    tensors=("x", "w", "b", "norm_weight", "norm_bias", "residual"),
    outputs=("y", "residual_out"),
    saved=(NORMED, "w", "b", "norm_weight", "norm_bias", "mean", "rstd"),
    differentiable=("x", "w", "b", "norm_weight", "norm_bias"),
    optional=frozenset({"b", "norm_weight", "norm_bias", "residual"}),
    differentiable_outputs=("y", "residual_out"),
)
LINEAR_NORM = OpContract(
    op="linear_norm",
    tensors=("x", "w", "b", "norm_weight", "norm_bias"),
    outputs=("y",),
    saved=("x", "w", "b", "norm_weight", "norm_bias", "y", "rstd"),
    differentiable=("x", "w", "b", "norm_weight", "norm_bias"),
    optional=frozenset({"b", "norm_weight", "norm_bias"}),
    differentiable_outputs=("y",),
)
MLP = OpContract(
    op="mlp",
    tensors=("x", "w1", "b1", "w2", "b2", "residual"),
    outputs=("y", "residual_out"),
    saved=(NORMED, "w1", "b1", "w2", "b2", "mean", "rstd"),
    differentiable=("x", "w1", "b1", "w2", "b2"),
    optional=frozenset({"b1", "b2", "residual"}),
    differentiable_outputs=("y", "residual_out"),
)
NORM_GDPA = OpContract(
    op="norm_gdpa",
    tensors=("q", "k", "v", "q_offsets", "k_offsets"),
    outputs=("out",),
    saved=("q", "k", "v", "q_offsets", "k_offsets", "out", "mean", "rstd", "out_rstd"),
    differentiable=("q", "k", "v"),
    differentiable_outputs=("out",),
)

# Data movement. Each one's gradient is another op of the family, so implementations have a forward only, which returns (result, ()).
#   jagged_concat(problem, *values, *offsets) of n = problem.dim("parts") parts -> values [sum N_i, ...], slack rows last and zero
#   jagged_split(problem, values, *offsets, rows=(r_1, ..., r_n)) -> n tensors [r_i, ...]: its inverse, part i by offsets i
#   jagged_sum, jagged_mean(problem, values, offsets) -> [B, ...]
#   jagged_expand(problem, rows_per_sample [B, ...], offsets, rows=R) -> [R, ...]: row b of the input for every row of sample b
#   jagged_to_padded(problem, values, offsets, max_len=M) -> [B, M, ...], filled with problem.option("fill")
#   padded_to_jagged(problem, padded [B, M, ...], offsets, rows=R) -> [R, ...]
JAGGED_CONCAT = OpContract("jagged_concat", ("values", "offsets"), ("out",), (), (), differentiable_outputs=("out",))
JAGGED_SPLIT = OpContract("jagged_split", ("values", "offsets"), ("out",), (), (), differentiable_outputs=("out",), sizes=("rows",))
JAGGED_SUM = OpContract("jagged_sum", ("values", "offsets"), ("out",), (), (), differentiable_outputs=("out",))
JAGGED_MEAN = OpContract("jagged_mean", ("values", "offsets"), ("out",), (), (), differentiable_outputs=("out",))
JAGGED_EXPAND = OpContract("jagged_expand", ("values", "offsets"), ("out",), (), (), differentiable_outputs=("out",), sizes=("rows",))
JAGGED_TO_PADDED = OpContract(
    "jagged_to_padded", ("values", "offsets"), ("out",), (), (), differentiable_outputs=("out",), sizes=("max_len",)
)
PADDED_TO_JAGGED = OpContract("padded_to_jagged", ("values", "offsets"), ("out",), (), (), differentiable_outputs=("out",), sizes=("rows",))

ALL = (
    JAGGED_ATTENTION, GDPA, BLOCK_ATTENTION, NORM, NORM_LINEAR, LINEAR_NORM, MLP, NORM_GDPA,
    JAGGED_CONCAT, JAGGED_SPLIT, JAGGED_SUM, JAGGED_MEAN, JAGGED_EXPAND, JAGGED_TO_PADDED, PADDED_TO_JAGGED,
)  # fmt: skip


def contracts() -> dict[str, OpContract]:
    """Every op's contract by the op's name."""
    return {c.op: c for c in ALL}

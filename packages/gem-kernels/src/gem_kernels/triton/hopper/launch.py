"""From tensors to launches of the Hopper kernels, pass by pass.

``GLUON`` 0 is the portable kernel of `gem_kernels.triton.attention`, where that is the faster one. Other keys: BLOCK_N (key rows of a
tile), STAGES (slots of the streamed side), HELD (slots of the held side), PARTS (forward: query tiles for which keys are loaded once), WALK
(backward: a program walks past a run of tiles, for which the streamed side moves once), AHEAD (products of the next tile issued before this
one's are done; in the forward pass 2: the next query tile's, too), SHORT (backward without a mask: a last tile that is at most half full is
half a step), REGS (Q is multiplied from registers), FUSED (backward in one kernel).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gem_core.ops import siblings
from gem_core.ops.contract import Problem
from gem_kernels.triton.attention import balance, column_sums, launch_backward, launch_forward
from gem_kernels.triton.attention.inputs import Inputs, choose_and_run, dense_columns
from gem_kernels.triton.attention.plan import Plan, plan
from gem_kernels.triton.attention.schedule import TileList
from gem_kernels.triton.attention.tiles import _ENDLESS, _MAX_TMA_ROWS, tma_fits
from gem_kernels.triton.common.configs import Config, choose
from gem_kernels.triton.common.device import DeviceInfo
from gem_kernels.triton.common.launch import compiling, launch

Saved = tuple[Tensor | None, ...]
_PORTABLE: Config = {"GLUON": 0}
_ROWS = 128
_HELD_KEYS: tuple[Config, ...] = ({}, {"AHEAD": 1}, {"AHEAD": 2})
_WALK: Config = {"STAGES": 4, "HELD": 3, "WALK": 1}
_LEAST_TILES = 64


def forward(problem: Problem, tensors: Saved, gluon_only: bool = False) -> tuple[Tensor, Tensor | None]:
    """Output ``[rows, H, D]`` and, for softmax, lse ``[H, rows]`` (else None)."""
    p = plan(problem)
    x = Inputs(p, tensors)
    if _nothing(x):
        return launch_forward.forward(problem, tensors)
    out = torch.empty(x.out_rows, p.heads, p.dv, dtype=x.q.dtype, device=x.device)
    lse = torch.empty(p.heads, x.out_rows, dtype=torch.float32, device=x.device) if p.softmax else None

    def run(config: Config) -> None:
        if config["GLUON"]:
            _by_box(x)
            _forward(x, out, lse, config)
        else:
            launch_forward.fill(x, out, lse)

    _choose_pass(x, "hopper.forward", gluon_only, run)
    return out, lse


def backward(problem: Problem, saved: Saved, dout: Tensor, needs: tuple[bool, ...], gluon_only: bool = False) -> Saved:
    """Gradients of q, k, v; None for what is not needed and for the contract's other tensors."""
    p = plan(problem)
    x = Inputs(p, saved[:18])
    if _nothing(x):
        return launch_backward.backward(problem, saved, dout, needs)
    found: list[Saved] = []

    def run(config: Config) -> None:
        if config["GLUON"]:
            _by_box(x)
            # In one kernel a program has whole samples: few of them leave SMs without work.
            if config["FUSED"] and few(p) and (x.batch * p.heads >= x.info.sms or compiling()):
                found[:] = [_few(x, _addressable(dense_columns(dout)))]
            else:
                found[:] = [(_split if p.d <= 128 else _wide)(x, saved[18:], dout)]
        else:
            found[:] = [launch_backward.backward(problem, saved, dout, needs)]

    _choose_pass(x, "hopper.backward", gluon_only, run)
    return tuple(g if need else None for g, need in zip((*found[0][:3], None, None, None, None), needs))


def _choose_pass(x: Inputs, kernel: str, only: bool, run: Callable[[Config], None]) -> None:
    facts = (*x.plan.facts, ("only", only))
    run(choose(kernel, facts, x.info, lambda: candidates(kernel, x.plan, only), run))


def candidates(kernel: str, p: Plan, only: bool) -> list[Config]:
    """For hopper.forward and hopper.backward, best guess first: with ``only`` these kernels, else the portable ones unless a rule says that
    these were measured to be faster."""
    if kernel == "hopper.forward":
        found = [{"GLUON": 1, "BLOCK_N": 128, "STAGES": 2}, {"GLUON": 1, "BLOCK_N": 64, "STAGES": 3}]
        if p.d <= 128:
            found += [{**c, "AHEAD": 1} for c in found]
            if p.mask == "full":
                found += [{**c, "REGS": 1} for c in found[2:]]
        if p.k_bound <= 256 or 0 < p.band <= 512:
            found = [{"GLUON": 1, "BLOCK_N": 64, "STAGES": 4}, *found]
        if p.k_bound <= 256 and p.mask == "full" and p.d <= 128:
            found += [{"GLUON": 1, "BLOCK_N": 128, "STAGES": 2, "PARTS": 4, **more} for more in _HELD_KEYS]
        if p.d > 128:
            found = [{"GLUON": 1, "BLOCK_N": 64, "STAGES": 2}, {"GLUON": 1, "BLOCK_N": 64, "STAGES": 2, "AHEAD": 1}]
    elif p.d > 128:
        found = [{"GLUON": 1, "FUSED": 0}] if wide(p) else []
    else:
        found = [{"GLUON": 1, "FUSED": 0}]
        if few(p):
            found.append({"GLUON": 1, "FUSED": 1})
    return found if only else [_PORTABLE, *found]


def few(p: Plan) -> bool:
    """Whether the backward pass in one kernel is offered: for `gdpa`, full, a key head for every query head, whose keys are one tile."""
    return p.d == 128 and p.mask == "full" and p.k_bound <= _ROWS and not (p.softmax or p.broadcast) and p.group == 1


def wide(p: Plan) -> bool:
    """Whether heads of 256 columns have a backward pass: for `gdpa` with a key head for every query head."""
    return p.d == 256 and not p.softmax and p.group == 1 and not p.broadcast


def _query_side(_kernel: str, p: Plan, _info: DeviceInfo) -> list[Config]:
    if p.d > 128:
        return [{"BLOCK_N": 64, "STAGES": 3, "HELD": 1, "AHEAD": a} for a in (0, 1)]
    found: list[Config] = [{"BLOCK_N": 64, "STAGES": 3, "HELD": 2, "AHEAD": a} for a in (0, 2)]
    if p.mask == "full":
        found.append({**found[0], "SHORT": 1})
    return [*found, {**_WALK, "BLOCK_N": 64, "AHEAD": 0}] if p.window else found


def _key_side(_kernel: str, p: Plan, _info: DeviceInfo) -> list[Config]:
    found: list[Config] = [{"STAGES": 3, "HELD": 2, "AHEAD": a} for a in (0, 1)]
    if p.mask == "full":
        found.append({**found[0], "SHORT": 1})
    return [*found, {**_WALK, "AHEAD": 0}] if p.window and p.d <= 128 else found


def _walking(x: Inputs, config: Config, otherwise: Config) -> Config:
    """``config``, or ``otherwise`` where its programs cannot walk: what they keep for the next tile must leave a slot free (64 rows see at
    most STAGES + 1 tiles), and a program must have _LEAST_TILES of 128 rows."""
    p = x.plan
    if not config.get("WALK"):
        return config
    seen = 1 + -(-p.left // 64) + (0 if p.causal else -(-p.right // 64))
    fits = x.q_offsets is x.k_offsets and p.group == 1 and seen <= config["STAGES"] + 1
    return config if fits and (compiling() or x.out_rows * p.heads >= _LEAST_TILES * x.info.sms * _ROWS) else otherwise


def _by_box(x: Inputs) -> None:
    """Rows that a descriptor cannot address (a base or a row step that is no multiple of 16 bytes, heads apart) are copied."""
    x.q, x.k, x.v = (_addressable(t) for t in (x.q, x.k, x.v))


def _addressable(t: Tensor) -> Tensor:
    return t if t.shape[0] == 0 or tma_fits(t) else t.clone(memory_format=torch.contiguous_format)


def _nothing(x: Inputs) -> bool:
    return x.batch == 0 or x.out_rows == 0 or x.k.shape[0] == 0


def _box(x: Tensor, rows: int, columns: int | None = None) -> Any:
    """A ragged descriptor (`gem_kernels.triton.attention.tiles.descriptor`) with the layout that Gluon wants to know."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    heads, d = x.shape[1:]
    step = x.stride(0)
    made = object.__new__(TensorDescriptor)
    made.base, made.padding = x, "zero"
    made.shape, made.strides = [_ENDLESS, _ENDLESS, _MAX_TMA_ROWS, heads * d], [2**34 - step, step, step, 1]
    made.block_shape = [1, 1, rows, columns or d]
    made.layout = gl.NVMMASharedLayout.get_default_for(made.block_shape, gl.float16 if x.dtype == torch.float16 else gl.bfloat16)
    return made


def _constants(x: Inputs) -> dict[str, Any]:
    p = x.plan
    found = p.constants(True)
    return {name: found[name] for name in ("GROUP", "D", "SOFTMAX", "ACT", "ACT_SET", "CAUSAL", "WINDOW", "FAST")} | {
        "FOLDED": _folded(p), "num_warps": 4, "maxnreg": 168,
    }  # fmt: skip


_FOLDED = {"fast_gelu": 1, "silu": 2, "fast_silu": 2}


def _folded(p: Plan) -> int:
    """Which of the kernels' own activations, that leave ``scale_in`` and a half to the epilogue, 0 for none of them."""
    return 0 if p.softmax or p.dtype != "bf16" or isinstance(p.activation, tuple) else _FOLDED.get(p.activation, 0)


def _value_scale(p: Plan) -> float:
    """What the kernels' P must still be multiplied with."""
    return p.out_scale * (0.5 * p.scale if _folded(p) else p.folded_gain)


def _slope_scale(p: Plan) -> float:
    """What the kernels' dS must still be multiplied with, after ``scale_in``."""
    return p.scale * p.out_scale * ((1.5, 0.5)[_folded(p) - 1] if _folded(p) else p.folded_gain)


def _forward(x: Inputs, out: Tensor, lse: Tensor | None, config: Config) -> None:
    parts = config.get("PARTS", 1)
    tiles = x.q_tiles(_ROWS * parts, True)
    _weighted_sum(x, (x.q, x.k, x.v), out, lse, tiles, x.q_offsets, config)


def _weighted_sum(
    x: Inputs, held_and_streamed: tuple[Tensor, Tensor, Tensor], out: Tensor, lse: Tensor | None, tiles: TileList,
    offsets: Tensor | None, config: Config, transposed: bool = False,
) -> None:  # fmt: skip
    """out = act(Q Kᵀ) V, or dV = act(K Qᵀ) dO with ``transposed``."""
    from gem_kernels.triton.hopper.forward import hopper_fwd_kernel

    p, n, (q, k, v) = x.plan, config["BLOCK_N"], held_and_streamed
    launch(
        hopper_fwd_kernel, (min(x.info.sms, tiles.bound * p.heads),), x.device,
        _box(q, 64), _box(k, n), _box(v, n), _box(out, 64), out, lse, tiles.table, tiles.count, offsets, x.act_ids,
        x.batch, out.shape[0], p.left, p.right, p.scale, _value_scale(p), out.stride(0),
        H=p.heads, POSITIVE=p.scale > 0, BLOCK_N=n, STAGES=config["STAGES"], PARTS=config.get("PARTS", 1), AHEAD=config.get("AHEAD", 0),
        REGS=config.get("REGS", 0), TRANSPOSED=transposed, **_constants(x),
    )  # fmt: skip


def _wide(x: Inputs, _results: Saved, dout: Tensor) -> Saved:
    """dQ, dK and dV of `gdpa` with heads of 256 columns, a kernel each: dK is dQ of the transposed problem, dV its forward pass."""
    dout = _addressable(dense_columns(dout))
    dq, dk, dv = siblings.empty_grads((x.q, x.k, x.v), (True, True, True))
    rows, keys = x.q_tiles(_ROWS, True), x.k_tiles(_ROWS, True)

    def slopes(config: Config) -> None:
        _slope_sum(x, (x.q, dout, x.k, x.v), dq, rows, x.q_offsets, config)
        _slope_sum(x, (x.k, x.v, x.q, dout), dk, keys, x.k_offsets, config, transposed=True)

    choose_and_run(x, "hopper.dq", _query_side, slopes)
    _weighted_sum(x, (x.k, x.q, dout), dv, None, keys, x.k_offsets, {"BLOCK_N": 64, "STAGES": 2}, transposed=True)
    return dq, dk, dv


def _slope_sum(
    x: Inputs, held_and_streamed: tuple[Tensor, Tensor, Tensor, Tensor], result: Tensor, tiles: TileList,
    offsets: Tensor | None, config: Config, softmax: Saved = (None, None, None), transposed: bool = False,
) -> None:  # fmt: skip
    """dQ = dS K, dS = act'(Q Kᵀ) ∘ dO Vᵀ, or dK = dSᵀ Q with ``transposed``. ``softmax`` has O, lse and delta, which is written."""
    from gem_kernels.triton.hopper.backward_dq import hopper_bwd_dq_kernel

    p, n, (q, dout, k, v) = x.plan, config["BLOCK_N"], held_and_streamed
    out, lse, delta = softmax
    strides = (0, 0) if out is None else out.stride()[:2]
    launch(
        hopper_bwd_dq_kernel, (min(x.info.sms, tiles.bound * p.heads),), x.device,
        _box(q, 64), _box(k, n), _box(v, n), _box(dout, 64), _box(result, 64), result, out, lse, delta,
        tiles.table, tiles.count, offsets, x.act_ids, x.batch, result.shape[0], p.left, p.right,
        p.scale, _slope_scale(p), 1.0 / p.out_scale if p.out_scale else 0.0, *strides, result.stride(0),
        H=p.heads, TRANSPOSED=transposed, **{"AHEAD": 0, "SHORT": 0, "WALK": 0, **config}, **_constants(x),
    )  # fmt: skip


def _split(x: Inputs, results: Saved, dout: Tensor) -> Saved:
    """dQ (which leaves delta for the other), then dK and dV."""
    from gem_kernels.triton.hopper.backward_dkdv import hopper_bwd_dkdv_kernel

    p = x.plan
    out, lse = results if p.softmax else (None, None)
    dout = _addressable(dense_columns(dout))
    dq, dk, dv = siblings.empty_grads((x.q, x.k, x.v), (True, True, True))
    if p.broadcast:
        dq = torch.empty(x.out_rows, p.heads, p.d, dtype=x.q.dtype, device=x.device)
    delta = torch.empty(p.heads, x.out_rows, dtype=torch.float32, device=x.device) if p.softmax else None
    constants = _constants(x)

    # Both lists are there before the first kernel, so that nothing is between the two, of which the second one is launched early.
    keys = x.q_tiles(_ROWS, True) if x.q_offsets is x.k_offsets and not p.causal else x.k_tiles(_ROWS, True)

    def query_side(config: Config) -> None:
        config = _walking(x, config, {"BLOCK_N": 64, "STAGES": 3, "HELD": 2})
        # A run goes from the first tile to the last, also of a causal mask.
        rows = keys if config.get("WALK") else x.q_tiles(_ROWS, True)
        _slope_sum(x, (x.q, dout, x.k, x.v), dq, rows, x.q_offsets, config, (out, lse, delta))

    def key_side(config: Config) -> None:
        config = {"SHORT": 0, "WALK": 0, **_walking(x, config, {"STAGES": 3, "HELD": 2, "AHEAD": 0})}
        launch(
            hopper_bwd_dkdv_kernel, (min(x.info.sms, keys.bound * p.kv_heads),), x.device,
            _box(x.q, 64), _box(x.k, 64), _box(x.v, 64), _box(dout, 64), _box(dk, 64), _box(dv, 64), dk, dv, lse, delta,
            keys.table, keys.count, x.k_offsets, x.act_ids,
            x.batch, x.out_rows, x.k.shape[0],
            p.left, p.right, p.scale, _slope_scale(p), _value_scale(p), dk.stride(0),
            HKV=p.kv_heads, BROADCAST=p.broadcast, launch_pdl=True, **config, **constants,
        )  # fmt: skip

    choose_and_run(x, "hopper.dq", _query_side, query_side)
    choose_and_run(x, "hopper.dkdv", _key_side, key_side)
    return dq.unflatten(0, (x.batch, x.q_len)).sum(0) if p.broadcast else dq, dk, dv


def _few(x: Inputs, dout: Tensor, dq: Tensor | None = None) -> Saved:
    """dQ, dK and dV in one kernel. dQ is added to a given ``dq``, which may be ``dout`` itself."""
    from gem_kernels.triton.hopper.backward_few import hopper_bwd_few_kernel

    p = x.plan
    (own, dk, dv), sums = column_sums.empty_grads(x, 8 * x.info.sms, (dq is None, True, True))
    to = own if dq is None else dq
    tiles = x.sample_tiles(x.q_offsets, True)
    programs = min(x.info.sms, tiles.bound * p.heads)
    dealt = balance.shares(tiles, programs // p.heads, 64, x.q_offsets) if programs % p.heads == 0 else None
    table, starts = (tiles.table, None) if dealt is None else (dealt.table, dealt.starts)
    constants = {name: value for name, value in _constants(x).items() if name not in ("CAUSAL", "WINDOW", "GROUP", "SOFTMAX")}
    launch(
        hopper_bwd_few_kernel, (programs,), x.device,
        _box(x.q, 64), _box(x.k, 64), _box(x.v, 64), _box(dout, 64), _box(to, 64), _box(dk, 64), _box(dv, 64),
        to, dk, dv, table, starts, tiles.count, x.q_offsets, x.k_offsets, x.act_ids,
        *sums.zeros(),
        x.batch, x.out_rows, x.k.shape[0], p.scale, _slope_scale(p), _value_scale(p), to.stride(0), dk.stride(0),
        H=p.heads, STAGES=2, ADDS=dq is not None, **constants,
    )  # fmt: skip
    sums.leave(dk, dv)
    return to, dk, dv

"""From tensors to launches of the Hopper kernels with relative bias and candidates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor

from gem_core.errors import OpError
from gem_core.ops import siblings
from gem_core.ops.contract import Problem
from gem_kernels.triton.attention import launch_backward, launch_forward, warp_sums
from gem_kernels.triton.attention.bias_tables import PAD
from gem_kernels.triton.attention.inputs import Inputs, bias_strides, choose_and_run, dense_columns
from gem_kernels.triton.attention.plan import Plan, plan
from gem_kernels.triton.attention.schedule import TileList
from gem_kernels.triton.common.configs import Config, choose
from gem_kernels.triton.common.device import DeviceInfo
from gem_kernels.triton.common.launch import launch
from gem_kernels.triton.hopper import bias_ptx
from gem_kernels.triton.hopper.launch import _addressable, _box, _folded, _nothing, _slope_scale, _value_scale

_ROWS = 128
_UNIT = 8192
# Buckets that a byte can name, and that the lanes of a warp and the bins in shared memory hold.
_CODES, _LANES = 256, 32
# Tiles that are dealt by their size, in waves of as many as are worked on at a time.
_WAVES = 4


def forward(problem: Problem, tensors: tuple[Tensor | None, ...], gluon_only: bool = False) -> tuple[Tensor, Tensor | None]:
    """Output ``[rows, H, D]`` and, for softmax, lse ``[H, rows]`` (else None)."""
    p = plan(problem)
    x = Inputs(p, tensors)
    if gluon_only and not _nothing(x):
        _refuse(x, problem)
    if _nothing(x) or x.edges >= _CODES:
        return launch_forward.forward(problem, tensors)
    out = torch.empty(x.out_rows, p.heads, p.dv, dtype=x.q.dtype, device=x.device)
    lse = torch.empty(p.heads, x.out_rows, dtype=torch.float32, device=x.device) if p.softmax else None
    x.q, x.k, x.v = (_addressable(t) for t in (x.q, x.k, x.v))
    if p.targets:
        x.target_k, x.target_v = x.k, x.v

    def run(config: Config) -> None:
        if config["GLUON"]:
            _forward(x, out, lse, config)
        else:
            launch_forward.fill(x, out, lse)

    _choose(x, "hopper.bias_forward", gluon_only, run)
    return out, lse


def _choose(x: Inputs, kernel: str, only: bool, run: Callable[[Config], None]) -> None:
    facts = (*x.plan.facts, ("only", only))
    run(choose(kernel, facts, x.info, lambda: candidates(kernel, only), run))


def candidates(kernel: str, only: bool) -> list[Config]:
    """For hopper.bias_forward and hopper.bias_backward: with ``only`` these kernels, else the portable ones unless a rule says that these
    were measured to be faster."""
    found: list[Config] = [{"GLUON": 1, "STAGES": 3, "CHAIN": chain, "FETCH": 1} for chain in (0, 1)]
    if kernel == "hopper.bias_backward":
        found = [{"GLUON": 1}]
    return found if only else [{"GLUON": 0}, *found]


def backward(
    problem: Problem, saved: tuple[Tensor | None, ...], dout: Tensor, needs: tuple[bool, ...], gluon_only: bool = False
) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, v, target_k, target_v, bias_position, bias_time, None where not needed."""
    p = plan(problem)
    x = Inputs(p, saved[:18])
    if _nothing(x) or not all(needs[:3]) or not (needs[5] and needs[6]) or _wide(x):
        return launch_backward.backward(problem, saved, dout, needs)
    found: list[tuple[Tensor | None, ...]] = []

    def run(config: Config) -> None:
        gluon = config["GLUON"]
        found[:] = [_backward(x, saved[18:], dout, needs) if gluon else launch_backward.backward(problem, saved, dout, needs)]

    _choose(x, "hopper.bias_backward", gluon_only, run)
    return found[0]


def _backward(x: Inputs, results: tuple[Tensor | None, ...], dout: Tensor, needs: tuple[bool, ...]) -> tuple[Tensor | None, ...]:
    p = x.plan
    x.q, x.k, x.v = (_addressable(t) for t in (x.q, x.k, x.v))
    if p.targets:
        x.target_k, x.target_v = x.k, x.v
    out, lse = results if p.softmax else (None, None)
    pass_ = launch_backward._Backward(x, out, lse, _addressable(dense_columns(dout)), needs)
    pass_.dq, dk, dv = siblings.empty_grads((x.q, x.k, x.v), (True, True, True))
    if p.targets:
        pass_._own(dk, dv)
    tables: list[Tensor] = []
    choose_and_run(x, "hopper.bias_dq", dq_candidates, lambda config: tables.__setitem__(slice(None), _dq(pass_, config)))
    choose_and_run(x, "hopper.bias_dkdv", dkdv_candidates, lambda config: _dkdv(pass_, dk, dv, config))
    return pass_.dq, dk, dv, None, None, *tables


def _wide(x: Inputs) -> bool:
    """Whether the backward pass has no room for the bias's tables."""
    return row_width(x) > launch_backward._WIDEST_ROW or x.edges >= _LANES


def _refuse(x: Inputs, problem: Problem) -> None:
    """Tables that the portable kernels would be taken for, which this implementation promises not to do; the problem does not show them.

    :raises OpError: with what the kernels hold.
    """
    if x.edges < _CODES and not (problem.needs_grad and _wide(x)):
        return
    raise OpError(
        f"hopper-only: a bias of {x.edges + 1:,} time buckets and {2 * x.radius + 1:,} positions; its kernels hold {_CODES} buckets, with "
        f"gradients {_LANES} buckets and rows of {launch_backward._WIDEST_ROW:,} entries",
        where=f"kernels.ops.{problem.op}",
        fix='choose "hopper", which takes the portable kernels there',
    )


def row_width(x: Inputs) -> int:
    return launch_backward.row_width(x.radius, x.bias_time.shape[1])


def dq_candidates(_kernel: str, p: Plan, _info: DeviceInfo) -> list[Config]:
    """Softmax hands dS over in fp32, which leaves less room for tiles."""
    stages, held = (3, 1) if p.softmax else (2, 2)
    return [{"STAGES": stages, "HELD": held, "AHEAD": ahead, "FETCH": 1} for ahead in (0, 1)]


def dkdv_candidates(_kernel: str, _p: Plan, _info: DeviceInfo) -> list[Config]:
    return [{"STAGES": 2, "HELD": 2, "FETCH": 1}]


def _dkdv(pass_: launch_backward._Backward, dk: Tensor, dv: Tensor, config: Config) -> None:
    from gem_kernels.triton.hopper.backward_dkdv_bias import hopper_bias_dkdv_kernel

    x, p, t = pass_.x, pass_.x.plan, pass_.x.tables
    tiles = x.k_tiles(_ROWS)
    entries, codes = coded(x, tiles, keys=True)
    launch(
        hopper_bias_dkdv_kernel, (min(x.info.sms, tiles.bound * p.kv_heads),), x.device,
        _box(x.q, 64), _box(x.k, 64), _box(x.v, 64), _box(pass_.dout, 64), _box(dk, 64), _box(dv, 64), dk, dv, pass_.lse, pass_.delta,
        entries, tiles.count, x.k_offsets, t.down, t.time, codes, x.act_ids,
        x.batch, x.out_rows, x.k.shape[0], x.radius, x.edges, p.scale, _slope_scale(p), _value_scale(p), dk.stride(0),
        *bias_strides(x),
        HKV=p.kv_heads, LANES=x.edges < _LANES, **constants(p), **config,
    )  # fmt: skip


def _dq(pass_: launch_backward._Backward, config: Config) -> list[Tensor]:
    from gem_kernels.triton.hopper.backward_dq_bias import hopper_bias_dq_kernel

    x, p, t = pass_.x, pass_.x.plan, pass_.x.tables
    tiles = x.q_tiles(_ROWS)
    entries, codes = coded(x, tiles, masks=True)
    width = row_width(x)
    programs = max(1, min(x.info.sms // p.heads, tiles.bound))
    partial = torch.zeros(programs, p.heads, 6, width, dtype=torch.float32, device=x.device)
    folded = _folded(p)
    left = (1.5, 0.5)[folded - 1] if folded else p.folded_gain
    k = x.k if p.targets else None
    out, dout, dq = pass_.out, pass_.dout, pass_.dq
    strides = (0, 0) if out is None else out.stride()[:2]
    sums = {name: text for name, text in warp_sums.constants(64, width, True).items() if not name.startswith("REACHING")}
    sums["BOTH"], sums["BOTH_TYPES"] = bias_ptx.add_to_bins(width)
    launch(
        hopper_bias_dq_kernel, (programs * p.heads,), x.device,
        _box(x.q, 64), _box(x.k, 64), _box(x.v, 64), _box(dout, 64), _box(dq, 64), dq, out, pass_.lse, pass_.delta,
        entries, tiles.count, x.q_offsets, t.up, t.time, codes, x.bias_time_edges, x.q_times, x.k_times,
        pass_.ds_own, k, partial, x.act_ids,
        x.batch, x.out_rows, x.radius, x.edges, width, p.scale, _slope_scale(p), p.folded_gain / left, pass_.delta_scale,
        *strides, dq.stride(0), *bias_strides(x), x.k.stride(0), x.k.stride(1),
        H=p.heads, SAME=x.q_times is x.k_times and x.q_offsets is x.k_offsets, TIME_STEPS=x.time_steps, PAD=PAD, LANES=x.edges < _LANES,
        **sums, **constants(p, 16), **config,
    )  # fmt: skip
    return list(launch_backward.bias_gradients(x, partial.sum((0, 2)) * (p.out_scale * left)))


def _forward(x: Inputs, out: Tensor, lse: Tensor | None, config: Config) -> None:
    from gem_kernels.triton.hopper.forward_bias import hopper_bias_fwd_kernel

    p, t = x.plan, x.tables
    tiles = x.q_tiles(_ROWS)
    entries, codes = coded(x, tiles)
    own = launch_forward._own_scores(x) if p.targets else None
    v = x.v if p.targets else None
    launch(
        hopper_bias_fwd_kernel, (min(x.info.sms, tiles.bound * p.heads),), x.device,
        _box(x.q, 64), _box(x.k, 64), _box(x.v, 64), _box(out, 64), out, lse, entries, tiles.count, x.q_offsets,
        t.up, t.time, codes, own, v, x.act_ids,
        x.batch, x.out_rows, x.radius, x.edges, p.scale, _value_scale(p), out.stride(0),
        *bias_strides(x), x.v.stride(0), x.v.stride(1),
        H=p.heads, LANES=x.edges < _LANES, **constants(p), **{name: value for name, value in config.items() if name != "GLUON"},
    )  # fmt: skip


def room(x: Inputs, keys: bool) -> tuple[bool, int, int]:
    """(whether a tile has the units of what a causal mask leaves it alone, units for every 128 rows, all units), see `bias_codes`."""
    p = x.plan
    packed = p.causal and x.q_offsets is x.k_offsets
    rows, own, other = (x.k.shape[0], p.k_bound, p.q_bound) if keys else (x.out_rows, p.q_bound, p.k_bound)
    units = -(-own // _ROWS) + 1 if packed else -(-other // 64)
    # A tile of 128 columns may read one more than it needs, and the key side one ahead.
    return packed, units, (rows // _ROWS + x.batch) * units + 2


def coded(x: Inputs, tiles: TileList, keys: bool = False, masks: bool = False) -> tuple[Tensor, Tensor]:
    """The entries of a list of query tiles, or of key tiles, spelt out, and their codes: a byte for each column that a row sees, or with
    ``masks`` a bit for each edge of time that a tile has."""
    from gem_kernels.triton.hopper.bias_codes import bias_codes_kernel

    t = x.tables
    entries = table(x, tiles, keys)
    codes = torch.empty(room(x, keys)[2], _UNIT, dtype=torch.int8, device=x.device)
    sides = (t.k_times, t.q_times, x.k_times, x.q_times) if keys else (t.q_times, t.k_times, x.q_times, x.k_times)
    launch(
        bias_codes_kernel, (tiles.bound, 2), x.device,
        codes, entries, tiles.count, *sides, t.index, x.bias_time_edges, x.edges,
        CAUSAL=x.plan.causal, KEYS=keys, STEPS=x.time_steps, MASKS=masks, num_warps=4,
    )  # fmt: skip
    return entries, codes


def table(x: Inputs, tiles: TileList, keys: bool) -> Tensor:
    """The entries of a list spelt out, see `bias_codes`."""
    from gem_kernels.triton.hopper.bias_codes import bias_table_kernel

    packed, units, _all = room(x, keys)
    slots = max(1, x.info.sms // (x.plan.kv_heads if keys else x.plan.heads))
    found = torch.empty(tiles.bound, 8, dtype=torch.int32, device=x.device)
    launch(
        bias_table_kernel, (tiles.bound,), x.device,
        found, tiles.tiles, tiles.count, x.q_offsets, x.k_offsets, x.num_targets, units, slots,
        ROWS=_ROWS, KEYS=keys, CAUSAL=x.plan.causal, PACKED=packed, WAVES=_WAVES, MATES=triton.next_power_of_2(_WAVES * slots), num_warps=1,
    )  # fmt: skip
    return found


def constants(p: Plan, warps: int = 12) -> dict[str, Any]:
    """Constants of all these kernels; ``warps`` is how many share the registers of an SM."""
    found = p.constants(True)
    return {name: found[name] for name in ("GROUP", "D", "SOFTMAX", "ACT", "ACT_SET", "CAUSAL", "FAST")} | {
        "FOLDED": _folded(p), "num_warps": 4, "maxnreg": 2048 // warps // 8 * 8,
    }  # fmt: skip

"""From saved tensors and dO to the launches of a backward scheme.

| scheme | programs | products a tile pair | for |
|---|---|---|---|
| split | dQ by query tiles, then dK, dV by key tiles | 3 + 4 | every option; deterministic |
| kv_resident | a (sample, head) whose keys fit one tile | 5 | short K and V; deterministic |
| q_resident | a (sample, head) whose queries fit one tile | 5 | short Q; deterministic |
| q_resident | a head, and an equal share of all keys | 5 | short shared Q; deterministic |
| sample | a (sample, head), dQ summed in a buffer | 5 | many samples times heads; deterministic |
| atomic | key tiles, dQ by atomics | 5 | few, long samples |
"""

from __future__ import annotations

import torch
from torch import Tensor

from gem_core.ops.contract import YES, Problem, Supported, no
from gem_kernels.triton.attention import candidates, column_sums, warp_sums
from gem_kernels.triton.attention.backward_bias import attention_bwd_bias_kernel
from gem_kernels.triton.attention.backward_dkdv import attention_bwd_dkdv_kernel
from gem_kernels.triton.attention.backward_dq import attention_bwd_dq_kernel
from gem_kernels.triton.attention.backward_shared import attention_bwd_shared_kernel
from gem_kernels.triton.attention.bias_tables import PAD
from gem_kernels.triton.attention.inputs import Inputs, bias_strides, choose_and_run, dense_columns, descriptors, grid_size, row_strides
from gem_kernels.triton.attention.plan import Plan, plan
from gem_kernels.triton.attention.rows import OWN_PARTS, OWN_ROWS, attention_bwd_own_kernel, attention_delta_kernel
from gem_kernels.triton.attention.tiles import descriptor, tma_fits
from gem_kernels.triton.common.configs import Config
from gem_kernels.triton.common.launch import launch

Saved = tuple[Tensor | None, ...]

SCHEMES = ("split", "kv_resident", "q_resident", "sample", "atomic")
# Sums of the bias's gradient are kept for every warp up to this many entries: 20 MB on an H200.
_WIDEST_ROW = 4096
# Programs an SM of a shared Q's backward pass, at most: a partial row of sums each.
_MOST_SHARES = 4
_DQ_MODES = {"split": 0, "kv_resident": 1, "sample": 2, "atomic": 3}


def scheme_supports(p: Plan, scheme: str) -> Supported:
    """Whether ``scheme`` can do the problem, with the reason where it cannot."""
    if scheme == "split":
        return YES
    if scheme == "atomic" and p.deterministic:
        return no("the order of its atomic additions varies, and deterministic algorithms are asked for")
    if not p.simple:
        return no(f"{scheme} backward has no candidates, bias or request sharing")
    if scheme == "q_resident":
        if p.mask != "full" or p.group > 1:
            return no("needs full attention and as many key heads as query heads")
        return YES if p.q_bound <= candidates.resident_limit(p) else no(f"needs max_q_len <= {candidates.resident_limit(p)}")
    if p.broadcast:
        return no(f"{scheme} backward has no shared q")
    if scheme == "kv_resident":
        if p.mask != "full":
            return no("needs full attention")
        return YES if p.k_bound <= candidates.resident_limit(p) else no(f"needs max_k_len <= {candidates.resident_limit(p)}")
    return YES


def schemes(p: Plan) -> list[Config]:
    """What automatic choice may take, best guess first: the fewest products, and no atomics (repeated runs then agree bit for bit)."""
    return [{"SCHEME": s} for s in ("kv_resident", "q_resident", "split", "sample") if scheme_supports(p, s)]


def backward(problem: Problem, saved: Saved, dout: Tensor, needs: tuple[bool, ...], scheme: str | None = None) -> Saved:
    """Gradients of q, k, v, target_k, target_v, bias_position, bias_time, None where not needed."""
    p = plan(problem)
    inputs = 18
    x = Inputs(p, saved[:inputs])
    out, lse = saved[inputs:] if p.softmax else (None, None)
    pass_ = _Backward(x, out, lse, dense_columns(dout), needs)
    if x.batch == 0 or x.out_rows == 0:
        return pass_.zeros()
    if scheme is not None or not all(needs[:3]):
        return pass_.run(scheme or "split")
    grads: list[Saved] = []

    def run(config: Config) -> None:
        grads[:] = [pass_.run(config["SCHEME"])]

    choose_and_run(x, "attention.backward", lambda *_: schemes(p), run)
    return grads[0]


class _Backward:
    def __init__(self, x: Inputs, out: Tensor | None, lse: Tensor | None, dout: Tensor, needs: tuple[bool, ...]) -> None:
        p = x.plan
        self.x, self.out, self.lse, self.dout = x, out, lse, dout
        self.need_q, self.need_keys = needs[0], needs[1] or needs[2]
        self.need_targets, self.need_bias = needs[3] or needs[4], needs[5] or needs[6]
        self.needs = needs
        self.delta = torch.empty(p.heads, x.out_rows, dtype=torch.float32, device=x.device) if p.softmax else None
        self.ds_own: Tensor | None = None
        gain = p.out_scale * p.folded_gain
        self.ds_scale, self.dv_scale = p.scale * gain, gain
        self.delta_scale = 1.0 / p.out_scale if p.out_scale else 0.0

    def zeros(self) -> Saved:
        x = self.x
        tensors = (x.q, x.k, x.v, x.target_k, x.target_v, x.bias_position, x.bias_time)
        return tuple(torch.zeros(t.shape, dtype=t.dtype, device=t.device) if need else None for t, need in zip(tensors, self.needs))

    def run(self, scheme: str) -> Saved:
        x, p = self.x, self.x.plan
        # slices of one tensor where q, k and v are those of one projection
        keys = self.need_keys or (p.targets and not p.shared and self.need_q) or scheme != "split"
        needs = self.need_q or scheme != "split", keys, keys
        resident = scheme == "q_resident"
        parts = _MOST_SHARES * x.info.sms // p.heads + 1 if p.broadcast else x.batch
        (self.dq, dk, dv), self.sums = column_sums.empty_grads(x, parts, needs, offered=resident)
        dq = None
        d_position = d_time = None
        d_target_k, d_target_v = self._own(dk, dv) if p.targets else (None, None)
        if resident:
            assert dk is not None  # as are all gradients here
            assert dv is not None
            dq = self._shared(dk, dv) if p.broadcast else self._query_side("attention.q_resident", dk, dv)
            self.sums.leave(dk, dv)
        elif scheme == "split":
            if self.need_q and self.need_bias:
                dq = self.dq
            elif self.need_q:
                dq = self._query_side("attention.dq", None, None)
            elif p.softmax:
                self._delta()
            d_position, d_time = self._bias(dq) if self.need_bias else (None, None)
            if self.need_keys:
                self._key_side("attention.dkdv", 0, None, dk, dv)
        else:
            direct = scheme == "kv_resident"
            dq = self.dq if direct else torch.zeros(x.q.shape, dtype=torch.float32, device=x.device)
            if p.softmax and not direct:
                self._delta()
            self._key_side(f"attention.{scheme}", _DQ_MODES[scheme], dq, dk, dv)
            dq = dq if direct else self.dq.copy_(dq)
        grads = (dq, dk, dv, d_target_k, d_target_v, d_position, d_time)
        return tuple(g if need else None for g, need in zip(grads, self.needs))

    def _query_side(self, kernel: str, dk: Tensor | None, dv: Tensor | None) -> Tensor:
        x, p = self.x, self.x.plan
        if not p.broadcast:
            dq = self.dq
            choose_and_run(x, kernel, candidates.query_side, lambda c: self._launch_dq(c, dq, dk, dv))
            return dq
        partial: list[Tensor] = []

        def run(config: Config) -> None:
            blocks = -(-x.q_len // self._rows(config, dk))
            partials = max(1, min(x.batch, max(config["PERSISTENT"], 1) * x.info.sms // (p.heads * blocks)))
            partial[:] = [torch.empty(partials, *x.q.shape, dtype=torch.float32, device=x.device)]
            self._launch_dq(config, partial[0], dk, dv, grid=partials * p.heads * blocks)

        choose_and_run(x, kernel, candidates.query_side, run)
        return partial[0].sum(0).to(x.q.dtype)

    def _shared(self, dk: Tensor, dv: Tensor) -> Tensor:
        """dQ of a shared Q, whose rows fit one tile, and dK, dV on the way."""
        x, p = self.x, self.x.plan
        partial: list[Tensor] = []

        def run(config: Config) -> None:
            meta = dict(config)
            shares = min(max(1, meta.pop("PERSISTENT") * x.info.sms // p.heads), -(-x.k.shape[0] // meta["BLOCK_N"]) or 1)
            meta["BLOCK_M"] = m = self._rows(config, dk)
            tma = meta.pop("TMA") and all(tma_fits(t) for t in (x.q, x.k, x.v, self.dout))
            q, k, v, dout = descriptors(tma, (x.q, m), (x.k, meta["BLOCK_N"]), (x.v, meta["BLOCK_N"]), (self.dout, m))
            partial[:] = [torch.empty(shares, *x.q.shape, dtype=torch.float32, device=x.device)]
            launch(
                attention_bwd_shared_kernel, (shares * p.heads,), x.device,
                q, k, v, self.out, dout, self.lse, partial[0], dk, dv, *self.sums.zeros(), x.k_offsets, x.act_ids,
                *row_strides(x.q, x.k, x.v, self.out, self.dout), *partial[0].stride()[1:3], *row_strides(dk, dv),
                x.batch, x.q_len, x.out_rows, x.k.shape[0], p.scale, self.ds_scale, self.dv_scale, self.delta_scale,
                **p.constants(x.info.nvidia, "GROUP", "CAUSAL", "WINDOW"), TMA=tma, **meta,
            )  # fmt: skip

        choose_and_run(x, "attention.q_resident", candidates.query_side, run)
        return partial[0].sum(0).to(x.q.dtype)

    def _rows(self, config: Config, dk: Tensor | None) -> int:
        """Query rows of a tile: the whole sample where the keys' gradients are written on the way."""
        return max(config["BLOCK_M"], self.x.plan.q_bound) if dk is not None else config["BLOCK_M"]

    def _launch_dq(self, config: Config, dq: Tensor, dk: Tensor | None, dv: Tensor | None, grid: int | None = None) -> None:
        x, p, meta = self.x, self.x.plan, dict(config)
        emit = dk is not None
        meta["BLOCK_M"] = m = self._rows(config, dk)
        tma = meta.pop("TMA") and all(tma_fits(t) for t in (x.q, x.k, x.v, self.dout))
        persistent = meta.pop("PERSISTENT")
        tiles = x.sample_tiles(x.k_offsets) if emit or p.broadcast else x.q_tiles(m)
        q, k, v, dout = descriptors(tma, (x.q, m), (x.k, meta["BLOCK_N"]), (x.v, meta["BLOCK_N"]), (self.dout, m))
        launch(
            attention_bwd_dq_kernel, (grid or grid_size(tiles.bound, p.heads, persistent, x.info.sms),), x.device,
            q, k, v, self.out, dout, self.lse, self.delta, dq, dk, dv, *self.sums.zeros(),
            *x.sample_args(self.ds_own, x.target_k), *x.bias_args(),
            x.act_ids, tiles.tiles, tiles.count,
            *row_strides(x.q, x.k, x.v, self.out, self.dout), *(dq.stride()[-3:-1]), *row_strides(dk, dv, x.target_k),
            *bias_strides(x), x.batch, x.q_len, x.out_rows, x.k.shape[0], p.left, p.right, x.radius, x.edges,
            p.scale, self.ds_scale, self.dv_scale, self.delta_scale,
            **p.constants(x.info.nvidia), TIME_STEPS=x.time_steps, EMIT=emit, TMA=tma, **meta,
        )  # fmt: skip

    def _key_side(self, kernel: str, mode: int, dq: Tensor | None, dk: Tensor, dv: Tensor) -> None:
        x = self.x
        order = first = None
        if x.kv_index is not None:
            request, order = torch.sort(x.kv_index, stable=True)
            first = torch.searchsorted(request, torch.arange(x.requests + 1, dtype=request.dtype, device=x.device))

        def run(config: Config) -> None:
            if mode == 3:
                dq.zero_()
            self._launch_dkdv(config, mode, dq, dk, dv, order, first)

        choose_and_run(x, kernel, candidates.key_side, run)

    def _launch_dkdv(
        self, config: Config, mode: int, dq: Tensor | None, dk: Tensor, dv: Tensor, order: Tensor | None, first: Tensor | None
    ) -> None:
        x, p, meta = self.x, self.x.plan, dict(config)
        if mode == 1:
            meta["BLOCK_N"] = max(meta["BLOCK_N"], p.k_bound)
        m, n, persistent = meta["BLOCK_M"], meta["BLOCK_N"], meta.pop("PERSISTENT")
        tma = meta.pop("TMA") and all(tma_fits(t) for t in (x.q, x.k, x.v, self.dout))
        tiles = x.sample_tiles(x.q_offsets) if mode in (1, 2) else x.k_tiles(n)
        q, k, v, dout = descriptors(tma, (x.q, m), (x.k, n), (x.v, n), (self.dout, m))
        dq_box = descriptor(dq, m) if tma and mode == 1 else None
        launch(
            attention_bwd_dkdv_kernel, (grid_size(tiles.bound, p.kv_heads, persistent, x.info.sms),), x.device,
            q, k, v, dout, self.lse, self.delta, dq, dq_box, dk, dv,
            x.q_offsets, x.k_offsets, x.num_targets, x.context_len, x.kv_index, order, first, *x.bias_args(), x.act_ids,
            tiles.tiles, tiles.count,
            *row_strides(x.q, x.k, x.v, self.dout, dq, dk, dv), *bias_strides(x),
            x.batch, x.requests, x.q_len, x.out_rows, x.k.shape[0], p.left, p.right, x.radius, x.edges,
            p.scale, self.ds_scale, self.dv_scale,
            **p.constants(x.info.nvidia), TIME_STEPS=x.time_steps, DQ=mode, TMA=tma, **meta,
        )  # fmt: skip

    def _delta(self) -> None:
        x, p = self.x, self.x.plan
        block = 64 if p.dv_pad <= 64 else 32
        launch(
            attention_delta_kernel, (-(-x.out_rows // block) * p.heads,), x.device,
            self.out, self.dout, self.delta, *row_strides(self.out, self.dout), x.out_rows, self.delta_scale,
            H=p.heads, DV=p.dv, DV_PAD=p.dv_pad, BLOCK_M=block, num_warps=4,
        )  # fmt: skip

    def _own(self, dk: Tensor | None, dv: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """dS of the candidates' own pairs into ``ds_own``, and the gradients of their own rows: into dk, dv, or under request sharing into
        tensors of their own, which are returned."""
        x, p = self.x, self.x.plan
        self.ds_own = torch.empty(p.heads, x.out_rows, dtype=torch.float32, device=x.device)
        to_k, to_v = dk, dv
        if p.shared:
            to_k, to_v = (_like(x.target_k), _like(x.target_v)) if self.need_targets else (None, None)
        launch(
            attention_bwd_own_kernel, (x.batch * p.kv_heads * OWN_PARTS,), x.device,
            x.q, self.out, self.dout, self.lse, self.ds_own, to_k, to_v,
            x.q_offsets, x.k_offsets, x.num_targets, x.target_k, x.target_v, x.kv_index, *x.own_bias_args(), x.act_ids,
            *row_strides(x.q, self.out, self.dout, to_k, to_v, x.target_k, x.target_v), *bias_strides(x),
            x.batch, x.out_rows, x.radius, x.edges, p.scale, self.ds_scale, self.dv_scale, self.delta_scale,
            **p.constants(x.info.nvidia, "PRECISION", "CAUSAL", "WINDOW"), TIME_STEPS=x.time_steps, BLOCK_M=OWN_ROWS, PARTS=OWN_PARTS,
            num_warps=4,
        )  # fmt: skip
        return (to_k, to_v) if p.shared else (None, None)

    def _bias(self, dq: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Gradients of the bias tables; of q on the way, into ``dq``, if given."""
        x, p = self.x, self.x.plan
        width = row_width(x.radius, 0 if x.bias_time is None else x.bias_time.shape[1])
        result: list[Tensor] = []

        def run(config: Config) -> None:
            meta = dict(config)
            tma = meta.pop("TMA") and all(tma_fits(t) for t in (x.q, x.k, x.v, self.dout))
            m, n = meta["BLOCK_M"], meta["BLOCK_N"]
            tiles = x.q_tiles(m)
            programs = max(1, min(tiles.bound, max(meta.pop("PERSISTENT"), 1) * x.info.sms // p.heads))
            meta["LANES"] = lanes = meta["LANES"] and width <= _WIDEST_ROW
            partial = torch.zeros(programs, p.heads, m // 16 + 1 if lanes else 1, width, dtype=torch.float32, device=x.device)
            sums = warp_sums.constants(n, width, lanes)
            q, k, v, dout = descriptors(tma, (x.q, m), (x.k, n), (x.v, n), (self.dout, m))
            launch(
                attention_bwd_bias_kernel, (programs * p.heads,), x.device,
                q, k, v, self.out, dout, self.lse, self.delta, dq, partial,
                *x.sample_args(self.ds_own, x.target_k), *x.bias_args(), x.act_ids, tiles.tiles, tiles.count,
                *row_strides(x.q, x.k, x.v, self.out, self.dout, dq, x.target_k), *bias_strides(x),
                x.batch, x.out_rows, p.left, p.right, x.radius, x.edges, width, p.scale, self.ds_scale, self.delta_scale,
                **p.constants(x.info.nvidia), TIME_STEPS=x.time_steps, PAD=PAD, TMA=tma, **sums, **meta,
            )  # fmt: skip
            result[:] = [partial.sum((0, 2)) * self.dv_scale]

        choose_and_run(x, "attention.bias", candidates.bias, run)
        return bias_gradients(x, result[0])


def row_width(radius: int, times: int) -> int:
    """Entries of a row of the bias's sums, see `backward_bias`."""
    return 2 * (radius + PAD) + 1 + 2 * times


def bias_gradients(x: Inputs, sums: Tensor) -> tuple[Tensor, Tensor | None]:
    """Gradients of the tables from the sum of all rows, ``[H, row_width]``."""
    span = 2 * x.radius + 1
    times = 0 if x.bias_time is None else x.bias_time.shape[1]
    inside, buckets, reached = sums.split((span + 2 * PAD, times, times), 1)
    d_position = inside[:, PAD : PAD + span].clone()
    d_position[:, 0] += inside[:, :PAD].sum(1)
    d_position[:, -1] += inside[:, PAD + span :].sum(1)
    d_time = None
    if x.bias_time is not None:
        d_time = buckets + reached
        d_time[:, :-1] -= reached[:, 1:]
        d_time = d_time.to(x.bias_time.dtype)
    return d_position.to(x.bias_position.dtype), d_time


def _like(t: Tensor) -> Tensor:
    return torch.empty(t.shape, dtype=t.dtype, device=t.device)

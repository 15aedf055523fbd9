"""Tile configurations that the analytic model proposes, best guess first; the committed tables and measurements go before them."""

from __future__ import annotations

from gem_kernels.triton.attention.plan import Plan
from gem_kernels.triton.common.configs import Config
from gem_kernels.triton.common.device import DeviceInfo


def resident_limit(plan: Plan) -> int:
    """The most rows of one side that a program may hold for a whole sample: their two fp32 accumulators must fit the registers."""
    wide = max(plan.d_pad, plan.dv_pad)
    if plan.dtype == "fp32":
        return 32 if wide <= 128 else 16
    return 128 if wide <= 128 else 64


def forward(kernel: str, plan: Plan, info: DeviceInfo) -> list[Config]:
    """BLOCK_M, BLOCK_N, TMA, PERSISTENT (programs an SM, 0: one tile a program), num_warps, num_stages."""
    if info.key == "interpreter":
        return [_config(16, 16, 1, 1, tma=False, persistent=1)]
    wide = max(plan.d_pad, plan.dv_pad)
    if plan.dtype == "fp32":
        block = 32 if wide <= 128 else 16
        return [_config(block, 32 if wide <= 64 else block, 4, 1, tma=False)]
    rows = 64 if plan.q_bound <= 64 else 128
    found = []
    for tma in (True, False) if info.tma else (False,):
        if wide <= 64:
            found += [_config(rows, 128, rows // 16, 2, tma=tma), _config(rows, 64, 4, 3, tma=tma), _config(rows, 64, 8, 3, tma=tma)]
        elif wide <= 128:
            found += [_config(rows, 64, rows // 16, 2, tma=tma), _config(rows, 64, rows // 16, 3, tma=tma)]
            found += [_config(rows, 32, rows // 16, 4, tma=tma), _config(rows, 128, 8, 2, tma=tma), _config(64, 64, 4, 2, tma=tma)]
        else:
            found += [_config(rows, 32, 8, 2, tma=tma), _config(rows, 64, 8, 2, tma=tma), _config(64, 32, 4, 2, tma=tma)]
    return found


def query_side(kernel: str, plan: Plan, info: DeviceInfo) -> list[Config]:
    """For attention.dq and attention.q_resident (BLOCK_M is then raised to the longest sample)."""
    if info.key == "interpreter":
        return [_config(16, 16, 1, 1, tma=False, persistent=1)]
    wide = max(plan.d_pad, plan.dv_pad)
    if plan.dtype == "fp32":
        return [_config(16, 16 if wide > 64 else 32, 4, 1, tma=False, persistent=4)]
    resident = kernel == "attention.q_resident"
    rows = 64 if plan.q_bound <= 64 else 128
    found = []
    for tma in (True, False) if info.tma else (False,):
        if resident:
            found += [_config(16, 64, 4, 2, tma=tma, persistent=4), _config(16, 128, 8, 2, tma=tma, persistent=2)]
        elif wide <= 128:
            found += [_config(rows, 64, rows // 16, 2, tma=tma), _config(64, 64, 4, 2, tma=tma), _config(rows, 32, 8, 3, tma=tma)]
        else:
            found += [_config(64, 32, 8, 2, tma=tma), _config(64, 32, 4, 2, tma=tma)]
    if plan.broadcast:
        found = [{**c, "PERSISTENT": c["PERSISTENT"] or 2} for c in found]
    return found


def key_side(kernel: str, plan: Plan, info: DeviceInfo) -> list[Config]:
    """For attention.dkdv, attention.atomic, attention.sample and attention.kv_resident (BLOCK_N is then raised to the longest sample)."""
    if info.key == "interpreter":
        return [_config(16, 16, 1, 1, tma=False, persistent=1)]
    wide = max(plan.d_pad, plan.dv_pad)
    if plan.dtype == "fp32":
        return [_config(16 if wide > 64 else 32, 16, 4, 1, tma=False)]
    resident = kernel == "attention.kv_resident"
    found = []
    for tma in (True, False) if info.tma else (False,):
        if wide > 128:
            found += [_config(32, 16 if resident else 64, 8, 2, tma=tma)]
        elif resident:
            found += [_config(64, 16, 4 if plan.k_bound <= 64 else 8, 2, tma=tma), _config(32, 16, 4, 2, tma=tma)]
        else:
            found += [_config(64, 128, 8, 2, tma=tma), _config(64, 64, 4, 2, tma=tma), _config(32, 128, 8, 3, tma=tma)]
    return found


def bias(kernel: str, plan: Plan, info: DeviceInfo) -> list[Config]:
    """For attention.bias."""
    if info.key == "interpreter":
        return [_config(16, 16, 1, 1, tma=False, persistent=2)]
    if plan.dtype == "fp32":
        return [_config(16, 16, 4, 1, tma=False, persistent=4)]
    return [_config(64, 64 if max(plan.d_pad, plan.dv_pad) <= 128 else 32, 4, 2, tma=info.tma, persistent=2)]


def _config(m: int, n: int, warps: int, stages: int, *, tma: bool, persistent: int = 0) -> Config:
    return {"BLOCK_M": m, "BLOCK_N": n, "TMA": tma, "PERSISTENT": persistent, "num_warps": warps, "num_stages": stages}

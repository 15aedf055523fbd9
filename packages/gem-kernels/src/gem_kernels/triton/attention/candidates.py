"""Tile configurations that the analytic model proposes, best guess first; the committed tables and measurements go before them.

Keys: BLOCK_M, BLOCK_N; TMA (descriptors where the tensors allow them); PERSISTENT (programs an SM, 0: one tile a program); RESIDENT
(forward: key tiles held on chip, 0: streamed) and CHUNK (query tiles a program); num_warps, num_stages, maxnreg. SCHEME: of a backward.
The model: on Hopper two programs of 8 warps (or three of 4) have to share an SM, as one does its elementwise work while the other's
products run; so 128 registers a thread and half the shared memory each.
"""

from __future__ import annotations

from gem_kernels.triton.attention.plan import Plan
from gem_kernels.triton.common.configs import Config
from gem_kernels.triton.common.device import DeviceInfo


def _config(m: int, n: int, warps: int, stages: int, **more: int | bool) -> Config:
    return {"BLOCK_M": m, "BLOCK_N": n, "TMA": False, "PERSISTENT": 0, "num_warps": warps, "num_stages": stages, **more}


def _forward(m: int, n: int, warps: int, stages: int, **more: int | bool) -> Config:
    return {"RESIDENT": 0, "CHUNK": 1, **_config(m, n, warps, stages, **more)}


def _without(config: Config, name: str) -> Config:
    return {key: value for key, value in config.items() if key != name}


def _for_chip(found: list[Config], info: DeviceInfo) -> list[Config]:
    """All with descriptors where the chip has them, and the first without; no register caps where the compiler knows none."""
    if not info.nvidia:
        return [_without(c, "maxnreg") for c in found]
    return [{**c, "TMA": True} for c in found] + found[:1] if info.tma else found


def resident_limit(p: Plan) -> int:
    """The most rows of one side that a backward program may hold for a whole sample: two fp32 accumulators must fit the registers."""
    wide = max(p.d_pad, p.dv_pad)
    if p.dtype == "fp32":
        return 32 if wide <= 128 else 16
    return 128 if wide <= 128 else 64


def _row_block(p: Plan) -> int:
    """Query rows of a tile: 64 where a sample has few or a row sees few keys, so that less of the tiles is padding or masked."""
    return 64 if p.q_bound <= 256 or 0 < p.band <= 512 else 128


def forward(kernel: str, p: Plan, info: DeviceInfo) -> list[Config]:
    """For attention.forward and attention.forward_subtract."""
    if info.key == "interpreter":
        return [_forward(64, 32, 1, 1, PERSISTENT=1)]
    wide = max(p.d_pad, p.dv_pad)
    if p.dtype == "fp32":
        block = 32 if wide <= 64 else 16
        return [_forward(block, block, 4, 1)]
    rows = _row_block(p)
    if p.time:
        # of what spills nothing
        return _for_chip([_forward(64, 32, 4, 3), _forward(128, 32, 8, 3), _forward(64, 32, 4, 2)], info)
    if wide <= 64:
        found = [_forward(64, 64, 4, 3), _forward(128, 64, 8, 3), _forward(rows, 128, rows // 16, 2)]
    elif wide <= 128 and rows == 64:
        found = [_forward(64, 64, 4, 2), _forward(64, 32, 4, 3, maxnreg=160), _forward(128, 32, 8, 4, maxnreg=128)]
        found += [_forward(64, 64, 4, 2, PERSISTENT=2), _forward(64, 128, 4, 2), _forward(128, 64, 8, 2)]
    elif wide <= 128:
        found = [_forward(128, 32, 8, 4, maxnreg=128), _forward(128, 64, 8, 2), _forward(128, 32, 8, 3, maxnreg=128)]
        found += [_forward(128, 64, 8, 3), _forward(128, 128, 8, 2), _forward(64, 64, 4, 2), _forward(64, 32, 4, 3, maxnreg=160)]
        found += [_forward(128, 32, 8, 4, maxnreg=128, PERSISTENT=2), _forward(256, 32, 16, 3, maxnreg=128)]
    else:
        found = [_forward(rows, 32, 8, 2), _forward(64, 64, 8, 2), _forward(64, 32, 4, 2)]
    if p.bias:
        found = [_without(c, "maxnreg") for c in found if c["BLOCK_N"] < 128]
    elif kernel == "attention.forward" and p.mask == "full" and not p.targets:
        resident = _resident(p, wide)
        found = found + resident if p.k_bound > 128 else resident + found
    return _for_chip(found, info)


def _resident(p: Plan, wide: int) -> list[Config]:
    """Resident variants that can hold the longest sample."""
    if wide > 128 or p.k_bound > 256:
        return []
    if p.k_bound > 128:
        return [_forward(128, 128, 8, 2, RESIDENT=2, CHUNK=8)]
    n = max(16, p.k_bound)
    return [_forward(64, n, 4, 2, RESIDENT=1, CHUNK=8), _forward(128, n, 8, 2, RESIDENT=1, CHUNK=4)]


def query_side(kernel: str, p: Plan, info: DeviceInfo) -> list[Config]:
    """For attention.dq and attention.q_resident (BLOCK_M is then raised to the longest sample)."""
    if info.key == "interpreter":
        return [_config(64, 32, 1, 1, PERSISTENT=1)]
    wide = max(p.d_pad, p.dv_pad)
    if p.dtype == "fp32":
        return [_config(16, 16 if wide > 64 else 32, 4, 1, PERSISTENT=4 if p.broadcast else 0)]
    rows = _row_block(p)
    if kernel == "attention.q_resident":
        found = [_config(16, 64, 4, 2), _config(16, 32, 4, 3), _config(16, 128, 8, 2)]
        if p.q_bound > 64:
            found = [_config(16, 32, 8, 2), _config(16, 64, 8, 2), _config(16, 32, 8, 3)]
    elif p.time:
        # of what spills nothing
        found = [_config(32, 32, 4, 2)]
    elif wide <= 64:
        found = [_config(64, 64, 4, 3), _config(128, 64, 8, 3), _config(rows, 128, 8, 2)]
    elif wide <= 128:
        found = [_config(128, 64, 8, 2), _config(64, 64, 4, 2), _config(128, 32, 8, 3), _config(64, 32, 4, 3), _config(64, 128, 8, 2)]
        if rows == 64:
            found = [found[1], found[3], found[0], found[2]]
    else:
        found = [_config(64, 32, 8, 2), _config(64, 32, 4, 2)]
    if p.broadcast:
        found = [{**c, "PERSISTENT": 2} for c in found]
    return _for_chip(found, info)


def key_side(kernel: str, p: Plan, info: DeviceInfo) -> list[Config]:
    """For attention.dkdv, attention.atomic, attention.sample and attention.kv_resident (BLOCK_N is then raised to the longest sample)."""
    if info.key == "interpreter":
        return [_config(32, 64, 1, 1, PERSISTENT=1)]
    wide = max(p.d_pad, p.dv_pad)
    if p.dtype == "fp32":
        return [_config(16 if wide > 64 else 32, 16, 4, 1)]
    if kernel == "attention.kv_resident":
        if p.k_bound <= 64:
            found = [_config(32, 16, 4, 2), _config(64, 16, 8, 2)]
            if p.softmax and p.k_bound > 32:
                found.reverse()
        else:
            found = [_config(32, 16, 8, 2), _config(32, 16, 8, 1), _config(16, 16, 8, 3)]
        if wide > 128:
            found = [_config(32, 16, 8, 2)]
    elif p.time:
        found = [_config(16, 64, 8, 2)]
    elif wide <= 64:
        found = [_config(64, 64, 4, 3), _config(64, 128, 8, 3), _config(128, 64, 8, 2)]
    elif wide <= 128:
        found = [_config(32, 128, 8, 3), _config(64, 64, 4, 2), _config(64, 128, 8, 2), _config(32, 64, 4, 2), _config(32, 64, 4, 3)]
        if p.k_bound <= 256 or 0 < p.band <= 512:
            found = [found[3], found[4], found[1], found[0], found[2]]
    else:
        found = [_config(32, 64, 8, 2), _config(32, 32, 4, 2)]
    return _for_chip(found, info)


def bias(kernel: str, p: Plan, info: DeviceInfo) -> list[Config]:
    """For attention.bias. LANES: sums in registers, for which a warp must have 16 rows of a wgmma."""
    if info.key == "interpreter":
        return [_config(32, 64, 1, 1, PERSISTENT=2, LANES=False)]
    if p.dtype == "fp32":
        return [_config(16, 16, 4, 1, PERSISTENT=4, LANES=False)]
    found = [_config(32, 32, 4, 2, TMA=info.tma, PERSISTENT=2, LANES=False)]
    if info.key == "sm_90" and max(p.d_pad, p.dv_pad) <= 128:
        found += [_config(64, n, 4, 2, TMA=info.tma, PERSISTENT=2, LANES=True) for n in (32, 64)]
    return found

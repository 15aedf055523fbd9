"""What a row of the attention benchmark should reach, from the rates of its peers and the ceilings of the same run.

In general the least of 1.3 times the best peer, a share of the matrix product rate times the fill of 64-row tiles, and a share of the byte
floor; yet never below a share of the floor that binds. Rows that no peer runs have goals of their own (`attention_rows.Row`).
"""

from __future__ import annotations

from typing import Any

import torch

from gem_core.bench.ceilings import Ceilings
from gem_kernels.bench.attention_peers import PEERS
from gem_kernels.bench.attention_rows import Data

_SHARES = {"forward": (0.75, 0.80, 0.60), "backward": (0.60, 0.65, 0.50)}
"""Of the matrix product rate, of the byte floor, of the floor that binds."""
_BETTER = 1.3
_TILE = 64


def fill(data: Data) -> float:
    """Attended pairs over pairs in the 64-row tiles that have one."""
    row, lk = data.row, data.k_lengths
    lq = torch.full_like(lk, row.q[0]) if row.broadcast else data.q_lengths
    left, right = row.window or (1 << 30, 1 << 30)
    shift = lk - lq
    tiles = torch.zeros((), dtype=torch.int64)
    for start in range(0, int(lq.max()), _TILE):
        end = torch.minimum(torch.tensor(start + _TILE), lq)
        first = (start + shift - left).clamp(min=0) // _TILE
        last = torch.minimum(lk, end + shift + (0 if row.causal else right)).clamp(min=0)
        tiles += torch.where(end > start, (-(-last // _TILE) - first).clamp(min=0), 0).sum()
    return data.pairs / max(1, int(tiles) * _TILE**2)


def goal(data: Data, line: dict[str, Any], best: float, limits: Ceilings, done: list[dict[str, Any]]) -> float | None:
    """TFLOP/s that ``line`` should reach, None where nothing is asked. ``best`` is the rate of its best peer, 0 without one, ``done`` the
    lines of earlier rows."""
    row, pass_ = data.row, line["pass"]
    at = 1 if pass_ == "backward" else 0
    flops = data.flops(bool(at))
    if row.least is not None:
        return row.least[at]
    if row.most_ms is not None:
        return flops / row.most_ms[at] * 1e-9
    if row.like is not None:
        other, share = row.like
        same = [d for d in done if (d["row"], d["pass"], d["op"]) == (other, pass_, line["op"])]
        rates = [d["tflops"] for d in same if d["impl"] not in PEERS]
        return share * max(rates) if rates else None
    if not best:
        return None
    of_gemm, of_bytes, of_floor = _SHARES[pass_]
    by_bytes = flops / data.least_bytes(line["op"] == "jagged_attention", bool(at)) * limits.copy
    wanted = min(_BETTER * best, of_gemm * limits.gemm * fill(data), of_bytes * by_bytes)
    return max(wanted, of_floor * min(limits.gemm, by_bytes)) if row.floors else wanted

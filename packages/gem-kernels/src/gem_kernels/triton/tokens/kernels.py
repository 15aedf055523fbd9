"""Triton kernels of `gem_core.ops.expert_tokens`: a program holds one sample, whose tokens are read once a pass, 64 columns at a time.

x  n x d        z = Y^T x       p x 64       made = L x    (n - f) x 64
| 64 | 64 |     products += x z^T  n x p     total = x + (bias ; made)
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tokens_fwd_kernel(
    x, weight, bias, total, products, samples,
    N: tl.constexpr, D: tl.constexpr, E: tl.constexpr, R: tl.constexpr, F: tl.constexpr,
    N_PAD: tl.constexpr, P_PAD: tl.constexpr, F_PAD: tl.constexpr, REST_PAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    sample = tl.program_id(0).to(tl.int64)
    row, column = tl.arange(0, N_PAD), tl.arange(0, P_PAD)
    first, rest = tl.arange(0, F_PAD), tl.arange(0, REST_PAD)
    own = sample * N * D
    project = tl.load(weight + column[:, None] * N + row[None, :], (column[:, None] < E * R) & (row[None, :] < N), 0.0)
    compress = tl.load(weight + (E * R + rest[:, None]) * N + row[None, :], (rest[:, None] < N - F) & (row[None, :] < N), 0.0)
    made = tl.zeros([N_PAD, P_PAD], tl.float32)
    for start in range(0, D, BLOCK):
        at = start + tl.arange(0, BLOCK)
        here = at[None, :] < D
        tokens = tl.load(x + own + row[:, None] * D + at[None, :], (row[:, None] < N) & here, 0.0)
        z = tl.dot(project, tokens, input_precision="ieee").to(tokens.dtype)
        made += tl.dot(tokens, tl.trans(z), input_precision="ieee")
        added = tl.dot(compress, tokens, input_precision="ieee").to(tokens.dtype)
        last = own + (F + rest[:, None]) * D + at[None, :]
        mask = (rest[:, None] < N - F) & here
        below = tl.load(x + last, mask, 0.0).to(tl.float32) + added.to(tl.float32)
        tl.store(total + last, below.to(total.dtype.element_ty), mask)
        top = first[:, None] * D + at[None, :]
        mask = (first[:, None] < F) & here
        above = tl.load(x + own + top, mask, 0.0).to(tl.float32) + tl.load(bias + top, mask, 0.0).to(tl.float32)
        tl.store(total + own + top, above.to(total.dtype.element_ty), mask)
    place = ((column // R)[None, :] * samples + sample) * (N * R) + row[:, None] * R + (column % R)[None, :]
    tl.store(products + place, made.to(products.dtype.element_ty), (row[:, None] < N) & (column[None, :] < E * R))


@triton.jit
def _gradient(base, k: tl.constexpr, own, row, column, N: tl.constexpr, R: tl.constexpr):
    """Of one expert's products where its columns are, zero elsewhere."""
    mask = (row[:, None] < N) & ((column // R)[None, :] == k)
    return tl.load(base + own + row[:, None] * R + (column % R)[None, :], mask, 0.0)


@triton.jit
def tokens_bwd_kernel(
    x, weight, dtotal, dp0, dp1, dp2, dp3, dx, partial, samples,
    N: tl.constexpr, D: tl.constexpr, E: tl.constexpr, R: tl.constexpr, F: tl.constexpr,
    N_PAD: tl.constexpr, P_PAD: tl.constexpr, REST_PAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``partial [programs, E R + N - F, N]`` fp32: each program's sum of the weight's gradient."""
    row, column, rest = tl.arange(0, N_PAD), tl.arange(0, P_PAD), tl.arange(0, REST_PAD)
    project_mask = (column[:, None] < E * R) & (row[None, :] < N)
    compress_mask = (rest[:, None] < N - F) & (row[None, :] < N)
    project_at = column[:, None] * N + row[None, :]
    compress_at = (E * R + rest[:, None]) * N + row[None, :]
    project = tl.load(weight + project_at, project_mask, 0.0)
    compress = tl.load(weight + compress_at, compress_mask, 0.0)
    dproject, dcompress = tl.zeros([P_PAD, N_PAD], tl.float32), tl.zeros([REST_PAD, N_PAD], tl.float32)
    program = tl.program_id(0).to(tl.int64)
    for sample in range(program, samples, tl.num_programs(0)):
        own, mine = sample * N * D, sample * N * R
        dp = _gradient(dp0, 0, mine, row, column, N, R)
        if E > 1:
            dp += _gradient(dp1, 1, mine, row, column, N, R)
        if E > 2:
            dp += _gradient(dp2, 2, mine, row, column, N, R)
        if E > 3:
            dp += _gradient(dp3, 3, mine, row, column, N, R)
        for start in range(0, D, BLOCK):
            at = start + tl.arange(0, BLOCK)
            here = at[None, :] < D
            whole, mask = own + row[:, None] * D + at[None, :], (row[:, None] < N) & here
            tokens = tl.load(x + whole, mask, 0.0)
            above = tl.load(dtotal + whole, mask, 0.0)
            below = tl.load(dtotal + own + (F + rest[:, None]) * D + at[None, :], (rest[:, None] < N - F) & here, 0.0)
            z = tl.dot(project, tokens, input_precision="ieee").to(tokens.dtype)
            dz = tl.dot(tl.trans(dp), tokens, input_precision="ieee").to(tokens.dtype)
            found = above.to(tl.float32) + tl.dot(dp, z, input_precision="ieee")
            found += tl.dot(tl.trans(project), dz, input_precision="ieee")
            found += tl.dot(tl.trans(compress), below, input_precision="ieee")
            tl.store(dx + whole, found.to(dx.dtype.element_ty), mask)
            turned = tl.trans(tokens)
            dproject += tl.dot(dz, turned, input_precision="ieee")
            dcompress += tl.dot(below, turned, input_precision="ieee")
    partial += program * (E * R + N - F) * N
    tl.store(partial + project_at, dproject, project_mask)
    tl.store(partial + compress_at, dcompress, compress_mask)

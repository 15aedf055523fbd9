"""Triton kernels of `norm_gdpa` around the products: l = LN(q), o = gdpa(l, k, v) + l, out = RMSNorm(o) + q, norms over all heads of a row.

Both norms run over H·D, a product over one head only, and a program that owned whole rows would hold so much that its loads and its
products had to take turns. So the norms are passes over rows, at the copy rate, around `gdpa` itself; what is beside a norm is in its pass.
With n = H·D, r₂ = out_rstd, g = dout and ô = out − q, the normalised o:

    rows     l, mean, rstd                                                      reads q                writes l
    gdpa     a = gdpa(l, k, v)
    rows     o = a + l, out = o · r₂ + q                                        reads a, q             writes out, in place of a
    rows     do = r₂ (g − ô Σ(g ô) / n)  (RMSNorm), l again                     reads q, out, g        writes do, l
    gdpa     da, dk, dv from do
    rows     dl = da + do, dq = r (dl − Σdl / n − l Σ(dl l) / n) + g            reads da, do, q, g     writes dq, in place of da
             (LayerNorm, residual)

Where the result goes on into `norm_linear`, whose backward pass writes g from the gradient h of its x̂ = out · r₁ and the gradient e that
comes beside it (skip connection), the pass of do is done there:

    rows     g = r₁ (h − x̂ Σ(h x̂) / n) + e, x̂, do, l                            reads h, out, e, q     writes g, x̂, do, l

Where q is what `norm_linear` handed on, the pass of dq is done in its backward pass, from the gradient h of its x̂ = q · r₁:

    rows     dq as above, g₁ = r₁ (h − x̂ Σ(h x̂) / n) + dq, x̂                    reads da, q, g, h      writes g₁, x̂

Rows past the last offset get zeros. The passes go from the last row to the first: products go the other way, so that what one leaves in the
L2 cache is what the next begins with.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _first_row(ROWS: tl.constexpr):
    return (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64) * ROWS


@triton.jit
def _load(pointer, stride_row: tl.constexpr, stride_head: tl.constexpr, row, end, H: tl.constexpr, D: tl.constexpr,
          ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """[ROWS, COLUMNS] fp32: all heads of the rows from ``row`` on, zeros from row ``end`` and column H · D on."""
    i = row + tl.arange(0, ROWS)
    c = tl.arange(0, COLUMNS)
    at = c if stride_head == D else c // D * stride_head + c % D
    mask = (i < end)[:, None] & (c < H * D)[None, :]
    return tl.load(pointer + i[:, None] * stride_row + at[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store(pointer, tile, row, rows, H: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The converse for a contiguous [rows, H, D]."""
    i = row + tl.arange(0, ROWS)
    c = tl.arange(0, COLUMNS)
    mask = (i < rows)[:, None] & (c < H * D)[None, :]
    tl.store(pointer + i[:, None] * (H * D) + c[None, :], tile.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def _normed(x, mu, r, H: tl.constexpr, D: tl.constexpr, COLUMNS: tl.constexpr):
    """(x − μ) r, zeros from column H · D on."""
    l = (x - mu[:, None]) * r[:, None]
    if H * D != COLUMNS:
        l = tl.where((tl.arange(0, COLUMNS) < H * D)[None, :], l, 0.0)
    return l


@triton.jit(do_not_specialize=["batch", "rows"])
def norm_gdpa_l_kernel(
    q, l, mean, rstd, q_offsets, batch, rows, eps, stride_qn: tl.constexpr, stride_qh: tl.constexpr,
    H: tl.constexpr, D: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """l, mean and rstd of ROWS rows."""
    row = _first_row(ROWS)
    i = row + tl.arange(0, ROWS)
    end = tl.load(q_offsets + batch).to(tl.int64)
    x = _load(q, stride_qn, stride_qh, row, end, H, D, ROWS, COLUMNS)
    mu = tl.sum(x, 1) / (H * D)
    away = _normed(x, mu, tl.full([ROWS], 1.0, tl.float32), H, D, COLUMNS)
    r = tl.where(i < end, tl.rsqrt(tl.sum(away * away, 1) / (H * D) + eps), 0.0)
    tl.store(mean + i, mu, mask=i < rows)
    tl.store(rstd + i, r, mask=i < rows)
    _store(l, away * r[:, None], row, rows, H, D, ROWS, COLUMNS)


@triton.jit
def moments(sums, i, mask, rows, C: tl.constexpr, PARTS: tl.constexpr):
    """Mean and variance of rows ``i`` of C columns, from what was left with them (`gem_core.ops.row_sums`)."""
    whole = tl.zeros_like(i).to(tl.float32)
    for part in tl.static_range(PARTS):
        whole += tl.load(sums + part * rows.to(tl.int64) + i, mask, 0.0)
    mu = whole / C
    squares = tl.zeros_like(mu)
    for part in tl.static_range(PARTS):
        away = tl.load(sums + part * rows.to(tl.int64) + i, mask, 0.0) * (PARTS / C) - mu
        squares += tl.load(sums + (PARTS + part) * rows.to(tl.int64) + i, mask, 0.0) + away * away * (C // PARTS)
    return mu, squares / C


@triton.jit(do_not_specialize=["batch", "rows", "keys", "key_programs"])
def norm_gdpa_stats_kernel(
    q, sums, k, mean, rstd, key_sums, q_offsets, batch, rows, keys, key_programs, eps,
    stride_qn: tl.constexpr, stride_qh: tl.constexpr, stride_kn: tl.constexpr, stride_kh: tl.constexpr,
    H: tl.constexpr, D: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr, MANY: tl.constexpr,
):  # fmt: skip
    """mean and rstd of ROWS rows of q, or of MANY from the sums over them, in PARTS parts; or in the first programs the sums of ROWS rows
    of k, head by head, [H, keys]."""
    if tl.program_id(0) < key_programs:
        row = tl.program_id(0).to(tl.int64) * ROWS
        i = row + tl.arange(0, ROWS)
        x = _load(k, stride_kn, stride_kh, row, keys, H, D, ROWS, COLUMNS)
        s = tl.sum(tl.reshape(x, [ROWS, COLUMNS // D, D]), 2)
        h = tl.arange(0, COLUMNS // D)
        tl.store(key_sums + h[None, :].to(tl.int64) * keys + i[:, None], s, mask=(i < keys)[:, None] & (h < H)[None, :])
    elif sums is not None:
        # names of their own, since Triton takes those of all branches for one value
        many = (tl.program_id(0) - key_programs).to(tl.int64) * MANY + tl.arange(0, MANY)
        there = many < tl.load(q_offsets + batch).to(tl.int64)
        mean_of, variance = moments(sums, many, there, rows, H * D, PARTS)
        tl.store(mean + many, mean_of, mask=many < rows)
        tl.store(rstd + many, tl.where(there, tl.rsqrt(variance + eps), 0.0), mask=many < rows)
    else:
        row = _first_row(ROWS)
        i = row + tl.arange(0, ROWS)
        end = tl.load(q_offsets + batch).to(tl.int64)
        x = _load(q, stride_qn, stride_qh, row, end, H, D, ROWS, COLUMNS)
        mu = tl.sum(x, 1) / (H * D)
        away = _normed(x, mu, tl.full([ROWS], 1.0, tl.float32), H, D, COLUMNS)
        r = tl.where(i < end, tl.rsqrt(tl.sum(away * away, 1) / (H * D) + eps), 0.0)
        tl.store(mean + i, mu, mask=i < rows)
        tl.store(rstd + i, r, mask=i < rows)


@triton.jit(do_not_specialize=["batch", "rows"])
def norm_gdpa_out_kernel(
    q, out, mean, rstd, out_rstd, q_offsets, batch, rows, eps, stride_qn: tl.constexpr, stride_qh: tl.constexpr,
    H: tl.constexpr, D: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """out of ROWS rows from gdpa's result, which ``out`` holds."""
    row = _first_row(ROWS)
    i = row + tl.arange(0, ROWS)
    end = tl.load(q_offsets + batch).to(tl.int64)
    x = _load(q, stride_qn, stride_qh, row, end, H, D, ROWS, COLUMNS)
    l = _normed(x, tl.load(mean + i, mask=i < rows, other=0.0), tl.load(rstd + i, mask=i < rows, other=0.0), H, D, COLUMNS)
    o = _load(out, H * D, D, row, end, H, D, ROWS, COLUMNS) + l
    r2 = tl.where(i < end, tl.rsqrt(tl.sum(o * o, 1) / (H * D) + eps), 0.0)
    tl.store(out_rstd + i, r2, mask=i < rows)
    _store(out, o * r2[:, None] + x, row, rows, H, D, ROWS, COLUMNS)


@triton.jit(do_not_specialize=["batch", "rows"])
def norm_gdpa_bwd_do_kernel(
    q, out, dout, mean, rstd, out_rstd, do, l, q_offsets, batch, rows,
    stride_qn: tl.constexpr, stride_qh: tl.constexpr, stride_gn: tl.constexpr, stride_gh: tl.constexpr,
    H: tl.constexpr, D: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The gradient of o, and l, of ROWS rows."""
    row = _first_row(ROWS)
    i = row + tl.arange(0, ROWS)
    end = tl.load(q_offsets + batch).to(tl.int64)
    x = _load(q, stride_qn, stride_qh, row, end, H, D, ROWS, COLUMNS)
    o = _load(out, H * D, D, row, end, H, D, ROWS, COLUMNS)
    g = _load(dout, stride_gn, stride_gh, row, end, H, D, ROWS, COLUMNS)
    normed = _normed(x, tl.load(mean + i, mask=i < rows, other=0.0), tl.load(rstd + i, mask=i < rows, other=0.0), H, D, COLUMNS)
    _store(l, normed, row, rows, H, D, ROWS, COLUMNS)
    hat = o - x
    r2 = tl.load(out_rstd + i, mask=i < rows, other=0.0)
    shared = tl.sum(g * hat, 1) / (H * D)
    _store(do, (g - hat * shared[:, None]) * r2[:, None], row, rows, H, D, ROWS, COLUMNS)


@triton.jit(do_not_specialize=["batch", "rows"])
def norm_gdpa_bwd_met_kernel(
    out, h, e, out_scale, q, mean, rstd, out_rstd, g, hat, do, l, q_offsets, batch, rows,
    stride_qn: tl.constexpr, stride_qh: tl.constexpr, stride_on: tl.constexpr, stride_hn: tl.constexpr, stride_en: tl.constexpr,
    H: tl.constexpr, D: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Of ROWS rows: g and x̂ of the RMSNorm with ``out_scale`` that reads ``out``, the gradient of o, and l."""
    row = _first_row(ROWS)
    i = row + tl.arange(0, ROWS)
    end = tl.load(q_offsets + batch).to(tl.int64)
    o = _load(out, stride_on, D, row, rows, H, D, ROWS, COLUMNS)
    dhat = _load(h, stride_hn, D, row, rows, H, D, ROWS, COLUMNS)
    beside = _load(e, stride_en, D, row, rows, H, D, ROWS, COLUMNS)
    x = _load(q, stride_qn, stride_qh, row, end, H, D, ROWS, COLUMNS)
    r1 = tl.load(out_scale + i, mask=i < rows, other=0.0)[:, None]
    normed = o * r1
    _store(hat, normed, row, rows, H, D, ROWS, COLUMNS)
    found = ((dhat - normed * (tl.sum(dhat * normed, 1) / (H * D))[:, None]) * r1 + beside).to(g.dtype.element_ty)
    _store(g, found, row, rows, H, D, ROWS, COLUMNS)
    l_rows = _normed(x, tl.load(mean + i, mask=i < rows, other=0.0), tl.load(rstd + i, mask=i < rows, other=0.0), H, D, COLUMNS)
    _store(l, l_rows, row, rows, H, D, ROWS, COLUMNS)
    there = (i < end)[:, None]
    away = tl.where(there, o - x, 0.0)
    given = tl.where(there, found.to(tl.float32), 0.0)
    r2 = tl.load(out_rstd + i, mask=i < rows, other=0.0)
    shared = tl.sum(given * away, 1) / (H * D)
    _store(do, (given - away * shared[:, None]) * r2[:, None], row, rows, H, D, ROWS, COLUMNS)


@triton.jit(do_not_specialize=["batch", "rows"])
def norm_gdpa_bwd_dq_kernel(
    q, do, dout, mean, rstd, dq, q_offsets, batch, rows,
    stride_qn: tl.constexpr, stride_qh: tl.constexpr, stride_gn: tl.constexpr, stride_gh: tl.constexpr,
    H: tl.constexpr, D: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """dq of ROWS rows from gdpa's gradient, which ``dq`` holds, and ``do``; without ``do`` their sum is in ``dq``."""
    row = _first_row(ROWS)
    i = row + tl.arange(0, ROWS)
    end = tl.load(q_offsets + batch).to(tl.int64)
    r = tl.load(rstd + i, mask=i < rows, other=0.0)
    x = _load(q, stride_qn, stride_qh, row, end, H, D, ROWS, COLUMNS)
    l = _normed(x, tl.load(mean + i, mask=i < rows, other=0.0), r, H, D, COLUMNS)
    dl = _load(dq, H * D, D, row, end, H, D, ROWS, COLUMNS)
    if do is not None:
        dl += _load(do, H * D, D, row, end, H, D, ROWS, COLUMNS)
    d = dl - (tl.sum(dl, 1) / (H * D))[:, None] - l * (tl.sum(dl * l, 1) / (H * D))[:, None]
    g = _load(dout, stride_gn, stride_gh, row, end, H, D, ROWS, COLUMNS)
    _store(dq, d * r[:, None] + g, row, rows, H, D, ROWS, COLUMNS)


@triton.jit(do_not_specialize=["batch", "rows"])
def norm_gdpa_bwd_late_kernel(
    q, dl, do, dout, mean, rstd, h, scale, g, hat, q_offsets, batch, rows,
    stride_qn: tl.constexpr, stride_qh: tl.constexpr, stride_gn: tl.constexpr, stride_gh: tl.constexpr, stride_hn: tl.constexpr,
    H: tl.constexpr, D: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Of ROWS rows: the gradient of q by the RMSNorm with ``scale`` that reads it and by `norm_gdpa`; and where it is wanted, x̂ of it."""
    row = _first_row(ROWS)
    i = row + tl.arange(0, ROWS)
    end = tl.load(q_offsets + batch).to(tl.int64)
    x = _load(q, stride_qn, stride_qh, row, rows, H, D, ROWS, COLUMNS)
    of_l = _load(dl, H * D, D, row, end, H, D, ROWS, COLUMNS)
    if do is not None:
        of_l += _load(do, H * D, D, row, end, H, D, ROWS, COLUMNS)
    beside = _load(dout, stride_gn, stride_gh, row, end, H, D, ROWS, COLUMNS)
    dhat = _load(h, stride_hn, D, row, rows, H, D, ROWS, COLUMNS)
    r1 = tl.load(scale + i, mask=i < rows, other=0.0)[:, None]
    normed = x * r1
    if hat is not None:
        _store(hat, normed, row, rows, H, D, ROWS, COLUMNS)
    found = (dhat - normed * (tl.sum(dhat * normed, 1) / (H * D))[:, None]) * r1
    # 0 past the last offset, where l is not what the norm would give
    r = tl.load(rstd + i, mask=i < end, other=0.0)
    l = _normed(x, tl.load(mean + i, mask=i < rows, other=0.0), r, H, D, COLUMNS)
    d = of_l - (tl.sum(of_l, 1) / (H * D))[:, None] - l * (tl.sum(of_l * l, 1) / (H * D))[:, None]
    _store(g, found + d * r[:, None] + beside, row, rows, H, D, ROWS, COLUMNS)

"""Quantising a matrix with the kernels: one direction, both in one read, or fused behind a norm or an activation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gem_core.errors import OpError
from gem_precision.formats import FP8, MX, draw_seed, element
from gem_precision.kernels import interpreting, launch, lays_out_by_hand
from gem_precision.policy import Operand

NARROWEST = 16
"""Columns that the kernels in Gluon want at least."""

RULES = {"rceil": 0, "floor": 1, "ceil": 2, "even": 3}
ACTIVATIONS = {"none": 0, "relu": 1, "gelu": 2, "silu": 3, "relu_square": 4}
COSTLY = (2, 3)
"""Activations that want registers."""

TILES: dict[str, dict[str, Any]] = {
    "mx": {"BLOCK_R": 32, "BLOCK_C": 128, "num_warps": 4},
    "mx_both": {"BLOCK_R": 64, "BLOCK_C": 64, "num_warps": 4},
    "fp8": {"BLOCK_R": 32, "BLOCK_C": 128, "num_warps": 4},
    "fp8_both": {"BLOCK_R": 128, "BLOCK_C": 128, "num_warps": 8},
    "norm_mx": {"BLOCK_R": 32, "BLOCK_C": 128, "num_warps": 4},
    "norm_fp8": {"BLOCK_R": 128, "BLOCK_C": 128, "num_warps": 8},
    "gluon_rows": {"ROWS": 32, "WIDTH": 256, "num_warps": 8},
    "gluon_both": {"PARTS": 2, "num_warps": 8, "maxnreg": 64},
    "gluon_act": {"PARTS": 2, "num_warps": 8, "maxnreg": 80},
    "gluon_norm": {"PARTS": 1, "num_warps": 8, "maxnreg": 128},
    "gluon_both_mx": {"PARTS": 1, "num_warps": 8, "maxnreg": 80},
}
"""Tile of each use; the benchmark of this package times others."""


@dataclass(frozen=True)
class Directions:
    """What a kernel wrote: ``rows`` is the operand ``[R, K = C]``, ``columns`` the operand ``[C, K = R]`` (of x transposed), ``y`` the
    unquantised result where it was asked for, ``stats [2, R]`` mean and 1/deviation of a norm, ``sums [C]`` fp32 those of x's columns."""

    rows: MX | FP8 | None
    columns: MX | FP8 | None
    y: Tensor | None = None
    stats: Tensor | None = None
    sums: Tensor | None = None


def takes(operand: Operand) -> bool:
    """Whether the kernels quantise this operand (all but whole rows or columns of FP8, which need two passes)."""
    return 0 not in operand.block


def quantize_matrix(
    x: Tensor,
    rows: Operand | None = None,
    columns: Operand | None = None,
    *,
    act: str = "none",
    dtype: torch.dtype | None = None,
    write_y: bool = False,
    generator: torch.Generator | None = None,
    swizzle: bool = False,
    pad: int = 1,
    sums: bool = False,
    tile: dict[str, Any] | None = None,
) -> Directions:
    """Quantise ``x [R, C]`` along its columns (operand ``rows``: K = C), along its rows (``columns``: K = R, transposed), or both, in one
    read; ``act`` is applied first and its result rounded to ``dtype`` (None: x's).

    Both directions must agree in format, element, rule and blocks; in FP8, rows in strips go with columns in squares too. Bit-equal to the
    codec on ``act(x)``; with stochastic rounding the rows' seed is drawn from ``generator`` first. ``swizzle``: scales in 128x4 tiles, flat
    uint8. ``pad``: K of the columns' operand is filled up with zeros to a multiple of this (at most 32), as matrix instructions want it.
    ``sums``: also the sums of x's columns, in the same read where a kernel for it serves both directions (no ``act`` then).
    :raises OpError: operands that do not fit each other, or an x that is not a CUDA matrix of unit column stride.
    """
    x = _checked(x, rows, columns)
    by_hand = _by_hand(x, dtype or x.dtype, rows, columns) and "BLOCK_R" not in (tile or {})
    what, meta = _plan(x, rows, columns, generator, swizzle, pad, by_hand)
    if act not in ACTIVATIONS:
        raise OpError(f"no activation called {act!r} is fused with quantising", where="act", fix=f"choose one of {', '.join(ACTIVATIONS)}")
    r, c = x.shape
    if _mixed(rows, columns) and not _by_hand(x, dtype or x.dtype, rows, columns):
        options: dict[str, Any] = {"act": act, "dtype": dtype, "generator": generator, "pad": pad}
        first = quantize_matrix(x, rows, write_y=write_y, sums=sums, **options)
        return replace(first, columns=quantize_matrix(x, None, columns, **options).columns)
    y = x.new_empty((r, c) if write_y else (1, 1), dtype=dtype or x.dtype)
    if by_hand:
        parts = x.new_empty((-(-r // 128), c), dtype=torch.float32) if sums and columns is not None and act == "none" else None
        _launch_by_hand(x, y, what, meta, tile, sums=parts, ACT=ACTIVATIONS[act], WRITE_Y=write_y)
        found = what.result(y if write_y else None)
        return replace(found, sums=column_sums(x) if parts is None else parts.sum(0)) if sums else found
    tile = tile or TILES[_use(rows, columns)]
    programs = -(-r // tile["BLOCK_R"]) * -(-c // tile["BLOCK_C"])
    from gem_precision.kernels.quantize_kernels import quantize_kernel

    launch(
        quantize_kernel, programs, x.device, x, y, *what.pointers(x), r, c, x.stride(0), what.col_stride,
        ACT=ACTIVATIONS[act], WRITE_Y=write_y, **meta, **tile,
    )  # fmt: skip
    return replace(what.result(y if write_y else None), sums=column_sums(x) if sums else None)


def column_sums(x: Tensor) -> Tensor:
    """``x.sum(0)`` in fp32; on a device and in 16 bits a product with ones, which reads rows twice as fast as a reduction does."""
    if x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) and x.numel():
        return torch.mm(x.new_ones((x.shape[0], 8)).t(), x, out_dtype=torch.float32)[0]
    return x.sum(0, dtype=torch.float32)


def _use(rows: Operand | None, columns: Operand | None) -> str:
    one = rows or columns
    assert one is not None
    return one.format if columns is None and one.block[0] == 1 else f"{one.format}_both"


def serves_mixed(rows: Operand, columns: Operand) -> bool:
    """Whether one read serves rows in strips and columns in squares: FP8 of the same element, rounded to nearest."""
    strips = replace(columns, block=rows.block)
    return rows == strips and (rows.format, rows.block, columns.block, rows.rounding) == ("fp8", (1, 128), (128, 128), "nearest")


def _mixed(rows: Operand | None, columns: Operand | None) -> bool:
    """Whether the rows are quantised in strips and the columns in squares."""
    return rows is not None and columns is not None and rows.block != columns.block


def _by_hand(x: Tensor, dtype: torch.dtype, rows: Operand | None, columns: Operand | None) -> bool:
    """Whether a Gluon kernel serves the rows, with or without the columns: strips of FP8 codes, rounded to nearest, of 16-bit numbers."""
    if rows is None or rows.block[0] != 1 or "stochastic" in (rows.rounding, (columns or rows).rounding):
        return False
    wide = x.element_size() != 2 or dtype.itemsize != 2 or x.stride(0) >= 2**24
    # one column is a constant to the compiler, which then fails in these layouts
    return not wide and x.shape[1] >= NARROWEST and rows.elem in ("e4m3", "e5m2") and lays_out_by_hand(x.device)


def _launch_by_hand(
    x: Tensor, y: Tensor, what: _Outputs, meta: dict[str, Any], tile: dict[str, Any] | None, stats: Tensor | None = None,
    weight: Tensor | None = None, bias: Tensor | None = None, sums: Tensor | None = None, **flags: Any,
) -> None:  # fmt: skip
    from gem_precision.kernels.quantize_hopper import quantize_both_kernel, quantize_rows_kernel

    r, c = x.shape
    row_data, row_scales, col_data, col_scales, _ = what.pointers(x)
    kept = {name: meta[name] for name in ("SWIZZLE", "FP8", "RULE", "MBITS", "EMAX", "LARGEST", "TOP_MANTISSA", "B")}
    kept |= {"ACT": 0, "E5M2": meta["CAST"] == 2} | flags
    strips_r, strips_c = -(-r // kept["B"]), -(-c // kept["B"])
    if not meta["COLS"]:
        tile = tile or TILES["gluon_rows"]
        programs = -(-r // tile["ROWS"]) * -(-c // tile["WIDTH"])
        launch(
            quantize_rows_kernel, programs, x.device, x, y, row_data, row_scales, r, c, x.stride(0), strips_c, WARPS=tile["num_warps"],
            **kept, **tile,
        )  # fmt: skip
        return
    # registers that let two (norm), three or four programs share a multiprocessor
    use = "norm" if stats is not None else "act" if kept["ACT"] in COSTLY else "both" if kept["FP8"] else "both_mx"
    tile = tile or TILES[f"gluon_{use}"]
    launch(
        quantize_both_kernel, -(-r // 128) * -(-c // 128), x.device, x, x if weight is None else weight, x if bias is None else bias, y,
        x if stats is None else stats, x if sums is None else sums, row_data, row_scales, col_data, col_scales, r, c, x.stride(0),
        what.col_stride, strips_r, strips_c, NORM=stats is not None, WEIGHT=weight is not None, BIAS=bias is not None,
        SQUARE=what.columns_square, SUMS=sums is not None, WARPS=tile["num_warps"], **kept, **tile,
    )  # fmt: skip


def norm_quantize(
    x: Tensor,
    rows: Operand | None = None,
    columns: Operand | None = None,
    *,
    kind: str = "rms",
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    dtype: torch.dtype | None = None,
    write_y: bool = True,
    generator: torch.Generator | None = None,
    swizzle: bool = False,
    pad: int = 1,
) -> Directions:
    """RMS or layer norm of ``x [R, C]`` over C, quantised in the same pass; as `quantize_matrix` otherwise. Without operands it is the norm
    alone, by the same arithmetic, so fused and unfused agree to the bit. The norm's result is rounded to ``dtype`` (None: x's) first.
    """
    if kind not in ("rms", "layer"):
        raise OpError(f"there is no norm called {kind!r}", where="kind", fix="choose rms or layer")
    by_hand = False
    if rows is None and columns is None:
        what, meta = _Outputs(None, None, x, False, x, 1), _meta(Operand())
        meta |= {"ROWS": False, "COLS": False, "SQUARE": False, "STOCHASTIC_ROWS": False, "STOCHASTIC_COLS": False, "SWIZZLE": False}
        write_y = True
    else:
        x = _checked(x, rows, columns)
        if _mixed(rows, columns) and not _by_hand(x, dtype or x.dtype, rows, columns):
            options: dict[str, Any] = {"kind": kind, "weight": weight, "bias": bias, "eps": eps, "dtype": dtype, "generator": generator}
            first = norm_quantize(x, rows, write_y=write_y, pad=pad, **options)
            return replace(first, columns=norm_quantize(x, None, columns, write_y=False, pad=pad, **options).columns)
        by_hand = columns is not None and _by_hand(x, dtype or x.dtype, rows, columns)
        what, meta = _plan(x, rows, columns, generator, swizzle, pad, by_hand)
    one = rows or columns
    r, c = x.shape
    y = x.new_empty((r, c) if write_y else (1, 1), dtype=dtype or x.dtype)
    stats = x.new_empty((2, r), dtype=torch.float32)
    from gem_precision.kernels.quantize_kernels import norm_quantize_kernel, norm_stats_kernel

    block = min(1 << (c - 1).bit_length(), 1024)
    launch(
        norm_stats_kernel, -(-r // (4096 // block)), x.device, x, stats, r, c, x.stride(0), eps, LAYER=kind == "layer",
        BLOCK_R=4096 // block, BLOCK_C=block, num_warps=4,
    )  # fmt: skip
    if by_hand:
        _launch_by_hand(x, y, what, meta, None, stats, weight, bias, WRITE_Y=write_y)
        return what.result(y if write_y else None, stats)
    tile = TILES["norm_mx" if one is None or one.format == "mx" else "norm_fp8"]
    launch(
        norm_quantize_kernel, -(-r // tile["BLOCK_R"]), x.device, x, x if weight is None else weight, x if bias is None else bias,
        y, stats, *what.pointers(x), r, c, x.stride(0), what.col_stride, WEIGHT=weight is not None, BIAS=bias is not None,
        WRITE_Y=write_y, QUANTIZE=one is not None, **meta, **tile,
    )  # fmt: skip
    return what.result(y if write_y else None, stats)


def norm_backward(x: Tensor, g: Tensor, stats: Tensor, kind: str, plus: Tensor | None = None) -> Tensor:
    """Gradient ``[R, C]`` of the affine-free norm of ``x``, in x's dtype, from the ``stats`` of `norm_quantize`; ``plus [R, C]`` is added
    to it before it is rounded."""
    from gem_precision.kernels.quantize_kernels import norm_backward_kernel

    x, g = x.contiguous(), g.contiguous()
    dx = torch.empty_like(x)
    block = min(1 << (x.shape[1] - 1).bit_length(), 2048)
    launch(
        norm_backward_kernel, x.shape[0], x.device, x, g, x if plus is None else plus.contiguous(), stats, dx, *x.shape,
        LAYER=kind == "layer", PLUS=plus is not None, ONE=x.shape[1] <= block, BLOCK_C=block, num_warps=max(1, min(8, block // 256)),
    )  # fmt: skip
    return dx


def _checked(x: Tensor, rows: Operand | None, columns: Operand | None) -> Tensor:
    if rows is None and columns is None:
        raise OpError("nothing to do: neither rows nor columns are to be quantised", where="rows, columns")
    if x.dim() != 2:
        raise OpError(f"the kernels take a matrix, got {tuple(x.shape)}", where="x", fix="flatten the leading dims")
    if not (x.is_cuda or interpreting()):
        raise OpError(f"the kernels run on CUDA tensors, x is on {x.device}", where="x", fix="use gem_precision.quantize_mx")
    for operand in (rows, columns):
        if operand is not None and not takes(operand):
            raise OpError(f"{operand} needs two passes", where="operand", fix="use gem_precision.formats.quantize_fp8")
    if rows is not None and columns is not None:
        same = [(o.format, o.elem, o.scale_rule, o.block) for o in (rows, columns)]
        if same[0] != same[1] and not serves_mixed(rows, columns):
            raise OpError(f"one read cannot serve {rows} and {columns}", where="rows, columns", fix="quantise twice")
        if rows.block[0] != 1 and rows.rounding != columns.rounding:
            raise OpError("a square is quantised once, so both directions round alike", where="rows, columns")
    return x if x.stride(1) == 1 else x.contiguous()


class _Outputs:
    """Tensors of one launch."""

    def __init__(
        self, rows: Operand | None, columns: Operand | None, x: Tensor, swizzle: bool, seeds: Tensor, pad: int, turned: bool = False
    ) -> None:
        """``turned``: scales of strips are stored strip after strip."""
        self.rows, self.columns, self.swizzle, self.seeds, self.turned = rows, columns, swizzle, seeds, turned
        self.shape = x.shape
        r, c = x.shape
        self.col_stride = -(-r // pad) * pad
        self.row_data = self.row_scales = self.col_data = self.col_scales = None
        one = rows or columns
        if one is None:
            return
        self.columns_square = _mixed(rows, columns)
        self.square = one.block[0] != 1
        if rows is not None:
            # spare rows for `gem_precision.gemm.with_spare_rows`
            self.row_data = x.new_empty((r + 3, c), dtype=torch.uint8)[:r]
        if columns is not None:
            self.col_data = x.new_empty((c, self.col_stride), dtype=torch.uint8)
            self.col_data[:, r:].zero_()
        if self.square:
            self.row_scales = self._scales(x, one, -(-r // one.block[0]), -(-c // one.block[0]), tiles=False)
        else:
            if rows is not None:
                self.row_scales = self._scales(x, rows, r, -(-c // rows.block[1]), tiles=swizzle)
            if columns is not None:
                lines = -(-c // columns.block[0])
                self.col_scales = self._scales(x, columns, lines, -(-r // columns.block[1]), tiles=swizzle)

    def _scales(self, x: Tensor, operand: Operand, rows: int, strips: int, *, tiles: bool) -> Tensor:
        if tiles:
            return x.new_zeros((-(-rows // 128)) * (-(-strips // 4)) * 512, dtype=torch.uint8)
        dtype = torch.float32 if operand.format == "fp8" else torch.uint8
        if self.turned and operand.block[0] == 1:
            return x.new_empty((strips, rows), dtype=dtype).t()
        return x.new_empty((rows, strips), dtype=dtype)

    def pointers(self, x: Tensor) -> list[Tensor]:
        found = (self.row_data, self.row_scales, self.col_data, self.col_scales, self.seeds)
        return [x if t is None else t for t in found]

    def result(self, y: Tensor | None, stats: Tensor | None = None) -> Directions:
        rows = columns = None
        if self.rows is not None:
            rows = self._quantised(self.rows, self.row_data, self.row_scales)
        if self.columns is not None:
            scales = self.row_scales.t() if self.square and self.row_scales is not None else self.col_scales
            columns = self._quantised(self.columns, self.col_data, scales)
        return Directions(rows, columns, y, stats)

    @staticmethod
    def _quantised(operand: Operand, data: Tensor | None, scales: Tensor | None) -> MX | FP8:
        assert data is not None
        assert scales is not None
        dtype = element(operand.elem).torch_dtype
        family = MX if operand.format == "mx" else FP8
        return family(data if dtype is None else data.view(dtype), scales, operand.elem, operand.block)


def _plan(
    x: Tensor, rows: Operand | None, columns: Operand | None, generator: torch.Generator | None, swizzle: bool, pad: int, turned: bool
) -> tuple[_Outputs, dict[str, Any]]:
    one = rows or columns
    assert one is not None
    square = one.block[0] != 1
    if swizzle and (square or one.format != "mx"):
        raise OpError("only scales of MX strips are stored in 128x4 tiles", where="swizzle", fix="use blocks of 1x32 or swizzle=False")
    stochastic_rows = rows is not None and rows.rounding == "stochastic"
    stochastic_cols = columns is not None and columns.rounding == "stochastic"
    if square:
        # one draw serves both payloads
        stochastic_rows, stochastic_cols = stochastic_rows or stochastic_cols, False
    seeds = x
    if stochastic_rows or stochastic_cols:
        none = torch.zeros(2, dtype=torch.int32, device=x.device)
        first = draw_seed(generator, x.device) if stochastic_rows else none
        seeds = torch.cat([first, draw_seed(generator, x.device) if stochastic_cols else none])
    meta = _meta(one) | {
        "ROWS": rows is not None, "COLS": columns is not None, "SQUARE": square, "STOCHASTIC_ROWS": stochastic_rows,
        "STOCHASTIC_COLS": stochastic_cols, "SWIZZLE": swizzle,
    }  # fmt: skip
    return _Outputs(rows, columns, x, swizzle, seeds, pad, turned), meta


def _meta(operand: Operand) -> dict[str, Any]:
    elem = element(operand.elem)
    # the interpreter's conversions are not the hardware's, so it takes the integer path
    cast = 0 if interpreting() else {"e4m3": 1, "e5m2": 2}.get(operand.elem, 0)
    return {
        "FP8": operand.format == "fp8", "RULE": RULES[operand.scale_rule], "MBITS": elem.mbits, "EMIN": elem.emin, "EMAX": elem.emax,
        "LARGEST": elem.largest, "TOP_MANTISSA": round((elem.largest / 2.0**elem.emax - 1) * 2**23), "SIGN": elem.sign_code,
        "NAN": elem.nan_code, "CAST": cast, "B": 32 if operand.format == "mx" else 128,
    }  # fmt: skip

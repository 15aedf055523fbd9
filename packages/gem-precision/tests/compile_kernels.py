"""Run as a script: compiles this package's kernels for an architecture without a GPU and prints what came of it as JSON."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability
from triton.compiler import ASTSource
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from gem_precision.kernels.block_gemm import COLUMNS, ROWS, STAGES, STAGES_OF_PARTS
from gem_precision.kernels.block_gemm_hopper import block_gemm_kernel
from gem_precision.kernels.quantize import TILES, _meta
from gem_precision.kernels.quantize_hopper import quantize_both_kernel, quantize_rows_kernel
from gem_precision.kernels.quantize_kernels import norm_quantize_kernel, quantize_kernel
from gem_precision.kernels.scaled_gemm import TILES as GEMM_TILES
from gem_precision.kernels.scaled_gemm_kernel import scaled_gemm_kernel
from gem_precision.policy import Operand


def built(
    kernel: Any,
    arch: int,
    types: dict[str, str],
    constexprs: dict[str, Any],
    num_warps: int,
    num_stages: int = 3,
    source: Any = ASTSource,
    maxnreg: int | None = None,
) -> dict[str, Any]:
    signature = types | dict.fromkeys(constexprs, "constexpr")
    signature = {name: signature[name] for name in kernel.arg_names}
    aligned = (i for i, t in enumerate(signature.values()) if t.startswith("*") or t == "i32")
    attributes = {(i,): [["tt.divisibility", 16]] for i in aligned}
    options = {"num_warps": num_warps, "num_stages": num_stages} | ({"maxnreg": maxnreg} if maxnreg else {})
    target = GPUTarget("cuda", arch, 32)
    ptx = triton.compile(source(kernel, signature, constexprs, attributes), target=target, options=options).asm["ptx"]
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder, "kernel.ptx")
        text.write_text(ptx)
        command = [get_ptxas(arch).path, "-v", f"--gpu-name={sm_arch_from_capability(arch)}", str(text), "-o", str(Path(folder, "cubin"))]
        log = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    return {
        "mma": sorted(set(re.findall(r"(?:wgmma\.mma\S*|tcgen05\.mma\S*|mma\.sync\S*)", ptx))),
        "converts": sorted(set(re.findall(r"cvt\.\S*e[45]m[23]x2\S*", ptx))),
        "spills": max((int(n) for n in re.findall(r"(\d+) bytes spill stores", log)), default=0),
        "serialised": sorted(set(re.findall(r"C75\d\d", log))),
        "wide_loads": len(re.findall(r"ld\.global\.v[24]", ptx)),
    }


QUANTIZE = {"x": "*bf16", "y_out": "*bf16", "row_data": "*u8", "row_scales": "*u8", "col_data": "*u8", "col_scales": "*u8", "seeds": "*i32"}
NORM = {"x": "*bf16", "weight": "*fp32", "bias": "*fp32", "y_out": "*bf16", "stats": "*fp32"} | {
    k: v for k, v in QUANTIZE.items() if k not in ("x", "y_out")
}
SIZES = {"R": "i32", "C": "i32", "stride": "i32", "col_stride": "i32"}


def flags(operand: Operand, rows: bool, cols: bool, stochastic: bool = False) -> dict[str, Any]:
    meta = _meta(operand)
    return meta | {
        "ROWS": rows, "COLS": cols, "SQUARE": operand.block[0] != 1, "STOCHASTIC_ROWS": stochastic, "STOCHASTIC_COLS": stochastic,
        "SWIZZLE": operand.format == "mx" and operand.block[0] == 1,
    }  # fmt: skip


def by_hand(operand: Operand, arch: int, types: dict[str, str], both: bool, act: int = 0, sums: bool = False) -> dict[str, Any]:
    """``act``: an activation in the place of FP8's norm; ``sums``: and without it."""
    meta = _meta(operand)
    mx = operand.format == "mx"
    norm = not (mx or act or sums)
    tile = TILES[
        "gluon_rows" if not both else "gluon_both_mx" if mx else "gluon_act" if act > 1 else "gluon_both" if act or sums else "gluon_norm"
    ]
    constexprs = {name: meta[name] for name in ("FP8", "RULE", "MBITS", "EMAX", "LARGEST", "TOP_MANTISSA", "B")} | {
        "ACT": act, "WRITE_Y": norm, "SWIZZLE": mx, "E5M2": False, "WARPS": tile["num_warps"],
    }  # fmt: skip
    constexprs |= {name: value for name, value in tile.items() if name.isupper()}
    registers = tile.get("maxnreg")
    if not both:
        kept = ("x", "y_out", "row_data", "row_scales", "R", "C", "stride")
        rows = {name: types[name] for name in kept} | {"strips_c": "i32"}
        return built(quantize_rows_kernel, arch, rows, constexprs, tile["num_warps"], source=GluonASTSource, maxnreg=registers)
    constexprs |= {"NORM": norm, "WEIGHT": norm, "BIAS": False, "SQUARE": not mx, "SUMS": sums}
    types = types | {"sums": "*fp32", "strips_r": "i32", "strips_c": "i32"}
    types = {name: types[name] for name in quantize_both_kernel.arg_names if name in types}
    return built(quantize_both_kernel, arch, types, constexprs, tile["num_warps"], source=GluonASTSource, maxnreg=registers)


def block_gemm(parts: bool) -> dict[str, Any]:
    codes = gl.NVMMASharedLayout.get_default_for([128, 128], gl.float8e4nv)
    left, right = (f"tensordesc<fp8e4nv[{rows}, 128],{codes!r}>" for rows in (ROWS, COLUMNS))
    narrow = gl.NVMMASharedLayout.get_default_for([64, COLUMNS], gl.bfloat16)
    types = {"a": left, "b": right, "a_scales": "*fp32", "b_scales": "*fp32"}
    types |= {"out": "*fp32"} if parts else {"out": f"tensordesc<bf16[64, {COLUMNS}],{narrow!r}>", "bias": "*bf16"}
    if not parts:
        types["plus"] = types["out"]
    types |= dict.fromkeys(("M", "N", "tasks", "tiles_m", "tiles_n", "blocks", "per_part"), "i32")
    constexprs = {"PARTS": parts, "STAGES": STAGES_OF_PARTS if parts else STAGES, "num_warps": 4} | (
        {"bias": None, "plus": None} if parts else {}
    )
    return built(block_gemm_kernel, 90, types, constexprs, 4, source=GluonASTSource, maxnreg=168)


def main(arch: int) -> None:
    scales = {"row_scales": "*fp32", "col_scales": "*fp32"}
    gemm = GEMM_TILES["block_scaled" if arch >= 100 else "decoded"]
    found = {
        "scaled_gemm": built(
            scaled_gemm_kernel,
            arch,
            {"a": "*fp8e4nv", "a_scales": "*u8", "b": "*fp8e4nv", "b_scales": "*u8", "out": "*bf16", "M": "i32", "N": "i32", "K": "i32"},
            {"A_FORMAT": "e4m3", "B_FORMAT": "e4m3"} | {k: v for k, v in gemm.items() if k.isupper()},
            gemm["num_warps"],
            gemm["num_stages"],
        )
    }
    if arch == 90:
        found["block_gemm"], found["block_parts_gemm"] = block_gemm(False), block_gemm(True)
    for name, operand, tile, rows, cols, stochastic in (
        ("mx_rows", Operand(), "mx", True, False, False),
        ("mx_both", Operand(), "mx_both", True, True, False),
        ("mx_both_stochastic", Operand(rounding="stochastic"), "mx_both", True, True, True),
        ("mx_squares", Operand(block=(32, 32)), "mx_both", True, True, False),
        ("fp8_rows", Operand("fp8", block=(1, 128)), "fp8", True, False, False),
        ("fp8_both", Operand("fp8", block=(1, 128)), "fp8_both", True, True, False),
        ("fp8_squares", Operand("fp8", block=(128, 128)), "fp8_both", True, True, False),
    ):
        if arch >= 100 and name not in ("mx_rows", "mx_both"):
            continue
        types = QUANTIZE | (scales if operand.format == "fp8" else {}) | SIZES
        t = TILES[tile]
        sizes = {"BLOCK_R": t["BLOCK_R"], "BLOCK_C": t["BLOCK_C"]}
        common = flags(operand, rows, cols, stochastic) | sizes
        found[name] = built(quantize_kernel, arch, types, {"ACT": 2, "WRITE_Y": False} | common, t["num_warps"])
        if name in ("mx_both", "fp8_both"):
            t = TILES[f"norm_{operand.format}"]
            common |= {"BLOCK_R": t["BLOCK_R"], "BLOCK_C": t["BLOCK_C"]}
            types = NORM | (scales if operand.format == "fp8" else {}) | SIZES
            constexprs = {"WEIGHT": True, "BIAS": False, "WRITE_Y": True, "QUANTIZE": True} | common
            found[f"norm_{name}"] = built(norm_quantize_kernel, arch, types, constexprs, t["num_warps"])
            found[f"gluon_{name}"] = by_hand(operand, arch, types, True)
            found[f"gluon_{name.replace('both', 'rows')}"] = by_hand(operand, arch, types, False)
    types = NORM | scales | SIZES
    strips = Operand("fp8", block=(1, 128))
    for act in (1, 2, 3):
        found[f"gluon_fp8_act_{act}"] = by_hand(strips, arch, types, True, act)
    found["gluon_fp8_sums"] = by_hand(strips, arch, types, True, sums=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]))

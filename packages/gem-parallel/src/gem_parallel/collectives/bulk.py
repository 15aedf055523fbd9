"""The copies and means of `few_sms` by bulk tensor copies, for Hopper GPUs on: an SM moves what its link to the L2 carries.

A program is a pair of blocks in neighbouring SMs, each of which has half of every stage. A ring of stages in shared memory is filled and
emptied by the copy unit; registers hold nothing but the numbers that are being added, so that shared memory bounds what is under way::

    stage   0 ...... 1 ...... 2 ...... 0 ......      a stage of a mean: 64 KiB an SM, over own and sent parts; of a copy: 32 KiB
    load    ====---- ====---- ====---- ====          out of memory
    add         ==       ==       ==                 own += sent, in shared memory
    store         ==       ==       ==               into memory, before the stage is filled again

Numbers are seen as rows of 32 (128 bytes); a rest of fewer is left to the caller.
"""

# ruff: noqa: SIM113 - the compiler knows no enumerate

from __future__ import annotations

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

ROW = 32
STAGES = 3
STAGE_ROWS = 1024
"""Of a pair, in a stage of a mean."""
WARPS = 8


@gluon.jit
def copy_bulk_kernel(source, target, blocks, ROWS: gl.constexpr, STAGES: gl.constexpr):
    held = gl.allocate_shared_memory(source.dtype, [STAGES, ROWS, 32], source.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout(cga_layout=[[0]]))
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    first = gl.program_id(0)
    step = gl.num_programs(0)
    for i in gl.static_range(STAGES - 1):
        if first + i * step < blocks:
            mbarrier.expect(full.index(i), ROWS * 64)
            tma.async_copy_global_to_shared(source, [(first + i * step) * ROWS, 0], full.index(i), held.index(i))
    turn = 0
    for block in range(first, blocks, step):
        stage = turn % STAGES
        mbarrier.wait(full.index(stage), turn // STAGES & 1)
        tma.async_copy_shared_to_global(target, [block * ROWS, 0], held.index(stage))
        ahead = block + (STAGES - 1) * step
        if ahead < blocks:
            tma.store_wait(1)  # the stage before has been read
            before = (turn + STAGES - 1) % STAGES
            mbarrier.expect(full.index(before), ROWS * 64)
            tma.async_copy_global_to_shared(source, [ahead * ROWS, 0], full.index(before), held.index(before))
        turn += 1
    tma.store_wait(0)


@gluon.jit
def mean_bulk_kernel(own, sent, out, blocks, apart, scale, PEERS: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr):
    """``apart``: rows between the parts of two peers."""
    flat: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [8, 1], [1, 0], cga_layout=[[1, 0]])
    mine = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS, 32], own.layout)
    theirs = gl.allocate_shared_memory(gl.float32, [STAGES * PEERS, ROWS, 32], own.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout(cga_layout=[[0]]))
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    first = gl.program_id(0)
    step = gl.num_programs(0)
    for i in gl.static_range(STAGES - 1):
        if first + i * step < blocks:
            mbarrier.expect(full.index(i), (1 + PEERS) * ROWS * 64)
            tma.async_copy_global_to_shared(own, [(first + i * step) * ROWS, 0], full.index(i), mine.index(i))
            for peer in gl.static_range(PEERS):
                tma.async_copy_global_to_shared(
                    sent, [peer * apart + (first + i * step) * ROWS, 0], full.index(i), theirs.index(i * PEERS + peer)
                )
    turn = 0
    for block in range(first, blocks, step):
        stage = turn % STAGES
        mbarrier.wait(full.index(stage), turn // STAGES & 1)
        total = mine.index(stage).load(flat)
        for peer in gl.static_range(PEERS):
            total += theirs.index(stage * PEERS + peer).load(flat)
        mine.index(stage).store(total * scale)
        fence_async_shared()
        tma.async_copy_shared_to_global(out, [block * ROWS, 0], mine.index(stage))
        ahead = block + (STAGES - 1) * step
        if ahead < blocks:
            tma.store_wait(1)
            before = (turn + STAGES - 1) % STAGES
            mbarrier.expect(full.index(before), (1 + PEERS) * ROWS * 64)
            tma.async_copy_global_to_shared(own, [ahead * ROWS, 0], full.index(before), mine.index(before))
            for peer in gl.static_range(PEERS):
                tma.async_copy_global_to_shared(
                    sent, [peer * apart + ahead * ROWS, 0], full.index(before), theirs.index(before * PEERS + peer)
                )
        turn += 1
    tma.store_wait(0)


def mean(own: Tensor, sent: Tensor, peers: int, stride: int, out: Tensor, sms: int) -> int:
    """See `few_sms.mean`; returns how many of the numbers it takes: none where parts do not begin at whole rows or a stage is not shared
    evenly."""
    rows = STAGE_ROWS // (1 + peers)
    if STAGE_ROWS % (1 + peers) or rows & (rows - 1) or (peers > 1 and stride % ROW) or not _fit(own, sent, out):
        return 0
    n = own.numel() // ROW
    if n:
        blocks = triton.cdiv(n, rows)
        mean_bulk_kernel[(max(1, min(sms // 2, blocks)),)](
            _rows(own, rows), _rows(sent, rows), _rows(out, rows), blocks, stride // ROW, 1.0 / (peers + 1),
            PEERS=peers, ROWS=rows, STAGES=STAGES, num_warps=WARPS, num_ctas=2,
        )  # fmt: skip
    return n * ROW


def copy(source: Tensor, target: Tensor, sms: int) -> int:
    """See `few_sms.copy`, of 32-bit numbers; returns how many of them it takes."""
    if not _fit(source, target):
        return 0
    n = source.numel() // ROW
    if n:
        blocks = triton.cdiv(n, STAGE_ROWS // 2)
        copy_bulk_kernel[(max(1, min(sms // 2, blocks)),)](
            _rows(source, STAGE_ROWS // 2), _rows(target, STAGE_ROWS // 2), blocks,
            ROWS=STAGE_ROWS // 2, STAGES=2 * STAGES, num_warps=1, num_ctas=2,
        )  # fmt: skip
    return n * ROW


def _fit(*tensors: Tensor) -> bool:
    """What a bulk copy asks of addresses."""
    return all(t.data_ptr() % 16 == 0 for t in tensors)


def _rows(tensor: Tensor, rows: int) -> TensorDescriptor:
    whole = tensor[: tensor.numel() // ROW * ROW].view(-1, ROW)
    return TensorDescriptor.from_tensor(whole, [rows, ROW], gl.NVMMASharedLayout(128, 32, 2, cga_layout=[[1, 0]]))

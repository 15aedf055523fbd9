"""Two kernels whose warps are ordered in the two ways of the Hopper kernels, and by nothing else: what racecheck makes of these ways alone.

``specialised``: two groups of warps, each of which stores to its own places in memory. Shared memory has only what Triton itself keeps
there to send each group to its code, between barriers of the whole block. ``message``: one warp fills a slot of shared memory and arrives
at an mbarrier; the other group waits for that, and reads.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from gem_kernels.triton.common.launch import launch
from gem_kernels.triton.hopper.common import make_barriers


@gluon.jit
def _reader(to, slot, full, MESSAGE: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    x = gl.full([128], 1.0, gl.float32, layout)
    if MESSAGE:
        mbarrier.wait(full.index(0), 0)
        x = slot.load(layout)
    gl.store(to + gl.arange(0, 128, layout=layout), x)


@gluon.jit
def _writer(to, slot, full, MESSAGE: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    x = gl.full([128], 1.0, gl.float32, layout)
    if MESSAGE:
        slot.store(x)
        mbarrier.arrive(full.index(0), count=1)
    else:
        gl.store(to + 128 + gl.arange(0, 128, layout=layout), x)


@gluon.jit
def control_kernel(to, MESSAGE: gl.constexpr, num_warps: gl.constexpr):
    slot = gl.allocate_shared_memory(gl.float32, [128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = make_barriers(1, 1)
    gl.warp_specialize([(_reader, (to, slot, full, MESSAGE)), (_writer, (to, slot, full, MESSAGE))], [1], [24])


def main() -> None:
    for name, message in (("specialised", False), ("message", True)):
        to = torch.zeros(256, device="cuda")
        launch(control_kernel, (1,), to.device, to, MESSAGE=message, num_warps=4)
        torch.cuda.synchronize()
        assert to[: 128 if message else 256].eq(1).all(), name
        print(f"{name}: done", flush=True)

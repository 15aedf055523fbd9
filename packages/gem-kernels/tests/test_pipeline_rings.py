"""The search for tiles that a load overwrites while a product reads them, on the fault that it is for."""

from __future__ import annotations

import importlib.util
from pathlib import Path

_SPEC = importlib.util.spec_from_file_location("pipeline_rings", Path(__file__).with_name("pipeline_rings.py"))
pipeline_rings = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(pipeline_rings)

LOOP = """
    %x = ttg.local_alloc : () -> !ttg.memdesc<{slots}x128x64xf16, #shared, #smem, mutable>
    %x0 = ttg.memdesc_index %x[%c0] : !ttg.memdesc<{slots}x128x64xf16, #shared, #smem, mutable>
    ttng.async_tma_copy_global_to_local %d[%m, %c0] %x0, %b0, %true : !tt.tensordesc
    %x1 = ttg.memdesc_index %x[%c1] : !ttg.memdesc<{slots}x128x64xf16, #shared, #smem, mutable>
    ttng.async_tma_copy_global_to_local %d[%m, %c1] %x1, %b1, %true : !tt.tensordesc
    scf.for %i = %c0 to %n step %c1 {{
      %now = ttg.memdesc_index %x[%i] : !ttg.memdesc<{slots}x128x64xf16, #shared, #smem, mutable>
      %t = ttg.memdesc_trans %now {{order = array<i32: 1, 0>}} : !ttg.memdesc<128x64xf16>
      %acc = ttng.warp_group_dot %a, %t, %old {{isAsync = {asynchronous}}} : !ttg.memdesc<64x128xf16>
      %next = ttg.memdesc_index %x[%j] : !ttg.memdesc<{slots}x128x64xf16, #shared, #smem, mutable>
      ttng.async_tma_copy_global_to_local %d[%m, %k] %next, %b, %true : !tt.tensordesc
    }}
"""


def test_two_slots_filled_two_steps_ahead_are_too_few() -> None:
    assert pipeline_rings.overrun(LOOP.format(slots=2, asynchronous="true")) == ["2 slots, filled 2 ahead"]


def test_one_slot_more_is_enough() -> None:
    assert pipeline_rings.overrun(LOOP.format(slots=3, asynchronous="true")) == []


def test_a_product_that_is_waited_for_needs_none() -> None:
    assert pipeline_rings.overrun(LOOP.format(slots=2, asynchronous="false")) == []

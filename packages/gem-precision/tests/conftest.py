"""Triton 3.6's interpreter takes int() of one-element arrays for loop bounds, which numpy 2.4 and later refuse."""

from __future__ import annotations

import importlib.util
import os

if importlib.util.find_spec("triton") is not None and os.environ.get("TRITON_INTERPRET") == "1":
    from triton.runtime import interpreter

    _patch = interpreter._patch_lang_tensor

    def _patch_lang_tensor(tensor, scope):
        _patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = _patch_lang_tensor

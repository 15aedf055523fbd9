"""TorchRec and FBGEMM, imported only when a strategy needs them."""

from __future__ import annotations

import importlib
from typing import Any

from gem_core.errors import DeviceError

PAIRS = {"2.11": ("1.6.0", "1.6.1"), "2.13": ("1.8.0", "1.8.0")}
"""torch -> (fbgemm-gpu, torchrec) that belong together."""


def need(module: str, wanted_by: str) -> Any:
    """The module, of ``fbgemm_gpu`` or ``torchrec``.

    :raises DeviceError: it is not installed, or does not fit this torch; the message holds the commands that install the right pair.
    """
    try:
        return importlib.import_module(module)
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        raise DeviceError(
            f"{wanted_by} needs {module.split('.')[0]}, which cannot be imported: {type(error).__name__}: {error}",
            where=f"import {module}",
            fix=_commands(),
        ) from error


def _commands() -> str:
    import torch

    version = ".".join(torch.__version__.split("+")[0].split(".")[:2])
    fbgemm, torchrec = PAIRS.get(version, (None, None))
    if fbgemm is None:
        return f"install the fbgemm-gpu and torchrec that belong to torch {version}; known pairs are for torch {', '.join(PAIRS)}"
    if torch.version.cuda is not None:
        return f"pip install fbgemm-gpu=={fbgemm} torchrec=={torchrec}"
    needs = "tensordict torchmetrics==1.0.3 tqdm iopath pyre-extensions orjson pyvers importlib_metadata"
    return f"pip install fbgemm-gpu-cpu=={fbgemm}; pip install --no-deps torchrec=={torchrec}; pip install {needs}"

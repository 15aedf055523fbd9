"""What `sanitize.py` runs: every kernel of the package is among it, found without a GPU by noting launches."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from gem_kernels import triton

HERE = Path(__file__).parent
PROBE = """
import json
import sanitize_calls
from gem_core import plugins
from gem_core.ops.contract import YES
from gem_kernels.triton.common import launch
from gem_kernels.triton.hopper import spec

plugins.manager()
sanitize_calls.DEVICE, spec._on_hopper = "cpu", lambda problem: YES
launched, taken = set(), {}
launch._Recorder.compile = lambda self, kernel, args, meta: launched.add(kernel.__name__)
with launch.compile_only("sm_90"):
    for entry in sanitize_calls.entries([], []):
        taken[entry.op, entry.implementation] = entry.run() or taken.get((entry.op, entry.implementation), False)
print(json.dumps([sorted(launched), [" ".join(who) for who, ran in taken.items() if not ran]]))
"""


def test_every_kernel_is_called() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(HERE)}
    environment["PYTHONPATH"] += os.pathsep + os.environ.get("PYTHONPATH", "")
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    launched, refused = json.loads(done.stdout)
    sources = [path.read_text() for path in Path(triton.__file__).parent.rglob("*.py")]
    written = {name for text in sources for name in re.findall(r"^def (\w+_kernel)\(", text, re.MULTILINE)}
    assert not written - set(launched)
    assert not refused, "implementations that take none of their calls"

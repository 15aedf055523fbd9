"""Two thousand damaged Parquet files: each ends in an error that names the file, or in rows of the right number and lengths.

Runs in a child process, so that a crash of the reader is a failed test and not a dead test run.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gem_core.config.features import Dense, EventField, Features, Label, Sequence, Sparse
from gem_core.errors import GemError
from gem_data import ParquetSource

FILES = 2000
FEATURES = Features(
    sample_id="id",
    dense={"d": Dense(default=0.0)},
    sparse={"x": Sparse(rows=50), "s": Sparse(rows=99, hash=True)},
    sequences={"h": Sequence(fields={"h": EventField(rows=50)}, timestamps="t", order="trust")},
    labels={"y": Label()},
)


def write(path: Path, seed: int) -> tuple[int, int]:
    """A sound file of random shape and settings; its rows and events."""
    choose, rng = random.Random(seed), np.random.default_rng(seed)
    n = choose.randint(1, 60)
    offsets = np.concatenate([[0], np.cumsum(rng.integers(0, 9, n))])
    events = int(offsets[-1])
    columns = {
        "id": np.arange(n),
        "x": rng.integers(0, 50, n).astype(np.int32),
        "s": rng.choice(["a", "bb", "日本"], n),
        "d": rng.normal(size=n),
        "h": pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(rng.integers(0, 50, events))),
        "t": pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(np.sort(rng.integers(0, 99, events)))),
        "y": rng.integers(0, 2, n),
    }
    pq.write_table(
        pa.table(columns),
        path,
        row_group_size=choose.randint(1, n),
        compression=choose.choice(["none", "snappy", "zstd"]),
        use_dictionary=choose.random() < 0.5,
        data_page_version=choose.choice(["1.0", "2.0"]),
        write_page_checksum=choose.random() < 0.5,
    )
    return n, events


def damage(data: bytes, seed: int) -> bytes:
    """Cut, flip bits, zero or reverse a stretch, insert bytes, or overwrite bytes of the footer."""
    choose, out = random.Random(seed), bytearray(data)
    n, footer = len(out), int.from_bytes(out[-8:-4], "little")
    a, b = sorted((choose.randrange(n), choose.randrange(n)))
    match choose.choice(["cut", "flip", "flip", "zero", "footer", "footer", "reverse", "insert"]):
        case "cut":
            del out[a:]
        case "flip":
            for _ in range(choose.randint(1, 4)):
                out[choose.randrange(n)] ^= 1 << choose.randrange(8)
        case "zero":
            out[a : a + 64] = bytes(len(out[a : a + 64]))
        case "footer":
            for _ in range(choose.randint(1, 3)):
                out[n - 1 - choose.randrange(min(n, footer + 8))] = choose.randrange(256)
        case "reverse":
            out[a:b] = out[a:b][::-1]
        case "insert":
            out[a:a] = choose.randbytes(choose.randint(1, 20))
    return bytes(out)


def attempt(path: Path, seed: int) -> str:
    rows, events = write(path, seed)
    path.write_bytes(damage(path.read_bytes(), seed))
    begin, seen, tokens = time.monotonic(), 0, 0
    try:
        filter = "x >= 0 and s != 'q'" if seed % 3 == 0 else None  # true for all rows
        for batch in ParquetSource(path, FEATURES, batch_size=7, prefetch=seed % 2, filter=filter):
            seen, tokens = seen + len(batch.validate()), tokens + batch.tokens
        outcome = "read" if (seen, tokens) == (rows, events) else f"wrong lengths: {seen} rows, {tokens} events for {rows}, {events}"
    except GemError as error:
        outcome = "refused" if str(path) in str(error) else f"no file named: {error}"
    except BaseException as error:
        outcome = f"raised {type(error).__name__}: {error}"
    return outcome if time.monotonic() - begin < 20 else f"took {time.monotonic() - begin:.0f} s"


@pytest.mark.slow
def test_damaged_files():
    done = subprocess.run([sys.executable, "-X", "faulthandler", __file__], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, f"the reader took the process down: {done.stderr[-3000:]}"
    outcomes = json.loads(done.stdout)
    assert outcomes.keys() <= {"read", "refused"}, outcomes
    assert sum(outcomes.values()) == FILES
    assert outcomes["refused"] > FILES / 2, "most of the damage must be noticed, or the test damages nothing"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(Counter(attempt(Path(folder) / "f.parquet", seed) for seed in range(FILES))))

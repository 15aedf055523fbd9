"""``gemrec bench data``: batches against what pyarrow alone decodes, and against a dataset that goes row by row.

All variants read the same columns of the same file (in the page cache), take turns, and must give the same number of rows and the same sum
of every id column, or nothing is reported.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from gem_core.config.features import Dense, EventField, Features, Label, Sequence, Sparse
from gem_core.errors import RunError
from gem_core.sources.laws import LognormalLaw, histogram
from gem_core.train.measure import peak_resident
from gem_data.parquet import ParquetSource

SPARSE, DENSE, EVENTS = 12, 8, 5
ROW_GROUP = 10_000
LAW = LognormalLaw(mean=200, sigma=1.0, zero=0.05, max=4096)
BATCH = 512

Totals = tuple[int, int, int]
"""(rows, events, sum of the first event field)."""


def features() -> Features:
    """12 ids, 8 numbers, a label; one history of 5 ids and a time: 6 list columns."""
    return Features(
        dense={f"d{i}": Dense() for i in range(DENSE)},
        sparse={f"s{i}": Sparse(rows=10_000) for i in range(SPARSE)},
        sequences={
            "h": Sequence(
                fields={f"h{i}": EventField(rows=100_000) for i in range(EVENTS)}, timestamps="t", max_length=LAW.max, order="trust"
            )
        },
        labels={"label": Label()},
    )


COLUMNS = [*(f"d{i}" for i in range(DENSE)), *(f"s{i}" for i in range(SPARSE)), *(f"h{i}" for i in range(EVENTS)), "t", "label"]


def make(path: Path, rows: int, seed: int) -> None:
    """Write the file: int64 ids (events by Zipf's law), float32 numbers, zstd."""
    rng = np.random.default_rng(seed)
    lengths = LAW.draw(rows, seed)
    writer = None
    for start in range(0, rows, ROW_GROUP):
        part = lengths[start : start + ROW_GROUP]
        n, events = part.size, int(part.sum())
        offsets = pa.array(np.concatenate([[0], np.cumsum(part)]), pa.int32())
        columns: dict[str, Any] = {f"d{i}": rng.normal(size=n).astype(np.float32) for i in range(DENSE)}
        columns |= {f"s{i}": rng.integers(0, 10_000, n) for i in range(SPARSE)}
        columns |= {f"h{i}": pa.ListArray.from_arrays(offsets, pa.array(rng.zipf(1.2, events) % 100_000)) for i in range(EVENTS)}
        columns["t"] = pa.ListArray.from_arrays(offsets, pa.array(1_700_000_000 + np.cumsum(rng.integers(0, 60, events))))
        columns["label"] = rng.integers(0, 2, n).astype(np.int8)
        table = pa.table(columns)
        writer = writer or pq.ParquetWriter(path, table.schema, compression="zstd")
        writer.write_table(table, row_group_size=n)
    if writer is not None:
        writer.close()


def arrow_alone(path: Path) -> tuple[Totals, int]:
    """Decode every row group to Arrow and drop it; also the decoded bytes."""
    file = pq.ParquetFile(path, pre_buffer=True)
    rows = events = total = size = 0
    for i in range(file.num_row_groups):
        table = file.read_row_group(i, columns=COLUMNS, use_threads=True)
        rows, size = rows + table.num_rows, size + table.nbytes
        values = table["h0"].chunk(0).values.to_numpy()
        events, total = events + values.size, total + int(values.sum())
        del table, values
    return (rows, events, total), size


def batches(path: Path, shuffle: bool) -> Totals:
    rows = events = total = 0
    for batch in ParquetSource(path, features(), batch_size=BATCH, shuffle=shuffle, window=ROW_GROUP):
        values = batch.sequences["h"].fields["h0"]
        assert isinstance(values, torch.Tensor)
        rows, events, total = rows + len(batch), events + values.numel(), total + int(values.numpy().sum())
    return rows, events, total


class RowByRow(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """What is usually written first: a table in memory, a dict of tensors a row."""

    def __init__(self, path: Path, rows: int) -> None:
        file = pq.ParquetFile(path)
        self.table = pa.concat_tables(
            file.read_row_group(i, columns=COLUMNS) for i in range(min(file.num_row_groups, -(-rows // ROW_GROUP)))
        ).slice(0, rows)

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: torch.tensor(self.table[name][index].as_py()) for name in COLUMNS}


def _packed(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.cat([row[name].view(-1) for row in rows]) for name in COLUMNS}


def row_by_row(path: Path, rows: int) -> tuple[Totals, float]:
    """Totals of the first ``rows`` rows, and the seconds without the loading of the table."""
    loader = torch.utils.data.DataLoader(RowByRow(path, rows), batch_size=BATCH, collate_fn=_packed)
    begin = time.perf_counter()
    seen = events = total = 0
    for batch in loader:
        seen, events, total = seen + batch["label"].numel(), events + batch["h0"].numel(), total + int(batch["h0"].sum())
    return (seen, events, total), time.perf_counter() - begin


def run(rows: int, repeats: int, threads: int, seed: int, folder: Path | None) -> dict[str, Any]:
    """Measure everything; returns the record that is stored.

    :raises RunError: a variant gave other rows than pyarrow.
    """
    pa.set_cpu_count(threads)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        path = Path(temporary) / "bench.parquet"
        _child("make", path, rows, seed)
        _child("make", path.with_name("small.parquet"), 600, seed)
        peak = json.loads(_child("peak", path, threads, 0))
        want, size = arrow_alone(path)
        variants: dict[str, Callable[[], Totals]] = {
            "pyarrow alone": lambda: arrow_alone(path)[0],
            "batches in file order": lambda: batches(path, False),
            "batches shuffled": lambda: batches(path, True),
        }
        seconds: dict[str, list[float]] = {name: [] for name in variants}
        cpu: dict[str, list[float]] = {name: [] for name in variants}
        for _ in range(repeats):
            for name, variant in variants.items():
                begin, cpu_begin = time.perf_counter(), time.process_time()
                got = variant()
                seconds[name].append(time.perf_counter() - begin)
                cpu[name].append(time.process_time() - cpu_begin)
                if got != want:
                    raise RunError(f"{name} gave (rows, events, sum) {got}, pyarrow {want}; nothing is reported")
        slow_rows = min(10_000, rows)
        slow, slow_seconds = row_by_row(path, slow_rows)
        return _record(rows, threads, seed, size, path.stat().st_size, seconds, cpu, slow[0] / slow_seconds, peak)


def _record(
    rows: int,
    threads: int,
    seed: int,
    size: int,
    stored: int,
    seconds: dict[str, list[float]],
    cpu: dict[str, list[float]],
    slow: float,
    peak: dict[str, int],
) -> dict[str, Any]:
    best, work = ({name: min(times) for name, times in kind.items()} for kind in (seconds, cpu))
    floor, least = best["pyarrow alone"], work["pyarrow alone"]
    return {
        "command": f"gemrec bench data --rows {rows} --threads {threads} --seed {seed}",
        "machine": {"cpu": _cpu(), "cores": os.cpu_count(), "threads": threads, "load": os.getloadavg()[0], "system": platform.platform()},
        "versions": {"python": platform.python_version(), "pyarrow": pa.__version__, "torch": torch.__version__, "numpy": np.__version__},
        "commit": _commit(),
        "seed": seed,
        "rows": rows,
        "batch_size": BATCH,
        "file_bytes": stored,
        "decoded_bytes": size,
        "lengths": histogram(LAW.draw(rows, seed)),
        "seconds": seconds,
        "cpu_seconds": cpu,
        "rates": {
            name: {
                "rows_per_s": rows / t,
                "decoded_gb_per_s": size / t / 1e9,
                "of_pyarrow": floor / t,
                "cpu_of_pyarrow": work[name] / least,
            }
            for name, t in best.items()
        }
        | {"row by row": {"rows_per_s": slow, "of_pyarrow": slow * floor / rows}},
        "times_row_by_row": rows / best["batches in file order"] / slow,
        "times_row_by_row_shuffled": rows / best["batches shuffled"] / slow,
        "peak": peak | {"of_largest_row_group": (peak["peak_bytes"] - peak["start_bytes"]) / peak["row_group_bytes"]},
    }


def table(record: dict[str, Any]) -> str:
    """The record as Markdown."""
    lines = [
        f"`{record['command']}`, commit {record['commit']}: {record['rows']:,} rows, {record['decoded_bytes'] / 1e9:.2f} GB decoded, "
        f"{record['machine']['threads']} threads of {record['machine']['cpu']} (load {record['machine']['load']:.1f}), "
        f"pyarrow {record['versions']['pyarrow']}. History lengths: mean {record['lengths']['mean']:.0f}, max {record['lengths']['max']}.",
        "",
        "| reader | rows/s | decoded GB/s | of pyarrow alone | CPU time, pyarrow alone = 1 |",
        "|---|---|---|---|---|",
    ]
    for name, rate in record["rates"].items():
        speed = f"{rate['decoded_gb_per_s']:.2f}" if "decoded_gb_per_s" in rate else ""
        cpu = f"{rate['cpu_of_pyarrow']:.2f}" if "cpu_of_pyarrow" in rate else ""
        lines.append(f"| {name} | {rate['rows_per_s']:,.0f} | {speed} | {rate['of_pyarrow']:.1%} | {cpu} |")
    lines += [
        "",
        f"Against row by row: {record['times_row_by_row']:.0f} times, shuffled {record['times_row_by_row_shuffled']:.0f} times. "
        f"Peak memory above the start, shuffled: {record['peak']['of_largest_row_group']:.2f} times the largest row group "
        f"({record['peak']['row_group_bytes'] / 1e6:.0f} MB decoded).",
    ]
    return "\n".join(lines) + "\n"


# --- child processes: a fresh peak of memory --------------------------------------------------------------------------------------------


def _child(*arguments: Any) -> str:
    done = subprocess.run([sys.executable, "-m", "gem_data.bench", *map(str, arguments)], capture_output=True, text=True)
    if done.returncode:
        raise RunError(f"a part of the benchmark failed: {done.stderr.strip()[-2000:]}")
    return done.stdout


def _peak(path: Path) -> dict[str, int]:
    """Peak memory of reading shuffled batches, above what the process held after it had read a small file: libraries, threads, buffers."""
    for _ in ParquetSource(path.with_name("small.parquet"), features(), batch_size=BATCH, shuffle=True, window=ROW_GROUP):
        pass
    start = peak_resident()
    for _ in ParquetSource(path, features(), batch_size=BATCH, shuffle=True, window=ROW_GROUP):
        pass
    peak = peak_resident()
    file = pq.ParquetFile(path)
    largest = max(file.read_row_group(i, columns=COLUMNS).nbytes for i in range(file.num_row_groups))
    return {"start_bytes": start, "peak_bytes": peak, "row_group_bytes": largest}


def _cpu() -> str:
    try:
        names = [line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def _commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent)
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    part, target, number, seed_ = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    if part == "make":
        make(target, number, seed_)
    else:
        pa.set_cpu_count(number)
        print(json.dumps(_peak(target)))

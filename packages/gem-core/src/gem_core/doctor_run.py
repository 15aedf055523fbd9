"""What a configured run needs of this machine: memory for parameters, tables and their optimizer state, room for its checkpoints.

Lower bounds: activations and batches come on top (`gemrec plan` counts them). `weigh` reads, `judge` is a pure function.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gem_core.config import Config
from gem_core.doctor import Finding, Gpu

NETWORK = ("nfs", "nfs4", "cifs", "smb3", "lustre", "fuse", "fuse.sshfs", "fuse.s3fs", "9p", "beegfs", "gpfs")
VOLATILE = ("tmpfs", "ramfs", "overlay")
DENSE_BYTES = 16
"""fp32 parameter, gradient and AdamW's two moments."""


@dataclass(frozen=True)
class Demand:
    """What a run asks for, and what is there. Sizes in bytes; ``device_memory`` is that of the smallest GPU, None: the run uses the CPU."""

    folder: str
    file_system: str | None
    free: int
    memory: int | None
    device_memory: int | None
    dense_parameters: int
    table_bytes: int
    checkpoints: int
    sharded: bool = False
    open_files: int | None = None


def weigh(config: Config, gpus: tuple[Gpu, ...] = ()) -> Demand:
    """Build the model of ``config`` without memory and read the machine; ``run.dir`` need not be there yet.

    :raises GemError: the configuration does not give a model.
    """
    import torch

    from gem_core.config import resolve
    from gem_core.model import deferred_tables
    from gem_core.plugins import manager

    resolved = resolve(config)
    with torch.device("meta"), deferred_tables():
        model = manager().find("model", config.model.name).build(resolved.model, resolved.config.features)
    tables: Any = getattr(model, "table_set", None)
    specs = tables.tables if tables is not None else ()
    dense = sum(p.numel() for name, p in model.named_parameters() if not name.startswith("tables."))
    folder = Path(config.run.dir).absolute()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    on_gpu = gpus and config.run.device != "cpu"
    p = config.parallel
    return Demand(
        folder=str(folder),
        file_system=_file_system(there),
        free=shutil.disk_usage(there).free,
        memory=machine_memory(),
        device_memory=min((g.memory for g in gpus if g.memory), default=None) if on_gpu else None,
        dense_parameters=dense,
        table_bytes=sum(t.rows * (t.dim * (4 if t.dtype == "fp32" else 2) + 4) for t in specs),
        checkpoints=config.train.keep_checkpoints + 1,
        sharded=p.dense not in ("single", "ddp") or p.sparse != "local",
        open_files=_open_files(),
    )


def judge(demand: Demand) -> Iterator[Finding]:
    """Every reason why the run would not fit, with its cure."""
    state = DENSE_BYTES * demand.dense_parameters + demand.table_bytes
    room, what = (demand.memory, "memory") if demand.device_memory is None else (demand.device_memory, "GPU memory")
    if room is not None and state > room and not demand.sharded:
        yield Finding(
            "error",
            what,
            f"parameters, tables and optimizer state take {_gib(state)} (tables {_gib(demand.table_bytes)}), the {what} is {_gib(room)}",
            (
                "gemrec plan CONFIG --cluster CLUSTER.toml --world N",
                "gemrec train CONFIG --set parallel.dense=fsdp --set parallel.sparse=gem-2d",
            ),
        )
    saved = 12 * demand.dense_parameters + demand.table_bytes
    if saved * demand.checkpoints > demand.free:
        kept = max(1, demand.free // saved - 1) if saved else 1
        yield Finding(
            "error",
            "disk",
            f"{demand.checkpoints} checkpoints (one while it is written) take {_gib(saved * demand.checkpoints)}, "
            f"{demand.folder} has {_gib(demand.free)} free",
            (f"gemrec train CONFIG --set train.keep_checkpoints={kept}", "gemrec train CONFIG --set run.dir=FOLDER_ON_A_LARGER_DISK"),
        )
    if demand.file_system in VOLATILE:
        yield Finding(
            "warning",
            "disk",
            f"{demand.folder} is on {demand.file_system}: checkpoints are gone when the machine or container is",
            ("gemrec train CONFIG --set run.dir=FOLDER_ON_A_DISK",),
        )
    elif demand.file_system in NETWORK and saved > 1 << 30:
        yield Finding(
            "warning",
            "disk",
            f"{demand.folder} is on {demand.file_system}: training waits while {_gib(saved)} are written over the network",
            ("gemrec train CONFIG --set train.checkpoint_async=true",),
        )
    if demand.open_files is not None and demand.open_files < 1024:
        yield Finding(
            "warning",
            "open files",
            f"this shell allows {demand.open_files} open files; reader processes and data files need more",
            ("ulimit -n 65536",),
        )


def _file_system(path: Path) -> str | None:
    """Type of the mount that holds ``path``; None where the system does not tell."""
    mounts = Path("/proc/mounts")
    if not mounts.exists():
        return None
    rows = [line.split(" ") for line in mounts.read_text().splitlines()]
    holding = [(len(row[1]), row[2]) for row in rows if path.is_relative_to(row[1].replace("\\040", " "))]
    return max(holding)[1] if holding else None


def machine_memory() -> int | None:
    """Memory of the machine, or of the container where that is less."""
    found = []
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and (text := limit.read_text().strip()).isdigit():
        found.append(int(text))
    return min(found, default=None)


def _open_files() -> int | None:
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return None
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB"

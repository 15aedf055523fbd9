"""Which memory each table lives in, by bytes."""

from __future__ import annotations

import torch

from gem_core.errors import ConfigError
from gem_core.model.contract import TableSet
from gem_parallel.sparse.comm import Axes
from gem_parallel.sparse.config import SparseConfig, TableOptions
from gem_parallel.sparse.layout import BYTES, check_tables, options_of


def placed(tables: TableSet, config: SparseConfig, strategy: str, where: Axes | None = None) -> dict[str, TableOptions]:
    """Options of every table, complete. Under ``placement = "auto"`` the tables with the most rows move to ``uvm_caching``, one after
    another, until what a rank keeps on the device fits ``hbm_gb``; the cache of a moved table counts.

    :raises ConfigError: options of unknown tables; host placement without CUDA; a budget that even caches exceed.
    """
    check_tables(tables, config, strategy)
    device = _device()
    options = {t.name: options_of(t, config) for t in tables.tables}
    ranks = 1 if where is None else where.model * where.replica
    free = [t for t in tables.tables if options[t.name].placement is None]
    if free:
        size = {t.name: t.rows * (t.dim * BYTES[options[t.name].dtype or "fp32"] + 4) / ranks for t in tables.tables}
        budget = _budget(config, device)
        moved = {n for n, o in options.items() if o.placement in ("uvm", "uvm_caching")}
        total = sum(
            size[n] * (config.cache_fraction if options[n].placement == "uvm_caching" else options[n].placement != "uvm") for n in size
        )
        for table in sorted(free, key=lambda t: -size[t.name]):
            if total <= budget:
                break
            moved.add(table.name)
            total -= size[table.name] * (1 - config.cache_fraction)
        if total > budget:
            raise ConfigError(
                f"even with every table cached a rank needs {total / 2**30:.2f} GiB of device memory, hbm_gb allows {budget / 2**30:.2f}",
                where=f"parallel.{strategy}.hbm_gb",
                fix="lower cache_fraction, use more ranks, a smaller dtype, or allow more",
            )
        for table in free:
            place = "uvm_caching" if table.name in moved else "hbm"
            options[table.name] = options[table.name].model_copy(update={"placement": place})
    outside = [n for n, o in options.items() if o.placement != "hbm"]
    if outside and device.type != "cuda":
        raise ConfigError(
            f"table {outside[0]!r} is to live outside of device memory, and there is no device",
            where=f"parallel.{strategy}",
            fix='leave placement at "hbm" on the CPU',
        )
    return options


def _device() -> torch.device:
    """The one on which tensors are made now."""
    return torch.empty(0).device


def _budget(config: SparseConfig, device: torch.device) -> float:
    if config.hbm_gb is not None:
        return config.hbm_gb * 2**30
    if device.type != "cuda":
        return float("inf")
    return 0.6 * float(torch.cuda.get_device_properties(device).total_memory)

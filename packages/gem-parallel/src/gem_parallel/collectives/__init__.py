"""All-gather back ends: of the process group, NCCL with few SMs, and copies by the copy engines, which need none.

Those who gather ask `gatherer` for one by name; where a group cannot use it, the answer is another one and the reason.
"""

from __future__ import annotations

import os
import socket
import time
from typing import Any

import torch
import torch.distributed as dist

from gem_core.errors import DeviceError, GemError
from gem_core.hookspecs import CollectiveSpec
from gem_core.ops.contract import Supported
from gem_core.plugins import manager
from gem_core.train.collective import Gatherer, GatherOptions, Topology

__all__ = ["gatherer", "specs", "topology"]

PROBE_S = 20
COPY_ENGINE, ZERO_CTA, LOW_CTA, DEFAULT = "copy-engine", "zero-cta", "low-cta", "default"


def specs() -> list[CollectiveSpec]:
    return [
        CollectiveSpec(DEFAULT, lambda topology: Supported(True, ""), _default),
        CollectiveSpec(LOW_CTA, _on_cuda, _low_cta),
        CollectiveSpec(ZERO_CTA, _one_host, _zero_cta),
        CollectiveSpec(COPY_ENGINE, _has_mates, _copy_engine),
    ]


def topology(group: Any, device: torch.device, per_host: int | None = None) -> Topology:
    """Of a group's members. Collective.

    :param per_host: processes of the world that are one host; None: as their names of the host say.
    """
    if per_host is not None:
        names: list[Any] = [rank // per_host for rank in dist.get_process_group_ranks(group)]
    else:
        names = [None] * group.size()
        dist.all_gather_object(names, socket.gethostname(), group=group)
    order = list(dict.fromkeys(names))
    return Topology(device.type, tuple(order.index(name) for name in names))


def gatherer(name: str, group: Any, options: GatherOptions) -> tuple[Gatherer, str]:
    """The back end ``name`` for ``group``, or, where it cannot be used, the process group's with few SMs; and what to tell about it.

    Collective over the group: either all members use what was asked for, or none does.

    :raises PluginError: nobody offers the name.
    """
    spec = manager().find("collective", name)
    supported = spec.supports(options.topology)
    built: Gatherer | None = None
    reason = supported.reason
    if supported:
        try:
            built = spec.build(group, options)
        except (GemError, RuntimeError, OSError) as fault:
            reason = str(fault).splitlines()[0]
    reasons: list[str] = [""] * group.size()
    dist.all_gather_object(reasons, "" if built is not None else reason or "it could not be built", group=group)
    if built is not None and not any(reasons):
        return built, f"{name}: {built.describe()}"
    why = next(r for r in reasons if r)
    other = LOW_CTA if options.device.type == "cuda" and name != LOW_CTA else DEFAULT
    instead: Gatherer = manager().find("collective", other).build(group, options)
    return instead, f"{other}: {instead.describe()}; not {name}, because {why}"


def _on_cuda(topology: Topology) -> Supported:
    return Supported(topology.device == "cuda", "NCCL's kernels run on CUDA devices only")


def _one_host(topology: Topology) -> Supported:
    if topology.device != "cuda":
        return _on_cuda(topology)
    if len(set(topology.hosts)) > 1:
        return Supported(False, "NCCL's copy-engine collectives work inside one host")
    if os.environ.get("NCCL_NVLS_ENABLE") != "0":
        return Supported(False, "NCCL's symmetric windows may use NVLink multicast unless the processes start with NCCL_NVLS_ENABLE=0")
    return Supported(True, "")


def _has_mates(topology: Topology) -> Supported:
    if topology.mates is None:
        return Supported(False, "the hosts of the group do not have equally many members that follow one another")
    if topology.mates == 1:
        return Supported(False, "no two members of the group share a host")
    return Supported(True, "")


def _default(group: Any, options: GatherOptions) -> Gatherer:
    from gem_parallel.collectives.process_group import GroupGather

    return GroupGather(group, options)


def _low_cta(group: Any, options: GatherOptions) -> Gatherer:
    from gem_parallel.collectives.process_group import GroupGather

    return GroupGather(group, options, limited=True)


def _zero_cta(group: Any, options: GatherOptions) -> Gatherer:
    from gem_parallel.collectives.process_group import ZeroCtaGather

    return _probed(ZeroCtaGather(group, options), group, options)


def _copy_engine(group: Any, options: GatherOptions) -> Gatherer:
    from gem_parallel.collectives.copy_engine import CopyEngineGather, HierarchicalGather

    kind = CopyEngineGather if len(set(options.topology.hosts)) == 1 else HierarchicalGather
    return _probed(kind(group, options), group, options)


def _probed(made: Gatherer, group: Any, options: GatherOptions) -> Gatherer:
    """After a gather whose result is checked, on a stream of its own, so that one that never ends holds nothing else up.

    :raises DeviceError: it did not end.
    """
    size, cuda = group.size(), options.device.type == "cuda"
    found = made.allocate(size, torch.int64)
    found[group.rank()] = group.rank() + 1
    if cuda:
        main = torch.cuda.current_stream(options.device)
        beside = torch.cuda.Stream(options.device)  # type: ignore[no-untyped-call]
        beside.wait_stream(main)
        with torch.cuda.stream(beside):
            made.gather(found)
        ended, until = beside.record_event(), time.monotonic() + PROBE_S
        while not ended.query():
            if time.monotonic() > until:
                getattr(made, "give_up", lambda: None)()
                raise DeviceError(f"a gather of {size} numbers did not end within {PROBE_S} s")
            time.sleep(1e-3)
        main.wait_event(ended)
    else:
        made.gather(found)
    if found.tolist() != [i + 1 for i in range(size)]:
        raise RuntimeError(f"a gather gave {found.tolist()}")
    return made

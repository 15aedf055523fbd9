"""``gemrec plugins``: what is installed, what it offers, and what is wrong with it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gem_core.cli.groups import CommandGroups
from gem_core.errors import PluginError

if TYPE_CHECKING:
    import torch


def register(app: CommandGroups) -> None:
    app.command()(plugins)


def plugins(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    ops: Annotated[bool, typer.Option("--ops", help="Print the implementations of every op, and why one would be passed over.")] = False,
) -> None:
    """List the installed plug-ins and what they offer.

    Example: gemrec plugins --json
    """
    if ops:
        _ops(as_json)
        return
    from gem_core.plugins import manager

    status = manager().status()
    if as_json:
        print(json.dumps([dataclasses.asdict(s) for s in status], indent=2))
    else:
        for s in status:
            print(f"{s.name} {s.version}  {s.state}" + (f": {s.reason}" if s.reason else ""))
            print(f"  api {s.api if s.api is not None else '-'}; hooks: {', '.join(s.hooks) or 'none'}")
            for kind, names in s.offers.items():
                if kind == "kernel":
                    print("\n".join(f"  kernel {name}: {', '.join(ops)}" for name, ops in _by_implementation(names).items()))
                else:
                    print(f"  {kind.replace('_', ' ')}: {', '.join(names)}")
    faulty = [s.name for s in status if s.state in ("broken", "conflict")]
    if faulty and manager().strict:
        raise PluginError(f"{', '.join(faulty)} cannot be used, and GEM_PLUGINS_STRICT is set", fix="mend, upgrade or uninstall it")


def _by_implementation(names: Iterable[str]) -> dict[str, list[str]]:
    """Implementation -> its ops, of names ``op/implementation``."""
    found: dict[str, list[str]] = {}
    for name in names:
        op, _, implementation = name.partition("/")
        found.setdefault(implementation, []).append(op)
    return found


def _ops(as_json: bool) -> None:
    rows = list(_choices())
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    for row in rows:
        print(f"{row['op']} ({row['dtype']} on {row['device']}): {row['chosen']}")
        for name, supported, reason in row["implementations"]:
            print(f"  {'*' if name == row['chosen'] else ' '} {name}: {'supported' if supported else reason}")


def _choices() -> Iterator[dict[str, Any]]:
    """The automatic choice for a plain call of every op, on this machine's device."""
    import torch

    from gem_core import ops

    device = "cuda" if torch.cuda.is_available() else "cpu"
    for dtype in (torch.float32, torch.bfloat16):
        for op, arguments in _plain_calls(torch.device(device), dtype):
            table = ops.available(op, *arguments)
            chosen = next(name for name, supported, _ in table if supported)
            yield {"op": op, "dtype": str(dtype).removeprefix("torch."), "device": device, "chosen": chosen, "implementations": table}


def _plain_calls(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, tuple[torch.Tensor | None, ...]]]:
    import torch

    rows = torch.zeros(8, 64, device=device, dtype=dtype)
    heads = torch.zeros(8, 2, 64, device=device, dtype=dtype)
    offsets = torch.tensor([0, 3, 8], device=device)
    square = torch.zeros(64, 64, device=device, dtype=dtype)
    for op in ("jagged_attention", "gdpa", "block_attention", "norm_gdpa"):
        yield op, (heads, heads, heads, offsets)
    yield "norm", (rows,)
    yield "norm_linear", (rows, square)
    yield "linear_norm", (rows, square)
    yield "mlp", (rows, square, None, square, None)

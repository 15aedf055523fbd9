"""One page that compares all models on all sets, from the results stored beside it; trains nothing.

python docs/benchmarks/quality_page.py        # writes docs/benchmarks/quality.md
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
HISTORY = (
    (
        "ml-1m",
        "MovieLens-1M, next item, all 3,416 items ranked",
        "The file has no clock times, so no model has a time bias; HSTU's published ones have. `hstu` has four layers, where HSTU has two "
        "and HSTU-large eight. The user's newest 200 items are left out, for `sasrec gbce`, as published, all that the user had.",
    ),
    (
        "s3rec",
        "Amazon, Yelp and LastFM 5-core, next item, all items ranked",
        "Items that the user had are left out; the original scores them 0.",
    ),
)
LABELLED = {
    "popneg": "MovieLens-1M: the user's next film, or one drawn by popularity?",
    "popneg-lengths": "The same, by how much of the history is read",
    "ctr": "MovieLens-1M: will the user rate the film 4 or more?",
    "planted": "The quick start's log, whose truth is known",
}
PRECISION = {
    "popneg": "ml-1m-popneg, gem, test split",
    "popneg-din": "ml-1m-popneg, DIN, test split",
    "planted": "planted log",
    "ctr": "ml-1m-ctr, test split",
}


INTRODUCTION = (
    "Mean over the seeds (lowest-highest); for one seed, ± the standard error over users. Numbers of others in italics were published "
    "with the same protocol or measured on the same files; they were not made here."
)


class Runs:
    """Numbers the commands in the order of their first mention."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def number(self, command: str, device: str, versions: Mapping[str, str], commit: str | None) -> int:
        told = ", ".join(f"{k} {v}" for k, v in versions.items())
        line = f"`{command}` on {device}; {told}" + (f"; commit {commit}" if commit else "")
        if line not in self.lines:
            self.lines.append(line)
        return self.lines.index(line) + 1


def main() -> None:
    (HERE / "quality.md").write_text(page(HERE))


def page(folder: Path) -> str:
    """The Markdown, from the JSON files in ``folder``; sets without a file are left out."""
    runs, lines = Runs(), ["# Quality: all models on all sets", "", INTRODUCTION, ""]
    for name, title, note in HISTORY:
        if (found := _read(folder / f"retrieval-{name}.json")) is not None:
            lines += [f"## {title}", "", note, "", *_ranked(found, runs), ""]
    for name, title in LABELLED.items():
        if (found := _read(folder / f"{name}.json")) is not None:
            lines += [f"## {title}", "", *_labelled(found, runs), ""]
    parity = {title: found for name, title in PRECISION.items() if (found := _read(folder / f"precision-ne-{name}.json")) is not None}
    if parity:
        lines += ["## Precision: beside bf16, the same seeds and batches", "", *_parity(parity, runs), ""]
    lines += ["## Runs", "", *(f"{i}. {line}" for i, line in enumerate(runs.lines, 1))]
    return "\n".join(lines) + "\n"


def _read(path: Path) -> dict[str, Any] | None:
    found: dict[str, Any] | None = json.loads(path.read_text()) if path.is_file() else None
    return found


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(head)} |", "|" + "---|" * len(head), *(f"| {' | '.join(row)} |" for row in rows)]


def _spread(values: Sequence[float], error: float | None = None) -> str:
    if len(values) == 1:
        return f"{values[0]:.4f}" + ("" if error is None else f" ± {error:.4f}")
    return f"{statistics.mean(values):.4f} ({min(values):.4f}-{max(values):.4f})"


def _ranked(found: Mapping[str, Any], runs: Runs) -> list[str]:
    rows: list[list[str]] = []
    told: set[tuple[str, str]] = set()
    for name in dict.fromkeys(run["row"] for run in found["runs"]):
        model, _, data = name.partition(" ") if found["suite"] == "retrieval-s3rec" else (name, "", "")
        mine = [run for run in found["runs"] if run["row"] == name]
        cells = [_spread([run["test"][m] for run in mine], mine[0]["standard_error"][m]) for m in ("hr@10", "ndcg@10")]
        seeds = ", ".join(str(run["seed"]) for run in mine)
        places = sorted({runs.number(run["command"], run["device"], run["versions"], run["commit"]) for run in mine})
        rows.append([data.replace("_", " "), model, *cells, seeds, ", ".join(map(str, places))])
        for who, (hr, ndcg) in found["published"][name].items():
            if (data, who) not in told:
                told.add((data, who))
                rows.append([data.replace("_", " "), f"*{who}*", f"*{hr:.4f}*", f"*{ndcg:.4f}*", "", ""])
    sets = list(dict.fromkeys(row[0] for row in rows))
    rows.sort(key=lambda row: sets.index(row[0]))
    head = ["set", "model", "HR@10", "NDCG@10", "seeds", "run"]
    return _table(head, rows) if any(row[0] for row in rows) else _table(head[1:], [row[1:] for row in rows])


def _labelled(found: Mapping[str, Any], runs: Runs) -> list[str]:
    place = runs.number(found["command"], found["device"], found["versions"], found.get("commit"))
    keys = [k for k in ("auc", "ne", "explained") if any(k in row for row in found["test"].values())]
    rows = [[name, *(_spread(row[k]) if k in row else "" for k in keys)] for name, row in found["test"].items()]
    rows += [[f"*{name}*", f"*{_spread(values)}*", *[""] * (len(keys) - 1)] for name, values in found["peers_auc"].items()]
    names = {"auc": "AUC", "ne": "NE", "explained": "explained, (1 - NE) / (1 - best NE)"}
    lines = _table(["model", *(names[k] for k in keys)], rows)
    if found["auc_differences_95"]:
        told = []
        for pair, (mean, low, high) in found["auc_differences_95"].items():
            a, b = (found["test"][name]["auc"] for name in pair.split(" - ", 1))
            each = ", ".join(f"{x - y:+.4f}" for x, y in zip(a, b)) if len(a) == len(b) else ""
            told.append([pair, f"{mean:+.4f}", f"{low:+.4f} to {high:+.4f}", each])
        lines += ["", *_table(["difference in AUC", "mean", "95 % interval, paired over users", "by seed"], told)]
    return [*lines, "", f"Test split; seeds {', '.join(map(str, found['seeds']))}; run {place}."]


def _parity(parity: Mapping[str, Mapping[str, Any]], runs: Runs) -> list[str]:
    rows = []
    for title, found in parity.items():
        place = runs.number(found["command"], found["device"], {"torch": found["torch"]}, found.get("commit"))
        for r in found["results"]:
            cells = []
            for ratio, low, high in (("ratio", "low", "high"), ("auc_ratio", "auc_low", "auc_high")):
                told = [f"{100 * (r[key] - 1):+.3f}" for key in (ratio, low, high)] if ratio in r else None
                cells.append("" if told is None else f"{told[0]} % ({told[1]} to {told[2]})")
            rows.append([title, r["variant"], *cells, f"{r['rows']:,} ({r['groups']:,})", str(len(r["seeds"])), str(place)])
    return _table(["set", "recipe", "NE ratio - 1 (95 %)", "AUC ratio - 1 (95 %)", "rows (users)", "seeds", "run"], rows)


if __name__ == "__main__":
    main()

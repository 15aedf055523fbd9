"""Quality on public and planted data: trains each model with several seeds, predicts the test split, writes means, spreads and intervals.

    python docs/benchmarks/quality.py popneg         --data ../shared/data/ml-1m-popneg --out docs/benchmarks
    python docs/benchmarks/quality.py popneg-lengths --data ../shared/data/ml-1m-popneg --out docs/benchmarks
    python docs/benchmarks/quality.py ctr            --data ../shared/data/ml-1m-ctr    --out docs/benchmarks \
        --peer "FuxiCTR DCNv2, pooled history=runs/peer/dcnv2-*.csv"        # predictions that ctr_peer.py made
    python docs/benchmarks/quality.py planted --out docs/benchmarks

Models are chosen on the validation split (`restore_best`); the test split is read once, at the end. ``--jobs`` runs that many trainings
side by side, spread over the visible GPUs. A training whose predictions are in its folder below ``--work`` is not done again. Intervals are
percentiles of a paired bootstrap over users. Needs gem-core, gem-data, pyarrow.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import torch

CONFIGS = Path(__file__).parent.parent / "examples" / "configs"
NO_SEQUENCE = ["--set", "model.sequence=false"]
LONGEST = "features.sequences.history.max_length"
SUITES: dict[str, dict[str, list[str]]] = {
    "popneg": {
        "gem": [str(CONFIGS / "ml-1m-popneg-gem.toml")],
        "din": [str(CONFIGS / "ml-1m-popneg-din.toml")],
        "gem without sequence tower": [str(CONFIGS / "ml-1m-popneg-gem.toml"), *NO_SEQUENCE],
    },
    "popneg-lengths": {
        "gem all events": [str(CONFIGS / "ml-1m-popneg-gem.toml"), "--set", f"{LONGEST}=2400"],
        "gem newest 1000": [str(CONFIGS / "ml-1m-popneg-gem.toml"), "--set", f"{LONGEST}=1000"],
        "gem newest 200": [str(CONFIGS / "ml-1m-popneg-gem.toml"), "--set", f"{LONGEST}=200"],
        "gem newest 50": [str(CONFIGS / "ml-1m-popneg-gem.toml"), "--set", f"{LONGEST}=50"],
        "din newest 50": [str(CONFIGS / "ml-1m-popneg-din.toml")],
    },
    "ctr": {"gem": [str(CONFIGS / "movielens-ctr.toml")]},
    "planted": {"gem tiny": [], "gem tiny without sequence tower": NO_SEQUENCE},
}
PEERS: dict[str, dict[str, list[float]]] = {
    "popneg": {"FuxiCTR DCNv2, no history": [0.6155, 0.6147], "FuxiCTR DCNv2, pooled history": [0.6209], "FuxiCTR DIN": [0.6913]},
    "popneg-lengths": {"FuxiCTR DIN, at most 50": [0.6913]},
    "ctr": {
        "FuxiCTR DIN": [0.7250, 0.7257, 0.7261],
        "FuxiCTR BST": [0.7338, 0.7353],
        "FuxiCTR DCNv2, ids alone": [0.7321, 0.7334, 0.7334],
        "FuxiCTR DCNv2, pooled history": [0.7324, 0.7341, 0.7352],
        "MF (published)": [0.6482],
        "SASRec (published)": [0.7078],
    },
}
"""Test AUC of others on the same files, a number a seed: measured with embeddings of 32, Adam 1e-3, at most 50 events; their predictions
are not at hand, so they carry no paired interval, which `--peer` gives."""
BOOTSTRAP = 2000
PREDICTED = "test.csv"
PREDICTING = Lock()
"""Kernels are chosen for the process, so one run predicts at a time."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", choices=sorted(SUITES))
    parser.add_argument("--data", type=Path, help="folder of the data set's Parquet files")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--models", help="comma-separated subset")
    parser.add_argument("--set", action="append", default=[], dest="overrides", help="KEY=VALUE for every training")
    parser.add_argument(
        "--peer", action="append", default=[], help="NAME=FILES: others' predictions of the test split, CSV of p, label, user"
    )
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--work", type=Path, default=Path("runs/quality"), help="folder of the run folders")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    variants = {name: SUITES[args.suite][name] for name in (args.models.split(",") if args.models else SUITES[args.suite])}
    shared = [f"data.parquet.root={args.data}"] if args.data else []
    overrides = [word for item in (*shared, *args.overrides) for word in ("--set", item)]
    jobs = [(name, int(seed), [*variants[name], *overrides]) for seed in args.seeds.split(",") for name in variants]
    with ThreadPoolExecutor(args.jobs) as pool:
        folders = dict(zip([(n, s) for n, s, _ in jobs], pool.map(lambda at: train(args, at[0], *at[1]), enumerate(jobs))))
    report(args, variants, {key: predicted(folder / PREDICTED) for key, folder in folders.items()}, folders)


def train(args: argparse.Namespace, index: int, name: str, seed: int, words: list[str]) -> Path:
    """One training in a process of its own, and its predictions of the test split; its run folder."""
    run = f"{args.suite}-{name.replace(' ', '-')}-{seed}"
    folder: Path = args.work / run
    if (folder / PREDICTED).is_file():
        return folder
    began = time.monotonic()
    environment = dict(os.environ)
    captured = []
    if gpus := torch.cuda.device_count():
        captured = ["--set", "train.capture=true"] if name.startswith("gem") else []
        visible = environment.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus)))).split(",")
        environment["CUDA_VISIBLE_DEVICES"] = visible[index % gpus]
    command = [sys.executable, "-c", "import sys; from gem_core.cli import main; sys.exit(main())", "train", "--overwrite"]
    command += [*captured, *words, "--set", f"run.seed={seed}", "--set", f"run.name={run}", "--set", f"run.dir={args.work}"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    print(f"{run}: exit {done.returncode}, {time.monotonic() - began:.0f} s; {done.stdout.strip().splitlines()[-1]}", flush=True)
    if done.returncode:
        raise SystemExit(done.stdout)
    with PREDICTING:
        columns = predict(folder)
    np.savetxt(folder / PREDICTED, np.stack(list(columns.values()), 1), fmt="%.9g", delimiter=",", header=",".join(columns), comments="")
    return folder


def predict(folder: Path) -> dict[str, np.ndarray]:
    """Probability, label and user of each test sample, by the run's newest checkpoint (the best one, with `restore_best`)."""
    from gem_core.train.predict import predictor

    columns: dict[str, list[np.ndarray]] = {}
    with predictor(folder) as model:
        for batch, logits in model.source("test"):
            row = {"p": torch.sigmoid(logits[:, 0].double()), "label": batch.labels[:, 0], "user": batch.columns["user_id"]}
            if "true_probability.ctr" in batch.columns:
                row["true"] = batch.columns["true_probability.ctr"]
            for key, value in row.items():
                columns.setdefault(key, []).append(value.numpy().astype(float))
    return {key: np.concatenate(parts) for key, parts in columns.items()}


def predicted(path: Path) -> dict[str, np.ndarray]:
    """Columns of the predictions in ``path``."""
    names = path.read_text().split("\n", 1)[0].split(",")
    return dict(zip(names, np.loadtxt(path, delimiter=",", skiprows=1).T))


def peer_predictions(given: str, like: dict[str, np.ndarray]) -> tuple[str, list[dict[str, np.ndarray]]]:
    """Name and predictions, one a file, of a ``--peer``; they must be of the samples of ``like``, in their order."""
    name, _, files = given.rpartition("=")
    found = [predicted(path) for path in sorted(Path(files).parent.glob(Path(files).name))]
    if not found or not all(np.array_equal(one[key], like[key]) for one in found for key in ("label", "user")):
        raise SystemExit(f"{files}: no predictions, or not of the test split in its order")
    return name, found


def auc(label: np.ndarray, score: np.ndarray, weight: np.ndarray | None = None) -> float:
    """Area under the ROC curve with ties counted half, samples weighted."""
    weight = np.ones_like(score) if weight is None else weight
    values, at = np.unique(score, return_inverse=True)
    positive = np.bincount(at, weight * (label > 0.5), len(values))
    negative = np.bincount(at, weight * (label < 0.5), len(values))
    below = np.cumsum(negative) - negative
    return float((positive * (below + negative / 2)).sum() / (positive.sum() * negative.sum()))


def normalized_entropy(label: np.ndarray, p: np.ndarray) -> float:
    p, base = np.clip(p, 1e-12, 1 - 1e-12), label.mean()
    loss = -(label * np.log(p) + (1 - label) * np.log1p(-p)).mean()
    return float(loss / -(base * np.log(base) + (1 - base) * np.log1p(-base)))


def paired(user: np.ndarray, label: np.ndarray, a: list[np.ndarray], b: list[np.ndarray]) -> tuple[float, float, float]:
    """Mean AUC of the predictions ``a`` minus that of ``b``, with the 95 % interval of a bootstrap over users (seed 0)."""
    rng = np.random.default_rng(0)
    _, at = np.unique(user, return_inverse=True)
    users = at.max() + 1
    draws = []
    for _ in range(BOOTSTRAP // max(len(a), len(b))):
        weight = np.bincount(rng.integers(0, users, users), minlength=users)[at].astype(float)
        draws.append(np.mean([auc(label, s, weight) for s in a]) - np.mean([auc(label, s, weight) for s in b]))
    low, high = np.quantile(draws, [0.025, 0.975])
    return float(np.mean([auc(label, s) for s in a]) - np.mean([auc(label, s) for s in b])), float(low), float(high)


def item_and_user_means(data: Path, smoothing: float = 5.0) -> np.ndarray:
    """The trivial predictor of ml-1m-ctr: smoothed mean label of the item plus that of the user, from the training split."""
    import pyarrow.parquet as pq

    train_, test = (pq.read_table(data / f"{s}.parquet", columns=["user_id", "item_id", "label"]).to_pydict() for s in ("train", "test"))
    label = np.array(train_["label"], float)
    score = np.zeros(len(test["label"]))
    for key in ("user_id", "item_id"):
        names, at = np.unique(np.array(train_[key]), return_inverse=True)
        means = (np.bincount(at, label) + smoothing * label.mean()) / (np.bincount(at) + smoothing)
        known = dict(zip(names.tolist(), means.tolist()))
        score += np.array([known.get(value, label.mean()) for value in test[key]])
    return score


def logistic_regression() -> dict[str, np.ndarray]:
    """Logistic regression on all but the history of the quick start's log (one weight an id, AdamW, three epochs): its test split."""
    from gem_core.config import load_config, resolve
    from gem_core.train import quickstart_path
    from gem_core.train.build import build_source
    from gem_core.train.runtime import runtime

    resolved = resolve(load_config(quickstart_path(), []))
    torch.manual_seed(0)
    with runtime(resolved.config) as rt:
        source, test = build_source(resolved, "train", rt), build_source(resolved, "test", rt)
    features = resolved.config.features
    bags = torch.nn.ModuleDict({n: torch.nn.EmbeddingBag(features.rows_of(f"sparse.{n}"), 1, mode="sum") for n in features.sparse})
    dense = torch.nn.Linear(len(features.dense), 1)
    for bag in bags.values():
        torch.nn.init.zeros_(bag.weight)
    optimizer = torch.optim.AdamW([*bags.parameters(), *dense.parameters()], lr=3e-3, weight_decay=1e-4)

    def logits(batch: Any) -> torch.Tensor:
        out = dense(batch.dense)[:, 0]
        for name, bag in bags.items():
            ids = batch.sparse[name]
            out = out + bag(ids.values, ids.offsets[:-1])[:, 0]
        return out

    for _ in range(3):
        for batch in source:
            loss = torch.nn.functional.binary_cross_entropy_with_logits(logits(batch), batch.labels[:, 0])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    columns: dict[str, list[np.ndarray]] = {"p": [], "label": [], "true": []}
    with torch.no_grad():
        for batch in test:
            columns["p"].append(torch.sigmoid(logits(batch)).double().numpy())
            columns["label"].append(batch.labels[:, 0].double().numpy())
            columns["true"].append(batch.columns["true_probability.ctr"].double().numpy())
    return {key: np.concatenate(parts) for key, parts in columns.items()}


def report(args: argparse.Namespace, variants: dict[str, list[str]], predictions: dict[Any, dict[str, np.ndarray]], folders: Any) -> None:
    """Write ``<suite>.json`` and ``<suite>.md``."""
    seeds = sorted({seed for _, seed in predictions})
    rows: dict[str, dict[str, Any]] = {}
    for name in variants:
        found = [predictions[name, seed] for seed in seeds]
        rows[name] = _row(found)
        rows[name]["parameters"] = json.loads((folders[name, seeds[0]] / "run.json").read_text())["parameters"]
        rows[name]["wall_s"] = [json.loads((folders[name, seed] / "summary.json").read_text())["wall_s"] for seed in seeds]
    intervals = {}
    names = list(variants)
    first = predictions[names[0], seeds[0]]
    scores = {name: [predictions[name, seed]["p"] for seed in seeds] for name in names}
    if args.suite == "ctr":
        scores["item mean + user mean"] = [item_and_user_means(args.data)]
        rows["item mean + user mean"] = {"auc": [auc(first["label"], scores["item mean + user mean"][0])]}
    for given in args.peer:
        name, found = peer_predictions(given, first)
        scores[name], rows[name] = [one["p"] for one in found], _row(found)
    if args.suite == "planted":
        rows["logistic regression, no history"] = _row([logistic_regression()])
    else:
        for other in list(scores)[1:]:
            intervals[f"{names[0]} - {other}"] = paired(first["user"], first["label"], scores[names[0]], scores[other])
    header = json.loads((folders[names[0], seeds[0]] / "run.json").read_text())
    result = {
        "suite": args.suite,
        "command": "python docs/benchmarks/quality.py " + shlex.join(sys.argv[1:]),
        "device": header["device"],
        "commit": header["commit"] or os.environ.get("GEM_COMMIT"),
        "machine": platform.machine(),
        "versions": header["versions"],
        "seeds": seeds,
        "configurations": {n: [Path(w).name if w.endswith(".toml") else w for w in v] for n, v in variants.items()},
        "test": rows,
        "auc_differences_95": intervals,
        "peers_auc": PEERS.get(args.suite, {}),
    }
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"{args.suite}.json").write_text(json.dumps(result, indent=1) + "\n")
    (args.out / f"{args.suite}.md").write_text(markdown(result))
    print(markdown(result))


def _row(found: list[dict[str, np.ndarray]]) -> dict[str, Any]:
    row: dict[str, Any] = {
        "auc": [auc(d["label"], d["p"]) for d in found],
        "ne": [normalized_entropy(d["label"], d["p"]) for d in found],
    }
    if "true" in found[0]:
        row["bayes_ne"] = [normalized_entropy(d["label"], d["true"]) for d in found]
        row["explained"] = [(1 - a) / (1 - b) for a, b in zip(row["ne"], row["bayes_ne"])]
    return row


def markdown(result: dict[str, Any]) -> str:
    keys = [k for k in ("auc", "ne", "bayes_ne", "explained") if any(k in row for row in result["test"].values())]
    lines = [f"# {result['suite']}: test split", "", f"`{result['command']}`", ""]
    lines += [f"{result['device']}; " + ", ".join(f"{k} {v}" for k, v in result["versions"].items()) + f"; seeds {result['seeds']}", ""]
    lines += ["| model | " + " | ".join(keys) + " |", "|---|" + "---|" * len(keys)]
    for name, row in result["test"].items():
        cells = [f"{np.mean(row[k]):.4f} ({min(row[k]):.4f}-{max(row[k]):.4f})" if k in row else "" for k in keys]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines += ["", "Mean over the seeds, and (lowest-highest). `explained` is (1 - NE) / (1 - Bayes NE).", ""]
    if result["auc_differences_95"]:
        lines += ["| difference in AUC | mean | 95 % interval (paired over users) | by seed |", "|---|---|---|---|"]
        for pair, (mean, low, high) in result["auc_differences_95"].items():
            a, b = (result["test"][name]["auc"] for name in pair.split(" - ", 1))
            each = ", ".join(f"{x - y:+.4f}" for x, y in zip(a, b)) if len(a) == len(b) else ""
            lines.append(f"| {pair} | {mean:+.4f} | {low:+.4f} to {high:+.4f} | {each} |")
    if result["peers_auc"]:
        lines += ["", "| others on the same files | test AUC, one number a seed |", "|---|---|"]
        lines += [f"| {name} | {', '.join(f'{value:.4f}' for value in values)} |" for name, values in result["peers_auc"].items()]
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    main()

"""Next-item retrieval on public data: trains each model, ranks all items for every test user, writes the results beside published ones.

    python docs/benchmarks/retrieval.py ml-1m --data ../shared/data --out docs/benchmarks
    python docs/benchmarks/retrieval.py s3rec --data ../shared/data --seeds 0 --out docs/benchmarks
    python docs/benchmarks/retrieval.py tune --data ../shared/data --seeds 0 --out runs/tune        # variants, to be compared on valid

``ml-1m`` without a validation split trains the stated number of epochs on all but the last item and evaluates once; the others are chosen
on the second-last item. ``--jobs`` runs that many trainings side by side, spread over the visible GPUs, where steps are captured; the
tables are written again after each, and rows that were not trained again stay. Files under ``--data``: ``ml-1m/ml-1m.txt.gz``,
``s3rec/*.txt``. Needs gem-core, gem-kernels, gem-data and pyarrow.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import platform
import shlex
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

CONFIGS = Path(__file__).parent.parent / "examples" / "configs"
METRICS = ("hr@10", "ndcg@10", "hr@50", "ndcg@50", "mrr")
S3REC = {"Beauty": 12_101, "Sports_and_Outdoors": 18_357, "Toys_and_Games": 11_924, "Yelp": 20_033, "LastFM": 3_646}
"""Set -> highest item id."""


@dataclass(frozen=True)
class Variant:
    """A row of a table: configuration file, data set below ``--data``, who is validated on, overrides, and published (HR@10, NDCG@10)."""

    config: str
    data: str
    valid: str
    published: dict[str, tuple[float, float]]
    overrides: tuple[str, ...] = ()
    protocol: str = ""


MOVIES = "ml-1m/ml-1m.txt.gz"
LEAVE_ONE = "trained on all but the last item, fixed epochs; the user's newest 200 items left out"
GSASREC = "chosen on the second-last item of 512 users; all items that the user had left out"
LEAVE_TWO = "chosen on the second-last item; all items that the user had left out"
PUBLISHED = {
    "Beauty": ((0.0152, 0.0068), (0.0605, 0.0318), (0.0647, 0.0327)),
    "Sports_and_Outdoors": ((0.0094, 0.0053), (0.0350, 0.0192), (0.0385, 0.0204)),
    "Toys_and_Games": ((0.0113, 0.0061), (0.0675, 0.0374), (0.0700, 0.0376)),
    "Yelp": ((0.0099, 0.0051), (0.0274, 0.0136), (0.0341, 0.0168)),
    "LastFM": ((0.0440, 0.0203), (0.0688, 0.0390), (0.0743, 0.0427)),
}


def _s3rec(name: str, model: str) -> Variant:
    rows = [f"features.tables.item.rows={S3REC[name] + 1}"]
    if name == "LastFM" and model == "gem":  # 1,090 users are five steps an epoch
        rows += ["train.epochs=400", "eval.every=100"]
    if name == "Sports_and_Outdoors" and model == "sasrec":  # at a constant rate what 25 epochs add is less than an evaluation's noise
        rows += ["eval.patience=20", "train.epochs=80", 'train.schedule.decay="cosine"', "train.schedule.final=0.05"]
    if name in ("Sports_and_Outdoors", "Yelp") and model == "gem":  # Beauty, with fewer steps an epoch, is at its best after 24
        rows += ["train.epochs=30", "eval.every=280"]
    published = dict(zip(("PopRec", "SASRec", "S3-Rec"), PUBLISHED[name]))
    return Variant(f"s3rec-{model}.toml", f"s3rec/{name}.txt", "all", published, tuple(rows), LEAVE_TWO)


SUITES: dict[str, dict[str, Variant]] = {
    "ml-1m": {
        "gem": Variant("ml-1m-next-gem.toml", MOVIES, "none", {"HSTU": (0.3097, 0.1720), "HSTU-large": (0.3294, 0.1893)}, (), LEAVE_ONE),
        "hstu": Variant("ml-1m-next-hstu.toml", MOVIES, "none", {"HSTU, with times": (0.3097, 0.1720)}, (), LEAVE_ONE),
        "sasrec": Variant("ml-1m-next-sasrec.toml", MOVIES, "none", {"SASRec": (0.2853, 0.1603)}, (), LEAVE_ONE),
        "sasrec gbce": Variant("ml-1m-gsasrec.toml", MOVIES, "512", {"gSASRec": (0.3003, 0.1726)}, (), GSASREC),
    },
    "tune": {
        name: Variant(f"ml-1m-next-{name.split()[0]}.toml", MOVIES, "all", {}, overrides, LEAVE_TWO)
        for name, overrides in {
            "gem": (),
            "gem dropout 0.2": ("model.sequence.dropout=0.2", "model.embedding_dropout=0.2"),
            "gem two layers": ("model.layers=2",),
            "gem width 64": ("model.sequence.dim=64", "model.embedding_dim=64", "model.sequence.ffn=256", "model.sequence.event.scale=8"),
            "gem products": ("model.retrieval.normalize=false", "model.retrieval.temperature=1.0"),
            "hstu": (),
            "hstu from the newest": ('model.count_from="newest"',),
            "hstu two layers": ("model.layers=2",),
        }.items()
    },
    "s3rec": {f"{model} {name}": _s3rec(name, model) for name in S3REC for model in ("sasrec", "gem")},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suites", nargs="+", choices=sorted(SUITES))
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--seeds", default="0,1,2", help="of ml-1m; the other suites are trained with the first of them")
    parser.add_argument("--models", help='comma-separated subset of the rows, done in this order; "gem *" stands for all rows of gem')
    parser.add_argument("--set", action="append", default=[], dest="overrides", help="KEY=VALUE for every training")
    parser.add_argument("--valid", choices=("all", "none"), help="hold the second-last items of all users out in every suite")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--work", type=Path, default=Path("runs/retrieval"), help="folder of converted data and run folders")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    jobs = [job_of(args, *planned_job) for planned_job in planned(args)]
    results: list[dict[str, Any]] = []
    os.environ.setdefault("OMP_NUM_THREADS", "2")
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.jobs, context, initializer=place, initargs=(context.Value("i", 0),)) as pool:
        for done in as_completed([pool.submit(apart, job) for job in jobs]):
            results.append(done.result())
            print(told(results[-1]), flush=True)
            for suite in args.suites:
                report(args, suite, [r for r in results if r["suite"] == suite])
    if any("error" in r for r in results):
        raise SystemExit("\n".join(f"{r['run']}: {r['error']}" for r in results if "error" in r))


def planned(args: argparse.Namespace) -> list[tuple[str, str, int]]:
    """(suite, row, seed), seed by seed, in the order of the suites and models given."""
    found = []
    for i, seed in enumerate(args.seeds.split(",")):
        for suite in args.suites:
            words = args.models.split(",") if args.models else [""]
            rows = [
                n for w in words for n in SUITES[suite] if n == w or (w in ("", "gem *", "sasrec *", "hstu *") and n.startswith(w[:-2]))
            ]
            found += [(suite, name, int(seed)) for name in dict.fromkeys(rows) if suite == "ml-1m" or i == 0]
    return found


def converted(variant: Variant, args: argparse.Namespace) -> Path:
    """The folder of the variant's Parquet files, made if it is not there."""
    from gem_data.sequences import convert

    valid = args.valid or variant.valid
    folder = args.work / "data" / f"{Path(variant.data).name.split('.')[0]}-{valid}"
    if not (folder / "config.toml").is_file():
        convert(args.data / variant.data, folder, valid=valid)
    return folder


def job_of(args: argparse.Namespace, suite: str, name: str, seed: int) -> dict[str, Any]:
    """What a training needs, and the beginning of its record."""
    variant = SUITES[suite][name]
    run = f"{suite}-{name.replace(' ', '-')}-{seed}"
    folder = converted(variant, args)
    overrides = [f"data.parquet.root={folder}", f"run.seed={seed}", f"run.name={run}", f"run.dir={args.work}", *variant.overrides]
    if (folder / "valid.parquet").is_file():
        overrides.append('data.parquet.eval=["valid.parquet"]')
    return {
        "record": {
            "suite": suite, "row": name, "seed": seed, "run": run, "config": variant.config,
            "overrides": [*variant.overrides, *args.overrides],
        },
        "config": str(CONFIGS / variant.config),
        "given": overrides,
        "overrides": args.overrides,
        "folder": str(args.work / run),
        "split": "eval" if suite == "tune" else "test",
    }  # fmt: skip


def place(counter: Any) -> None:
    """Give this worker one of the visible GPUs in turn."""
    import torch

    with counter.get_lock():
        index, counter.value = counter.value, counter.value + 1
    if gpus := torch.cuda.device_count():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus)))).split(",")
        os.environ["CUDA_VISIBLE_DEVICES"] = visible[index % gpus]


def apart(job: dict[str, Any]) -> dict[str, Any]:
    """One training and its test; a failure becomes a record too."""
    began = time.monotonic()
    try:
        return {**job["record"], **train(job), "with_start_s": time.monotonic() - began}
    except (Exception, SystemExit) as error:
        return {**job["record"], "error": f"{type(error).__name__} after {time.monotonic() - began:.0f} s: {error}"}


def told(record: dict[str, Any]) -> str:
    """A line of a training that has ended."""
    if "error" in record:
        return f"{record['run']}: {record['error']}"
    test, steps = record["test"], ", ".join(f"{k} {v:.2f}" for k, v in record["step_ms"].items())
    return (
        f"{record['run']}: HR@10 {test['hr@10']:.4f} NDCG@10 {test['ndcg@10']:.4f}, {record['steps']} steps ({record['status']}, best "
        f"{record['best_step']}), {record['wall_s']:.0f} s, with start {record['with_start_s']:.0f} s; ms a step: {steps}"
    )


def train(job: dict[str, Any]) -> dict[str, Any]:
    """Train, and evaluate the final (with ``restore_best`` the best) parameters, on the test split unless variants are compared."""
    import torch

    import gem_core.train
    from gem_core.config import load_config
    from gem_core.train.offline import evaluate_run

    captured = []
    if torch.cuda.is_available():
        gc.collect()  # what an earlier training in this process recorded
        torch.cuda.reset_peak_memory_stats()
        captured = ["train.capture=true"]
    config = load_config(Path(job["config"]), [*job["given"], *captured, *job["overrides"]])
    result = gem_core.train(config, run_dir=job["folder"], overwrite=True, quiet=True)
    if result.status == "interrupted":
        raise SystemExit(f"stopped at step {result.steps}")
    steps = [json.loads(line) for line in (Path(job["folder"]) / "metrics.jsonl").read_text().splitlines()]
    phases = [key for key in ("data_s", "captured_s", "forward_s", "backward_s", "optimizer_s") if steps[-1].get(key)]
    test = evaluate_run(job["folder"], split=job["split"]).results["next_item"]
    header = json.loads((Path(job["folder"]) / "run.json").read_text())
    evals = [json.loads(line) for line in (Path(job["folder"]) / "eval.jsonl").read_text().splitlines()]
    return {
        "test": {name: value.value for name, value in test.items()},
        "standard_error": {name: value.details["standard_error"] for name, value in test.items()},
        "evaluations": [{"step": e["step"], **{m: e["tasks"]["next_item"][m] for m in METRICS}} for e in evals],
        "status": result.status,
        "steps": result.steps,
        "best_step": result.summary["best_step"],
        "wall_s": result.summary["wall_s"],
        "step_ms": {key.removesuffix("_s"): 1e3 * float(np.median([s[key] for s in steps if key in s])) for key in phases},
        "peak_memory_bytes": result.summary["peak_memory_bytes"],
        **{key: header[key] for key in ("parameters", "device", "versions", "kernels")},
        "commit": header["commit"] or os.environ.get("GEM_COMMIT"),
    }


def report(args: argparse.Namespace, suite: str, results: list[dict[str, Any]]) -> None:
    """Write ``retrieval-<suite>.json`` and ``.md``: the trainings that have ended, and those of the file that were not done again."""
    command = "python docs/benchmarks/retrieval.py " + shlex.join(sys.argv[1:])
    ended = [{**r, "command": command, "machine": platform.machine()} for r in results if "test" in r]
    if not ended:
        return
    path = args.out / f"retrieval-{suite}.json"
    if path.is_file():
        again = {(r["row"], r["seed"]) for r in ended}
        ended += [r for r in json.loads(path.read_text())["runs"] if (r["row"], r["seed"]) not in again]
    ended.sort(key=lambda r: (list(SUITES[suite]).index(r["row"]), r["seed"]))
    rows = {name: [r for r in ended if r["row"] == name] for name in dict.fromkeys(r["row"] for r in ended)}
    record = {
        "suite": f"retrieval-{suite}",
        "published": {name: SUITES[suite][name].published for name in rows},
        "runs": [{k: v for k, v in r.items() if k != "suite"} for r in ended],
    }
    args.out.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
    path.with_suffix(".md").write_text(markdown(suite, record, rows))


def markdown(suite: str, record: dict[str, Any], rows: dict[str, list[dict[str, Any]]]) -> str:
    lines = [f"# Next item: {suite}", ""]
    made = list(dict.fromkeys((r["command"], r["device"], json.dumps(r["versions"]), r["commit"]) for r in record["runs"]))
    for i, (command, device, versions, commit) in enumerate(made, 1):
        told = ", ".join(f"{k} {v}" for k, v in json.loads(versions).items())
        lines += [f"{i}. `{command}`", f"   on {device}; {told}; commit {commit}"]
    lines += ["", "All items are ranked for every user but those that the protocol leaves out; equal scores count one half.", ""]
    if suite == "tune":
        lines += ["These are the second-last items of the users, which choose between variants; the last ones were not looked at.", ""]
    if suite == "ml-1m":
        lines += ["The file holds no clock times, so no model has a time bias; HSTU's published numbers have one.", ""]
    lines += [
        "| row | " + " | ".join(METRICS) + " | seeds | published HR@10 / NDCG@10 | protocol | run |",
        "|---|" + "---|" * (len(METRICS) + 4),
    ]
    for name, runs in rows.items():
        cells = []
        for metric in METRICS:
            values = [r["test"][metric] for r in runs]
            spread = f" ({min(values):.4f}-{max(values):.4f})" if len(values) > 1 else f" ± {runs[0]['standard_error'][metric]:.4f}"
            cells.append(f"{np.mean(values):.4f}{spread}")
        published = "; ".join(f"{who} {hr:.4f} / {ndcg:.4f}" for who, (hr, ndcg) in record["published"][name].items())
        places = {made.index((r["command"], r["device"], json.dumps(r["versions"]), r["commit"])) + 1 for r in runs}
        cells += [", ".join(str(r["seed"]) for r in runs), published, SUITES[suite][name].protocol, ", ".join(map(str, sorted(places)))]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines += ["", "Mean over the seeds and (lowest-highest); one seed: ± standard error over users.", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    main()

"""Training of a preset on several GPUs: speed of every arrangement, weak scaling, and equality with one GPU.

    python docs/benchmarks/parallel_train.py speed --out OUT                 # rows of four GPUs, one row in processes of its own
    python docs/benchmarks/parallel_train.py equal --out OUT --steps 200     # per-step losses of the same global batches
    python docs/benchmarks/parallel_train.py ne --out OUT --steps 300        # held-out NE on the planted log, an arrangement a row

Every row is printed and written as soon as it is known; a row that fails is recorded with its error.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from gem_core.bench import ladder
from gem_core.bench.ladder import Row
from gem_core.hookspecs import LadderSpec

TORCHREC_1D = ("parallel.sparse=torchrec",)
TORCHREC_2D = ("parallel.sparse=torchrec-2d",)
TORCHREC_FULL = ("parallel.sparse=torchrec-2d", "parallel.torchrec-2d.fully_sharded=true")
GEM_2D = ("parallel.sparse=gem-2d",)
TOUCHED = ("parallel.sparse=gem-2d", "parallel.gem-2d.exchange=touched")


def rows(gpus: int, gathered: str = "fp32") -> list[Row]:
    """Arrangements of ``gpus`` processes, the single GPU first; sharded parameters are gathered in ``gathered``."""
    half = gpus // 2
    flat, two = (f"parallel.model={gpus}",), (f"parallel.model={half}", "parallel.replica=2")
    fsdp = ("parallel.dense=fsdp", f"parallel.fsdp.param_dtype={gathered}")
    hsdp = ("parallel.dense=hsdp", "parallel.replicate=2", f"parallel.hsdp.param_dtype={gathered}")
    experts = (*fsdp, "parallel.expert=2")
    return [
        Row("1 GPU", ("parallel.sparse=fbgemm",)),
        Row("1D: DDP, TorchRec", ("parallel.dense=ddp", *TORCHREC_1D, *flat), gpus=gpus),
        Row("1D: FSDP, TorchRec", (*fsdp, *TORCHREC_1D, *flat), gpus=gpus),
        Row("2D: HSDP, TorchRec 2D", (*hsdp, *TORCHREC_2D, *two), gpus=gpus),
        Row("fully sharded: TorchRec", (*hsdp, *TORCHREC_FULL, *two), gpus=gpus),
        Row("fully sharded: whole", (*hsdp, *GEM_2D, *two), gpus=gpus),
        Row("fully sharded: touched", (*hsdp, *TOUCHED, *two), gpus=gpus),
        Row("EP 2: FSDP, TorchRec", (*experts, *TORCHREC_1D, *flat), gpus=gpus),
        Row("EP 2, fully sharded: touched", (*experts, *TOUCHED, *two), gpus=gpus),
        Row("2 GPUs: DDP, TorchRec", ("parallel.dense=ddp", *TORCHREC_1D, "parallel.model=2"), gpus=2),
    ]


def configuration(out: Path, args: argparse.Namespace, data: str) -> Path:
    path = out / f"{args.preset}-{args.stage}.toml"
    path.write_text(f'[data]\n{data}\n[model]\npreset = "{args.preset}"\n[precision]\nrecipe = "{args.recipe}"\n')
    return path


def speed(out: Path, args: argparse.Namespace) -> None:
    """Times of training steps; ``scaling`` is samples a second and GPU over those of one GPU."""
    config = configuration(out, args, f'source = "random"\n[data.random]\npreset = "{args.preset}"')
    gathered = "bf16" if args.recipe == "bf16" else "fp32"
    spec = LadderSpec("parallel", lambda config, devices: rows(args.gpus, gathered), profile=args.profile)
    ladder.climb(
        str(config), spec, rows=args.row, preset=args.preset, batch_size=args.batch, steps=args.steps, warmup=args.warmup,
        budget_s=args.budget, row_limit_s=args.row_limit, overrides=args.overrides, out=out, say=lambda line: print(line, flush=True),
    )  # fmt: skip


def equal(out: Path, args: argparse.Namespace) -> None:
    """Losses of each arrangement against those of the first row, or of ``--reference``, on the same batches in the same order."""
    config = configuration(out, args, f'source = "random"\n[data.random]\npreset = "{args.preset}"')
    chosen = [r for r in rows(args.gpus, "bf16" if args.recipe == "bf16" else "fp32") if not args.row or r.name in args.row]
    results: list[dict[str, Any]] = json.loads(args.reference.read_text())[:1] if args.reference else []
    began = time.monotonic()
    for row in chosen:
        left = args.budget - (time.monotonic() - began)
        words = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={row.gpus}", __file__]
        words += ["worker", str(config), "--steps", str(args.steps), "--batch", str(args.batch), "--out", str(out)]
        words += [w for o in (*args.overrides, *row.overrides) for w in ("--set", o)]
        record: dict[str, Any] = {"row": row.name, "gpus": row.gpus, "overrides": row.overrides}
        record |= {"error": "not started: the time is up"} if left < 20 else run(words, min(left, args.row_limit))
        if "losses" in record and results and "losses" in results[0]:
            off = [abs(a - b) / abs(b) for a, b in zip(record["losses"], results[0]["losses"])]
            record |= {"off_first_20": max(off[:20]), "off": max(off)}
        results.append(record)
        told = record.get("error") or f"{len(record['losses'])} steps, last loss {record['losses'][-1]:.6f}"
        told += f", off {record['off_first_20']:.2e} (20 steps), {record['off']:.2e}" if "off" in record else ""
        print(f"{row.name:30} {told}", flush=True)
        (out / f"equal-{args.preset}-{args.recipe}.json").write_text(json.dumps(results, indent=1) + "\n")


def ne(out: Path, args: argparse.Namespace) -> None:
    """`gemrec train` on the planted log; final held-out NE against that of the first arrangement."""
    steps = args.steps
    data = f'source = "synthetic"\n[data.synthetic]\nrows = {args.batch * args.gpus * steps}\neval_rows = 200000'
    config = configuration(out, args, data)
    results: list[dict[str, Any]] = []
    began = time.monotonic()
    for row in (r for r in rows(args.gpus) if r.gpus == args.gpus and (not args.row or r.name in args.row)):
        left = args.budget - (time.monotonic() - began)
        folder = Path(args.runs) / row.name.replace(" ", "-").replace(":", "").replace(",", "")
        settings = [*args.overrides, *row.overrides, f"data.batch_size={args.batch}", f"train.steps={steps}", "train.tensorboard=false"]
        command = "import sys; from gem_core.cli import main; sys.exit(main())"
        words = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={row.gpus}", "--no-python"]
        words += [sys.executable, "-c", command, "train", str(config), "--run-dir", str(folder), "--overwrite", "--quiet"]
        words += [w for s in settings for w in ("--set", s)]
        record: dict[str, Any] = {"row": row.name, "gpus": row.gpus, "overrides": row.overrides}
        record |= {"error": "not started: the time is up"} if left < 20 else run(words, min(left, args.row_limit), json_line=False)
        if "error" not in record:
            summary = json.loads((folder / "summary.json").read_text())
            record |= {"ne": {t: m["ne"] for t, m in summary["tasks"].items()}, "wall_s": summary["wall_s"], "steps": summary["steps"]}
            first = next((r for r in results if "ne" in r), record)
            record["ne_ratio"] = {t: v / first["ne"][t] - 1 for t, v in record["ne"].items()}
        results.append(record)
        told = record.get("error") or "  ".join(f"{t} NE {v:.5f} ({record['ne_ratio'][t]:+.3%})" for t, v in record["ne"].items())
        print(f"{row.name:30} {told}", flush=True)
        (out / f"ne-{args.preset}.json").write_text(json.dumps(results, indent=1) + "\n")


def run(words: list[str], limit: float, json_line: bool = True) -> dict[str, Any]:
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)
    try:
        output, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        output, _ = process.communicate()
        return {"error": f"stopped after {limit:.0f} s; last: {output.strip().splitlines()[-1:]}"}
    lines = output.strip().splitlines() or [""]
    if process.returncode:
        told = [x for x in lines if "rror" in x and "elastic" not in x and "ChildFailed" not in x]
        return {"error": (told or lines)[0][:400]}
    return json.loads(next(x for x in reversed(lines) if x.startswith("{"))) if json_line else {}


def worker(args: argparse.Namespace) -> None:
    """One process of `equal`: rank r of W takes the r-th of W parts of every global batch of ``args.batch`` samples."""
    import numpy as np

    from gem_core.config import load_config, resolve
    from gem_core.model.loss import batch_total
    from gem_core.ops import use_policy
    from gem_core.train.build import build_parts, build_source
    from gem_core.train.feed import Fed
    from gem_core.train.measure import Meter, peak
    from gem_core.train.runfolder import environment
    from gem_core.train.runtime import runtime
    from gem_core.train.step import Outcomes, TrainStep

    resolved = resolve(load_config(args.config, args.overrides))
    config = resolved.config
    with runtime(config) as rt, use_policy(config.kernels.default, config.kernels.ops):
        parts = build_parts(resolved, rt)
        step = TrainStep(parts, config, rt, Meter(rt.device, peak("", {"fp32"})))
        step.set_lr(1.0)
        outcomes, losses = Outcomes(rt.device), []
        source: Any = build_source(resolved, "train", rt)
        parts.module.train()
        share = args.batch // rt.world

        def fed(number: int) -> Fed:
            begin = number * args.batch + rt.rank * share
            batch = source.draw(np.arange(begin, begin + share, dtype=np.int64))
            return Fed(batch, batch.to(rt.device), float(batch_total(batch)), batch.tokens, None, {})

        current = fed(0)
        for number in range(args.steps):
            following = fed(number + 1)
            outcomes.push(number, step([current], False, following if step.looks_ahead else None), [current])
            losses += [o.loss / o.weight for o in outcomes.ready()]
            current = following
        losses += [o.loss / o.weight for o in outcomes.ready(all=True)]
        if rt.main:
            print(json.dumps({"losses": losses, "global_batch": args.batch, **environment(rt.device)}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=("speed", "equal", "ne", "worker"))
    parser.add_argument("config", nargs="?", type=Path, help="of worker")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--preset", default="base")
    parser.add_argument("--recipe", default="bf16")
    parser.add_argument("--gpus", type=int, default=4)
    parser.add_argument("--batch", type=int, default=512, help="samples a GPU; for equal: of all GPUs")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--row", action="append", default=[], help="only this one; may be repeated")
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="KEY=VALUE")
    parser.add_argument("--profile", action="store_true", help="speed: times of communication, from three more steps")
    parser.add_argument("--reference", type=Path, help="equal: result of an earlier call, whose first row the others are compared with")
    parser.add_argument("--budget", type=float, default=480.0, help="seconds for all rows")
    parser.add_argument("--row-limit", type=float, default=150.0, help="seconds for one row")
    parser.add_argument("--runs", default="/tmp/parallel-runs", help="run folders of ne")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.stage == "worker":
        worker(args)
    else:
        {"speed": speed, "equal": equal, "ne": ne}[args.stage](args.out, args)


if __name__ == "__main__":
    main()

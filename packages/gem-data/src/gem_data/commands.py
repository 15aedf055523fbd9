"""The ``gemrec data`` commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from gem_core.cli.groups import CommandGroups

Out = Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder to write; made if it is not there.", show_default=False)]


def register(app: CommandGroups) -> None:
    group = app.group("data")
    app.group("bench").command("data")(bench)
    group.command()(inspect)
    group.command("import")(import_log)
    group.command()(synth)
    group.command()(convert)
    group.command()(validate)
    group.command()(vocab)
    app.command()(predict)
    app.command()(distill)
    app.group("bench").command("predict")(bench_predict)


def inspect(
    path: Annotated[Path, typer.Argument(help="Parquet file or folder.", show_default=False)],
    label: Annotated[str | None, typer.Option(metavar="COLUMN", help="The label, where its name does not tell.")] = None,
    sample: Annotated[int, typer.Option(min=1, help="Rows to look at, spread over the files; ranges are always of all rows.")] = 100_000,
) -> None:
    """Propose a configuration for Parquet files: which column is what, with the statistics that say so.

    Example: gemrec data inspect logs/2024 > mine.toml && gemrec train mine.toml
    """
    from gem_data.inspect import propose

    print(propose(path, label=label, sample_rows=sample))


def import_log(
    paths: Annotated[
        list[Path], typer.Argument(metavar="LOG...", help="CSV, TSV, JSON lines or Parquet files, or folders of them.", show_default=False)
    ],
    out: Out,
    user: Annotated[str | None, typer.Option(metavar="COLUMN", help="Whose row it is: histories are made a user.")] = None,
    time: Annotated[str | None, typer.Option(metavar="COLUMN", help="When it was: timestamps, or whole numbers since 1970.")] = None,
    event: Annotated[
        list[str] | None,
        typer.Option(
            "--event", metavar="COLUMN", help="Column that a history lists; may be repeated. Must be known by the user's next row."
        ),
    ] = None,
    where: Annotated[
        str | None, typer.Option(metavar="FILTER", help="Rows that later histories hold, as in 'clicked == 1'; otherwise all.")
    ] = None,
    rows: Annotated[
        str | None,
        typer.Option(metavar="FILTER", help="Rows to write, with histories of all, as in \"ts >= '2025-10-12'\"; otherwise all."),
    ] = None,
    max_history: Annotated[int, typer.Option(min=1, help="Newest events kept of each history.")] = 512,
    text: Annotated[
        list[str] | None, typer.Option("--text", metavar="COLUMN", help="Column of a text file that is text, though it looks like numbers.")
    ] = None,
) -> None:
    """Write a flat log as Parquet, each row with its user's earlier events as lists: what gemrec data inspect takes from there.

    A row's history is what has a strictly earlier time. The log must fit into memory; larger ones get their lists where they are kept.

    Example: gemrec data import clicks.csv --user user_id --time ts --event item --event clicked --out logs

    Example: gemrec data import 2024/ --user user_id --time ts --event item --where 'clicked == 1' --out logs
    """
    from gem_data.flat import import_log

    options: dict[str, Any] = {"where": where, "rows": rows, "max_history": max_history, "text": text or ()}
    written, events = import_log(paths, out, user=user, time=time, events=event or (), **options)
    print(
        f"{out / 'log.parquet'}: {written:,} rows" + (f", histories of {events / max(1, written):,.1f} events on average" if user else "")
    )
    print(f"next: gemrec data inspect {out} > my.toml")


def synth(
    out: Out,
    rows: Annotated[int, typer.Option(min=1, help="Training samples.")] = 400_000,
    eval_rows: Annotated[int | None, typer.Option(min=1, help="Evaluation samples; a tenth of --rows if not given.")] = None,
    test_rows: Annotated[int | None, typer.Option(min=1, help="Test samples; as --eval-rows if not given.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Another seed is another log.")] = 7,
    users: Annotated[int, typer.Option(min=1, help="Users of the log.")] = 50_000,
    law: Annotated[str, typer.Option(help="Law of history lengths: lognormal, uniform, zipf or pareto.")] = "lognormal",
    mean: Annotated[float, typer.Option(min=0.5, help="Mean history length of the log-normal law.")] = 32.0,
    max_history: Annotated[int, typer.Option(min=1, help="Longest history.")] = 4096,
    days: Annotated[int, typer.Option(min=1, help="Days that the log spans.")] = 14,
    drift: Annotated[float, typer.Option(min=0, help="Radians a day by which the planted effects turn towards others.")] = 0.0,
    partitions: Annotated[
        int | None, typer.Option(min=2, help="Write the training samples as so many folders of equal time, to be followed.")
    ] = None,
) -> None:
    """Write the synthetic ads log as Parquet, with a configuration that trains on it.

    Example: gemrec data synth --rows 100000 --out logs && cd logs && gemrec train config.toml

    Example: gemrec data synth --rows 120000 --days 1 --partitions 24 --drift 3 --out hours && cd hours && gemrec train config.toml
    """
    from gem_core.errors import ConfigError
    from gem_core.sources.synthetic import SyntheticConfig
    from gem_data.synth import write_partitions, write_synthetic
    from gem_data.writer import unfinished

    laws = ("lognormal", "uniform", "zipf", "pareto")
    if law not in laws:
        raise ConfigError(f"there is no law {law!r}", where="--law", fix=f"use {', '.join(laws)}")
    length: dict[str, object] = {"law": law, "max": max_history}
    if law == "lognormal":
        length["mean"] = mean
    held = eval_rows or max(1, rows // 10)
    config = SyntheticConfig(
        rows=rows, eval_rows=held, test_rows=test_rows or held, seed=seed, users=users, length=length, days=days, drift=drift
    )
    with unfinished(out):
        counts = write_synthetic(out, config) if partitions is None else write_partitions(out, config, partitions)
    if partitions is not None:
        print(f"{out / 'log'}: {len(counts)} partitions, {sum(counts.values()):,} rows")
    else:
        for split, count in counts.items():
            print(f"{out / split}.parquet: {count:,} rows")
    print(f"{out / 'config.toml'}: gemrec train config.toml, in this folder")


def convert(
    form: Annotated[str, typer.Argument(help="What the data is: movielens, criteo, avazu, open-bandit or sequences.", show_default=False)],
    path: Annotated[Path, typer.Argument(help="Folder (or file) of the data as distributed.", show_default=False)],
    out: Out,
    positions: Annotated[int, typer.Option(min=1, help="Training samples a user, where the data is one sequence a user.")] = 10,
    max_history: Annotated[int, typer.Option(min=1, help="Newest events kept of each history, where the data is ratings.")] = 512,
    seed: Annotated[int, typer.Option(min=0, help="Seed of drawn positions and negatives.")] = 7,
    bad_lines: Annotated[
        str, typer.Option(help="error, or quarantine: count lines of a log that cannot be used, and keep them in bad_lines.tsv.")
    ] = "error",
    valid: Annotated[str, typer.Option(help="Sequences: whose second-last item is held out: all, none, or a number of users.")] = "all",
    min_length: Annotated[int, typer.Option(min=2, help="Sequences: users with fewer items are left out.")] = 3,
    attributes: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="Sequences: attributes of items (.json, Parquet) or users (Parquet).")
    ] = None,
) -> None:
    """Convert public data to Parquet with a configuration that trains on it. Converting again gives the same bytes.

    Example: gemrec data convert movielens ml-1m --out converted

    Example: gemrec data convert criteo kaggle/train.txt.gz --out criteo

    Example: gemrec data convert sequences Beauty.txt --attributes Beauty_item2attributes.json --out beauty
    """
    from gem_core.errors import ConfigError
    from gem_data import avazu, criteo, movielens, open_bandit, sequences
    from gem_data.writer import unfinished

    logs = {"criteo": criteo, "avazu": avazu, "open-bandit": open_bandit}
    known = ("movielens", *logs, "sequences")
    if form not in known:
        fix = f"use {', '.join(known)}; for other data see gemrec data import and inspect"
        raise ConfigError(f"there is no converter for {form!r}", where="FORM", fix=fix)
    with unfinished(out):
        if form == "movielens":
            made = movielens.convert(path, out, positions=positions, max_history=max_history, seed=seed)
        elif form in logs:
            made = logs[form].convert(path, out, bad_lines=bad_lines)
        else:
            found = sequences.convert(path, out, valid=valid, seed=seed, min_length=min_length, attributes=tuple(attributes or ()))
            made = found.rows
    if form == "sequences":
        print(f"{found.users:,} users, {found.items:,} items; {found.short:,} users with fewer than {min_length} items were left out")
        if found.padding:
            print(f"item 0 stands at the front of sequences only: {found.padding:,} were dropped as padding")
    for name, rows in made.items():
        print(f"{out / name}.parquet: {rows:,} rows")
    refused = out / "bad_lines.tsv"
    if refused.is_file():
        print(f"{refused}: {refused.read_bytes().count(10):,} lines refused")
    print(f"{out / 'config.toml'}: gemrec train config.toml, in this folder")


def bench(
    rows: Annotated[int, typer.Option(min=1, help="Rows of the generated file.")] = 200_000,
    repeats: Annotated[int, typer.Option(min=1, help="Times that each variant reads the file; the best counts.")] = 3,
    threads: Annotated[int, typer.Option(min=1, help="Threads that pyarrow decodes with, alone and below the reader.")] = 2,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    folder: Annotated[Path | None, typer.Option(help="Where the file is generated; the system's temporary folder if not given.")] = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Also write data.json and data.md there.")] = None,
) -> None:
    """Measure the Parquet reader against pyarrow alone and against a dataset that goes row by row.

    Example: gemrec bench data --rows 200000 --out docs/benchmarks
    """
    from gem_data.bench import run, table

    record = run(rows, repeats, threads, seed, folder)
    _tell(record, table(record), out, "data", "Parquet to batches")


def predict(
    run: Annotated[Path, typer.Argument(help="Run folder of gemrec train.", show_default=False)],
    data: Annotated[list[str], typer.Argument(metavar="INPUT...", help="Parquet files, folders, patterns or URLs.", show_default=False)],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="Parquet file to write.", show_default=False)],
    column: Annotated[
        list[str] | None, typer.Option("--column", metavar="NAME", help="Column of the input to write beside; may be repeated.")
    ] = None,
    logit: Annotated[bool, typer.Option("--logit", help="Write the logits too.")] = False,
    step: Annotated[int | None, typer.Option("--step", metavar="N", help="Checkpoint of this step; otherwise the newest.")] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the run's configuration.")
    ] = None,
) -> None:
    """Predict every row of Parquet files with a trained model, in the order of the rows. Labels are not needed; row filters do not apply.

    Writes the sample id, the columns asked for, and TASK_probability for each task.

    Example: gemrec predict runs/mine day-09.parquet --out predictions.parquet --column user_id
    """
    import time

    from gem_core.train.predict import predictor
    from gem_data.predict import write_predictions

    with predictor(run, overrides=overrides or (), step=step) as model:
        began = time.monotonic()
        done = write_predictions(model, data, out, columns=column or (), logits=logit)
        seconds = time.monotonic() - began
        print(f"{out}: {done.rows:,} rows, step {model.step}, {seconds:.1f} s ({done.rows / max(seconds, 1e-9):,.0f} rows/s)")
        if done.refused:
            print(f'{done.refused:,} rows have no prediction: a feature with policy = "quarantine" refused them')


def distill(
    teacher: Annotated[Path, typer.Argument(help="Run folder of the teacher.", show_default=False)],
    student: Annotated[Path, typer.Argument(help="TOML file of the student, on Parquet files.", show_default=False)],
    scores: Annotated[
        Path, typer.Option("--scores", metavar="DIR", help="Folder for the files with the teacher's columns.", show_default=False)
    ],
    run_dir: Annotated[
        Path | None, typer.Option("--run-dir", metavar="DIR", help="The student's run folder; otherwise run.dir/run.name.")
    ] = None,
    step: Annotated[
        int | None, typer.Option("--step", metavar="N", help="The teacher's checkpoint of this step; otherwise the newest.")
    ] = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the student's file.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Delete what the run folder holds.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print the result only.")] = False,
) -> None:
    """Train a student on labels and on a teacher's predictions: writes its training files with the predictions, then trains.

    [train.distill] of the student says how. Tasks of one name are taught; the evaluation reads no teacher.

    Example: gemrec distill runs/large small.toml --scores scored --run-dir runs/small
    """
    from gem_core.cli.train import report
    from gem_data.distill import distill as run

    done = run(teacher, student, scores=scores, run_dir=run_dir, overrides=overrides or (), step=step, overwrite=overwrite, quiet=quiet)
    print("\n".join(report(done)))


def validate(
    config: Annotated[Path, typer.Argument(help="TOML file with [data.parquet] and [features].", show_default=False)],
    split: Annotated[
        list[str] | None, typer.Option("--split", help="train, eval or test; may be repeated. Otherwise all declared.")
    ] = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the file.")] = None,
    out: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Also write a page with plots.")] = None,
) -> None:
    """Check all rows against the [features] table: missing values, ranges, label rates, histories, duplicates, leaks of the future.

    Exits with 2 if anything violates the table.

    Example: gemrec data validate my.toml --html report.html
    """
    from gem_core.config import load_config
    from gem_core.config.load import source_config
    from gem_core.errors import ConfigError, DataError
    from gem_data.config import ParquetConfig
    from gem_data.report import page, text
    from gem_data.validate import validate as check
    from gem_data.writer import write_text

    loaded = load_config(config, overrides or ())
    options = source_config(loaded)
    if not isinstance(options, ParquetConfig):
        raise ConfigError(f"the source {loaded.data.source!r} has no files to validate", where="data.source", fix='set source = "parquet"')
    splits = split or [s for s in ("train", "eval", "test") if getattr(options, s)]
    reports = [check(options, loaded.features, s) for s in splits]
    for report in reports:
        print(text(report))
    if out is not None:
        write_text(out, page(reports))
        print(f"{out}: written")
    wrong = sum(len(r.violations) for r in reports)
    if wrong:
        raise DataError(
            f"{wrong} kind{'s' * (wrong > 1)} of violation in {', '.join(splits)}",
            where=str(config),
            fix="mend the data or the [features] table; see above",
        )


def bench_predict(
    rows: Annotated[int, typer.Option(min=1000, help="Rows to predict.")] = 400_000,
    mean: Annotated[float, typer.Option(min=1, help="Mean of the law of history lengths; new users make the log's own mean lower.")] = 22.0,
    repeats: Annotated[int, typer.Option(min=1, help="Times that the file is predicted; the best counts, all are recorded.")] = 3,
    threads: Annotated[int, typer.Option(min=1, help="Threads of torch and of pyarrow.")] = 2,
    seed: Annotated[int, typer.Option(min=0)] = 7,
    folder: Annotated[Path | None, typer.Option(help="Where the log and the run are made; a temporary folder if not given.")] = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Also write predict.json and predict.md there.")] = None,
) -> None:
    """Measure gemrec predict of the preset tiny on a generated log: rows a second, memory, and its predictions against evaluation's.

    Example: gemrec bench predict --out docs/benchmarks
    """
    from gem_data.bench_predict import run, table

    record = run(rows, mean, repeats, threads, seed, folder)
    _tell(record, table(record), out, "predict", "gemrec predict")


def _tell(record: dict[str, Any], text: str, out: Path | None, name: str, title: str) -> None:
    """Print what a benchmark measured; with ``out`` also write it there."""
    from gem_data.writer import write_text

    print(text)
    if out is not None:
        write_text(out / f"{name}.json", json.dumps(record, indent=1) + "\n")
        write_text(out / f"{name}.md", f"# {title}\n\n{text}")


def vocab(
    config: Annotated[Path, typer.Argument(help="TOML file with [data.parquet] and [features].", show_default=False)],
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="File to write; features.fitted if not given.")] = None,
    split: Annotated[str, typer.Option(help="Rows to read.")] = "train",
    least: Annotated[int, typer.Option(min=1, help="Leave out values that come less often.")] = 1,
    most: Annotated[int | None, typer.Option(min=1, help="Keep only so many of the most frequent values of a vocabulary.")] = None,
    extend: Annotated[
        Path | None, typer.Option(metavar="FILE", help="What was fitted before: its values keep their ids, new ones follow, edges stay.")
    ] = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the file.")] = None,
) -> None:
    """Make the vocabularies (vocabulary = true) and bucket edges (buckets = N) of the features, for features.fitted.

    Example: gemrec data vocab my.toml --out fitted.json --least 5

    Example: gemrec data vocab today.toml --extend yesterday.json --out today.json
    """
    from gem_core.config import load_config
    from gem_core.config.load import source_config
    from gem_core.errors import ConfigError
    from gem_core.sources.fitted import load_fitted
    from gem_data.config import ParquetConfig
    from gem_data.fit import fit
    from gem_data.writer import write_text

    loaded = load_config(config, overrides or ())
    options, target = source_config(loaded), out or loaded.features.fitted
    if not isinstance(options, ParquetConfig):
        raise ConfigError(f"the source {loaded.data.source!r} has no files to read", where="data.source", fix='set source = "parquet"')
    if target is None:
        raise ConfigError("there is no file to write", where="features.fitted", fix="set features.fitted, or give --out FILE")
    before = None if extend is None else load_fitted(loaded.features.model_copy(update={"fitted": str(extend)}))
    fitted = fit(options, loaded.features, split=split, least=least, most=most, extend=before)
    write_text(Path(target), fitted.dumps())
    for table, values in fitted.vocabularies.items():
        print(f"table {table}: {len(values):,} values, rows = {len(values) + 1} or more")
    for path, edges in fitted.edges.items():
        print(f"{path}: {len(edges)} edges, rows = {len(edges) + 1} or more")
    print(f"{target}: written" + ("" if loaded.features.fitted else f'; set features.fitted = "{target}"'))

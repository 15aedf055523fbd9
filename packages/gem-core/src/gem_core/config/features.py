"""The ``[features]`` table: which column is what, and which embedding table it reads."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from gem_core.config.base import FrozenConfig

Policy = Literal["error", "clip", "default", "quarantine"]


class Table(FrozenConfig):
    """An embedding table shared by any number of features: ``[features.tables.NAME]``."""

    rows: int = Field(gt=0, description="number of ids; an id must lie in [0, rows)")
    dim: int | None = Field(None, gt=0, description="width; None: the model's embedding width")
    init_std: float | None = Field(None, ge=0, description="standard deviation of the initial weights; None: dim ** -0.5")


class Dense(FrozenConfig):
    """A scalar number: ``[features.dense.NAME]``."""

    column: str | None = Field(None, description="column of the source; None: the feature's name")
    transform: Literal["none", "log1p"] = Field("none", description="after clip, before mean and std")
    clip: tuple[float, float] | None = Field(None, description="[lowest, highest] value")
    mean: float = Field(0.0, description="is subtracted")
    std: float = Field(1.0, gt=0, description="is divided by")
    default: float | None = Field(None, description="value for null or NaN; None: such a value is an error")
    policy: Policy = Field(
        "error",
        description="a value that cannot be used: ends the run, becomes the nearest usable one, the default, or its row is set aside",
    )


class Vector(FrozenConfig):
    """A fixed-width float vector: ``[features.vectors.NAME]``."""

    dim: int = Field(gt=0, description="numbers of a vector")
    column: str | None = Field(None, description="None: the feature's name")


class Ids(FrozenConfig):
    """How one column becomes ids; shared by sparse features and event fields of kind "id"."""

    column: str | None = Field(None, description="column of the source; None: the feature's name")
    table: str | None = Field(None, description="embedding table; None: one of the feature's own name (then `rows` is needed)")
    rows: int | None = Field(None, gt=0, description="size of the feature's own table")
    dim: int | None = Field(None, gt=0, description="width of the feature's own table")
    hash: bool = Field(False, description="map any integer or string to [0, rows) by the stated 64-bit hash")
    vocabulary: bool = Field(
        False, description="id = 1 + place of the value in the vocabulary that features.fitted holds for the table; see 'gemrec data vocab'"
    )
    edges: tuple[float, ...] | None = Field(None, description="a number becomes the count of these ascending edges at or below it")
    buckets: int | None = Field(None, gt=1, description="as edges, between this many buckets of equal count, taken from features.fitted")
    salt: int | None = Field(
        None, description="salt of the hash; None: derived from the table's name, so that features sharing a table agree"
    )
    default: int | None = Field(None, description="id for null; None: a null is an error (in lists: refused)")
    policy: Policy = Field(
        "error",
        description="a value that cannot be used: ends the run, becomes the nearest usable one, the default, or its row is set aside",
    )


class Sparse(Ids):
    """One id or a bag of ids a sample: ``[features.sparse.NAME]``."""

    cross: tuple[str, str] | None = Field(None, description="two columns of single values, hashed together to [0, rows)")
    pooling: Literal["sum", "mean"] = Field("sum", description="of the rows of several ids")
    max_length: int | None = Field(None, gt=0, description="keep the last ids of a longer list")
    weights: str | None = Field(None, description="column of per-id weights")


class EventField(Ids):
    """One field of each event: ``[features.sequences.GROUP.fields.NAME]``."""

    kind: Literal["id", "float", "vector"] = Field("id", description="id: rows of a table; float: a number; vector: dim numbers")
    pooling: Literal["sum", "mean"] = Field("sum", description="of the rows of several ids of one event")
    transform: Literal["none", "log1p"] = Field("none", description="of numbers: after clip, before mean and std")
    clip: tuple[float, float] | None = Field(None, description="of numbers: [lowest, highest]")
    mean: float = Field(0.0, description="is subtracted from numbers")
    std: float = Field(1.0, gt=0, description="numbers are divided by it")
    gap: Literal["previous", "sample"] | None = Field(
        None, description="no column: time since the event before (0 for the first), or from the event to the sample, in time_unit"
    )


class Sequence(FrozenConfig):
    """A jagged history: ``[features.sequences.NAME]``; all its columns are lists of one length a row."""

    fields: dict[str, EventField] = Field(min_length=1)
    timestamps: str | None = Field(None, description="list column of integer event times, non-decreasing within a history")
    time_unit: Literal["s", "ms", "us", "ns"] = Field("s", description="of timestamps and gaps")
    max_length: int = Field(4096, gt=0, description="keep the newest events of a longer history")
    drop_first: int = Field(0, ge=0, description="events to drop at the front of every history (a pad id, say)")
    order: Literal["error", "sort", "trust"] = Field("error", description="what to do when timestamps decrease")
    target: dict[str, str] = Field(
        default_factory=dict,
        description="event field -> sparse feature that is the same thing on the candidate (for DIN and candidate tokens)",
    )


class Label(FrozenConfig):
    """A binary task: ``[features.labels.NAME]``."""

    column: str | None = Field(None, description="None: the task's name")
    mask: str | None = Field(None, description="boolean or 0/1 column: the label counts only where it is true (CVR: the click column)")
    weight: float = Field(1.0, ge=0, description="weight of the task in the loss")
    threshold: float | None = Field(None, description="label = value >= threshold, for graded columns")


class NextItem(FrozenConfig):
    """Retrieval: which item follows a history. ``[features.next_item]``."""

    item: str = Field(description="sparse feature: the item that follows a history, which the history's `target` names")
    seen: str | None = Field(
        None, description="sparse feature: all items that the user had before; None: those of the history as delivered"
    )
    pad: int | None = Field(None, ge=0, description="id that stands for no item: never a target, a negative or a candidate")


class Features(FrozenConfig):
    """All of ``[features]``. Names are unique over all kinds."""

    sample_id: str | None = Field(None, description="column that names each row: predictions are told by it")
    timestamp: str | None = Field(None, description="column with the time of the impression")
    timestamp_unit: Literal["s", "ms", "us", "ns"] = Field("s", description="of integer timestamps")
    weight: str | None = Field(None, description="column with each sample's weight in the loss and in metrics")
    request: str | None = Field(
        None, description="column that neighbouring rows of one request share: they stay together, and a batch stores their histories once"
    )
    filter: str | None = Field(None, description='row filter such as "split == 0", pushed down to the source where it can')
    fitted: str | None = Field(None, description="file with vocabularies and bucket edges that 'gemrec data vocab' made; runs keep a copy")
    columns: tuple[str, ...] = Field((), description="columns carried along for group metrics and slices")
    tables: dict[str, Table] = Field(default_factory=dict)
    dense: dict[str, Dense] = Field(default_factory=dict)
    vectors: dict[str, Vector] = Field(default_factory=dict)
    sparse: dict[str, Sparse] = Field(default_factory=dict)
    sequences: dict[str, Sequence] = Field(default_factory=dict)
    labels: dict[str, Label] = Field(default_factory=dict)
    next_item: NextItem | None = Field(None, description="train retrieval of the next item instead of the labels")

    @model_validator(mode="after")
    def _check(self) -> Features:
        seen: dict[str, str] = {}
        for kind in ("dense", "vectors", "sparse", "sequences", "labels"):
            for name in getattr(self, kind):
                if name in seen:
                    raise ValueError(
                        f"two features have the name {name!r}: features.{seen[name]}.{name} and features.{kind}.{name}; rename one"
                    )
                seen[name] = kind
        for where, ids in self.id_features().items():
            if ids.table is not None and ids.table not in self.tables:
                raise ValueError(
                    f"features.{where}: table {ids.table!r} is not declared; add [features.tables.{ids.table}] with rows = ..."
                )
            if ids.table is None and ids.rows is None:
                raise ValueError(f"features.{where}: say either table = ... (a declared table) or rows = ... (a table of its own)")
            if ids.table is not None and ids.rows is not None:
                raise ValueError(f"features.{where}: table = {ids.table!r} has its rows already; remove rows = {ids.rows}")
            _check_ways(where, ids)
        for name, seq in self.sequences.items():
            for fname, f in seq.fields.items():
                if f.kind == "vector" and f.dim is None:
                    raise ValueError(f"features.sequences.{name}.fields.{fname}: a vector field needs dim = ...")
                if f.gap is not None:
                    _check_gap(f"sequences.{name}.fields.{fname}", f, seq.timestamps, self.timestamp)
            for fname, target in seq.target.items():
                if fname not in seq.fields or target not in self.sparse:
                    raise ValueError(f"features.sequences.{name}.target: {fname} = {target!r} must map an event field to a sparse feature")
        if self.next_item is not None:
            self._check_next_item(self.next_item)
        return self

    def _check_next_item(self, task: NextItem) -> None:
        for key, name in (("item", task.item), ("seen", task.seen)):
            if name is not None and name not in self.sparse:
                raise ValueError(f"features.next_item.{key}: there is no sparse feature {name!r}; add [features.sparse.{name}]")
        found = [(n, f) for n, s in self.sequences.items() for f, target in s.target.items() if target == task.item]
        if len(found) != 1:
            raise ValueError(
                f"features.next_item: {len(found)} event fields have the target {task.item!r}, and one must: it says which history the "
                f"item continues; set features.sequences.NAME.target = {{ FIELD = {task.item!r} }}"
            )
        table = self.table_of(f"sparse.{task.item}")
        others = {"event field": f"sequences.{found[0][0]}.fields.{found[0][1]}"}
        others |= {"seen": f"sparse.{task.seen}"} if task.seen else {}
        for what, path in others.items():
            if self.table_of(path) != table:
                raise ValueError(f"features.next_item: the {what} features.{path} and features.sparse.{task.item} must read one table")
        if task.pad is not None and task.pad >= self.all_tables()[table].rows:
            raise ValueError(f"features.next_item.pad = {task.pad} is no row of the table {table!r}")

    def next_item_field(self) -> tuple[str, str]:
        """(history, event field) that the item of ``next_item`` continues."""
        assert self.next_item is not None
        item = self.next_item.item
        return next((n, f) for n, s in self.sequences.items() for f, target in s.target.items() if target == item)

    def id_features(self) -> dict[str, Ids]:
        """Every feature that reads an embedding table, by its path below ``features``."""
        found: dict[str, Ids] = {f"sparse.{n}": f for n, f in self.sparse.items()}
        for group, seq in self.sequences.items():
            found |= {f"sequences.{group}.fields.{n}": f for n, f in seq.fields.items() if f.kind == "id"}
        return found

    def table_of(self, path: str) -> str:
        """Name of the table that the id feature at ``path`` reads; a feature's own table is called by the feature's path."""
        ids = self.id_features()[path]
        return ids.table if ids.table is not None else path

    def all_tables(self) -> dict[str, Table]:
        """Declared tables and the features' own ones, by name."""
        tables = dict(self.tables)
        for path, ids in self.id_features().items():
            if ids.table is None:
                assert ids.rows is not None  # _check
                tables[path] = Table(rows=ids.rows, dim=ids.dim)
        return tables

    def rows_of(self, path: str) -> int:
        return self.all_tables()[self.table_of(path)].rows


def _check_ways(where: str, ids: Ids) -> None:
    """One way from values to ids, and what it needs."""
    cross = isinstance(ids, Sparse) and ids.cross is not None
    ways = {"hash": ids.hash, "vocabulary": ids.vocabulary, "edges": ids.edges is not None, "buckets": ids.buckets is not None}
    chosen = [name for name, is_set in (ways | {"cross": cross}).items() if is_set]
    if len(chosen) > 1:
        raise ValueError(f"features.{where}: {' and '.join(chosen)} exclude each other; keep one")
    if ids.edges is not None and (not ids.edges or any(not a < b for a, b in zip(ids.edges, ids.edges[1:]))):
        raise ValueError(f"features.{where}: edges must be one number or more, each greater than the one before")
    if isinstance(ids, Sparse) and ids.cross is not None and (ids.column is not None or ids.weights is not None):
        raise ValueError(f"features.{where}: cross names its columns itself; remove column and weights")


def _check_gap(where: str, field: EventField, times: str | None, sample_time: str | None) -> None:
    if field.column is not None:
        raise ValueError(f"features.{where}: gap is made of the timestamps; remove column")
    if times is None or (field.gap == "sample" and sample_time is None):
        needs = "timestamps = ... of the history" if times is None else "features.timestamp"
        raise ValueError(f"features.{where}: gap = {field.gap!r} needs {needs}")
    if field.kind == "vector" or (field.kind == "id" and field.edges is None and field.buckets is None):
        raise ValueError(f'features.{where}: a gap is a number: use kind = "float", or edges or buckets for ids')

"""One column's values to what a feature declares, and what happens to values that cannot be used.

``Site`` knows where the values came from, so that every refusal names file, row, column and feature.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from gem_core.config.features import Dense, EventField, Ids, Policy
from gem_core.errors import DataError
from gem_core.sources.hashing import cross, to_rows
from gem_core.sources.transform import scaled
from gem_data import arrow
from gem_data.arrow import Array, Bools, Ints, WrongType
from gem_data.columns import Chunk, locate


@dataclass(frozen=True)
class Site:
    """Values of ``column`` for ``feature`` (path below ``features``).

    ``offsets``: of the rows over their values (and, inside, of the events over theirs); empty for one value a row.
    """

    chunk: Chunk
    column: str
    feature: str
    offsets: tuple[Ints, ...] = ()

    def row_of(self, position: Any) -> Any:
        """Row (or rows) in the chunk of value position(s)."""
        for offsets in reversed(self.offsets):
            position = np.searchsorted(offsets, position, side="right") - 1
        return position

    @property
    def is_constant(self) -> bool:
        """Whether the column is a folder of the path."""
        return locate(self.chunk.file, self.column).constant is not None

    def read(self, convert: Callable[..., Any], array: pa.Array, *args: Any) -> Any:
        try:
            return convert(array, *args)
        except WrongType as error:
            self.chunk.wrong_type(self.column, error, self.feature)
        except (pa.ArrowException, ValueError) as error:
            self.fail(f"the column cannot be used: {error}", "store it in one of the documented types")

    def fail(self, what: str, fix: str, position: int | None = None) -> Any:
        row = None if position is None else int(self.row_of(position))
        self.chunk.fail(what, fix, self.column, row, self.feature)

    def settle(self, bad: Bools, policy: Policy, what: Callable[[int], str], fix: str) -> None:
        """Unusable values under ``error`` (also under clip and default, which cannot mend these) or ``quarantine``."""
        positions = np.flatnonzero(bad)
        if not positions.size:
            return
        if policy != "quarantine":
            self.fail(what(int(positions[0])), fix, int(positions[0]))
        for position, row in zip(positions.tolist(), self.row_of(positions).tolist()):
            self.chunk.reasons.setdefault(row, f"{self.column}: {what(position)}")


@dataclass(frozen=True)
class Way:
    """From values to ids of a table of ``rows`` rows: the ``salt`` of a hash, ``edges`` of buckets, or the ``words`` of a vocabulary.

    ``kinds``: column -> "integers" or "text", what was hashed so far; one column is one of both.
    """

    rows: int
    salt: int
    edges: NDArray[np.float64] | None = None
    words: pa.Array | None = None
    kinds: dict[str, str] = field(default_factory=dict)


def vocabulary(values: list[Any]) -> pa.Array:
    """The values as what columns are compared with: int64 or large_string.

    :raises DataError: values that are neither all integers nor all text.
    """
    kinds = {type(v) for v in values}
    if not kinds <= {int} and not kinds <= {str}:
        raise DataError(
            "a vocabulary holds integers and text, or something else", where="features.fitted", fix="make it again: 'gemrec data vocab'"
        )
    return pa.array(values, pa.large_string() if kinds == {str} else pa.int64())


def ids(site: Site, array: pa.Array, spec: Ids, way: Way) -> Ints:
    """Table rows ``[N]`` in [0, rows)."""
    if way.edges is not None:
        numbers, missing = site.read(arrow.floats, array)
        values: Ints = np.searchsorted(way.edges, numbers, side="right")
    elif way.words is not None:
        values, missing, known = site.read(arrow.places, array, way.words)
        values = _known(site, values, known if missing is None else known | missing, array, spec)
    elif spec.hash:
        hashed, missing = _hashed(site, array, way)
        values = to_rows(hashed, way.rows)
    else:
        values, missing = site.read(arrow.integers, array)
        values = _in_table(site, values, missing, spec, way.rows)
    return _filled(site, values, missing, spec)


def _hashed(site: Site, array: pa.Array, way: Way) -> Any:
    """Hashes and the null mask. A folder's ``key=value`` is a number or text as each value is, so it is not held against others."""
    kind = arrow.hashed_kind(array.type)
    found = site.read(arrow.hashes, array, way.salt)
    if kind is not None and not site.is_constant and way.kinds.setdefault(site.column, kind) != kind:
        site.fail(
            f"the column holds {kind}, and {way.kinds[site.column]} elsewhere: the same id would have two hashes",
            "store it in one type in all files, that of training where a model reads it",
        )
    return found


def crossed(sites: list[Site], arrays: list[pa.Array], spec: Ids, way: Way) -> Ints:
    """Table rows ``[n]`` of pairs of values."""
    (a, no_a), (b, no_b) = (_hashed(site, array, way) for site, array in zip(sites, arrays))
    missing = no_a if no_b is None else no_b if no_a is None else no_a | no_b
    return _filled(sites[0], to_rows(cross(a, b), way.rows), missing, spec)


def _filled(site: Site, values: Ints, missing: Bools | None, spec: Ids) -> Ints:
    if missing is None:
        return values
    if spec.default is None:
        site.settle(
            missing, spec.policy, lambda _: "an id is null", 'set default = <id for missing>, or policy = "quarantine", or fill the column'
        )
        return np.where(missing, 0, values)
    return np.where(missing, spec.default, values)


def _known(site: Site, values: Ints, known: Bools, array: pa.Array, spec: Ids) -> Ints:
    """1 + places in the vocabulary; what is not in it follows the policy."""
    if known.all():
        return values + 1
    if spec.policy == "default":
        assert spec.default is not None  # decode._check_ids
        return np.where(known, values + 1, spec.default)
    fix = 'set default = 0 and policy = "default" (id 0 is left for unknown values), or policy = "quarantine", or make the vocabulary again'
    policy: Policy = "error" if spec.policy == "clip" else spec.policy
    site.settle(~known, policy, lambda i: f"the value {array[i].as_py()!r} is not in the vocabulary", fix)
    return np.where(known, values + 1, 0)


def _in_table(site: Site, values: Ints, missing: Bools | None, spec: Ids, rows: int) -> Ints:
    # A negative id is a huge unsigned one: one pass over the values instead of two.
    if not values.size or values.view(np.uint64).max() < rows:
        return values
    bad = (values < 0) | (values >= rows)
    if missing is not None:
        bad &= ~missing
    if spec.policy == "clip":
        return values.clip(0, rows - 1)
    if spec.policy == "default":
        assert spec.default is not None  # decode._check_ids
        return np.where(bad, spec.default, values)
    largest = int(values.max())
    fix = 'hash = true; or policy = "clip", "default" or "quarantine"'
    if int(values.min()) < 0:
        fix = f"store ids from 0 up; or {fix}"
    elif largest < 2**31:
        fix = f"rows = {largest + 1} fits this row group; or {fix}"
    else:
        fix = f"set {fix}"

    def what(position: int) -> str:
        value = int(values[position])
        if value < 0:
            return f"the id {value} is negative"
        shown = str(value) if value < arrow.LARGEST else f"{value} or more"
        return f"the id {shown} does not fit its table of {rows} rows (0 to {rows - 1})"

    site.settle(bad, spec.policy, what, fix)
    return np.where(bad, 0, values)


def dense(site: Site, array: pa.Array, spec: Dense) -> NDArray[np.float32]:
    """Scaled numbers ``[n]``."""
    values, missing = site.read(arrow.floats, array)
    return _scaled(site, values, missing, spec, spec.default, spec.policy, spec.clip)


def event_floats(site: Site, array: pa.Array, spec: EventField) -> NDArray[np.float32]:
    """Scaled numbers of events ``[N]``."""
    values, missing = site.read(arrow.floats, array)
    return _scaled(site, values, missing, spec, spec.default, spec.policy, spec.clip)


def _scaled(
    site: Site, values: Array, missing: Bools | None, spec: Any, default: float | None, policy: Policy, clip: tuple[float, float] | None
) -> NDArray[np.float32]:
    if missing is not None:
        if default is None:
            site.settle(
                missing, policy, lambda _: "a value is null or NaN", 'set default = <number>, or policy = "quarantine", or fill the column'
            )
        values = np.where(missing, 0.0 if default is None else default, values)
    if clip is not None:
        values = values.clip(*clip)
    low = -1.0 if spec.transform == "log1p" else -np.inf
    bad = ~(np.isfinite(values) & (values > low))
    if bad.any():
        if policy == "clip":
            largest = float(np.finfo(np.float32).max)
            usable = np.nan_to_num(values, posinf=largest, neginf=-largest).clip(0.0 if low == -1.0 else -largest, largest)
            values = np.where(bad, usable, values)
        elif policy == "default" and default is not None:
            values = np.where(bad, default, values)
        else:
            needs = "finite and above -1 for log1p" if low == -1.0 else "finite"
            fix = 'set clip = [low, high], or policy = "clip", "default" or "quarantine"'
            site.settle(bad, policy, lambda i: f"the value {values[i]} is not {needs}", fix)
            values = np.where(bad, 0.0, values)
    with np.errstate(over="ignore"):
        found = scaled(values, spec)
    over = ~np.isfinite(found)
    if over.any():
        if policy == "clip":
            return np.nan_to_num(found)
        if policy == "default" and default is not None:
            return np.where(over, scaled(np.array([default]), spec), found)
        fix = 'set clip = [low, high], transform = "log1p", or policy = "clip", "default" or "quarantine"'
        site.settle(over, policy, lambda i: f"the value {values[i]} is too large for float32", fix)
        found = np.where(over, np.float32(0), found)
    return found


def vectors(site: Site, array: pa.Array, dim: int) -> NDArray[np.float32]:
    """Fixed-width vectors ``[n, dim]``; nothing in them may be missing."""
    found = site.read(arrow.lists, array)
    wrong = found.lengths != dim
    if wrong.any():
        position = int(np.flatnonzero(wrong)[0])
        site.fail(
            f"a vector has {int(found.lengths[position])} numbers, dim = {dim} is declared",
            f"store vectors of width {dim}, or set dim",
            position,
        )
    values, missing = site.read(arrow.floats, found.values)
    bad = ~np.isfinite(values) if missing is None else missing | ~np.isfinite(values)
    if bad.any():
        site.fail("a vector holds a null, NaN or infinite number", "fill or remove such vectors", int(np.flatnonzero(bad)[0]) // dim)
    matrix: NDArray[np.float32] = values.astype(np.float32).reshape(-1, dim)
    return matrix


def labels(site: Site, array: pa.Array, threshold: float | None, counts: Bools) -> NDArray[np.float32]:
    """Labels ``[n]`` in [0, 1]; where ``counts`` is False anything may stand, and 0 is returned."""
    values, missing = site.read(_label_numbers, array)
    if missing is not None and (missing & counts).any():
        position = int(np.flatnonzero(missing & counts)[0])
        kind = "null" if bool(arrow.nulls(array)[position]) else "NaN"
        site.fail(
            f"a label is {kind}",
            "remove the row, fill the label, leave rows without one out by a filter (train_filter and eval_filter beside the paths, as in "
            "'click is not None'), or declare mask = <column that says where the label counts>",
            position,
        )
    values = np.where(counts, values, 0.0)
    if threshold is not None:
        above: NDArray[np.float32] = ((values >= threshold) & counts).astype(np.float32)
        return above
    bad = ~((values >= 0) & (values <= 1))
    if bad.any():
        position = int(np.flatnonzero(bad)[0])
        site.fail(f"the label {values[position]} is not between 0 and 1", "set threshold = <value from which on the label is 1>", position)
    return values.astype(np.float32)


def _label_numbers(array: pa.Array) -> Any:
    try:
        return arrow.floats(array)
    except WrongType as error:
        error.fix = "store labels as 0 and 1, as booleans, or as numbers with threshold = <value from which on the label is 1>"
        raise


def complete(site: Site, found: tuple[Array, Bools | None], what: str) -> Array:
    """Values and null mask as `arrow` gives them: the values, or an error if any is null."""
    values, missing = found
    if missing is not None:
        site.fail(f"{what} is null", "fill the column or remove the row", int(np.flatnonzero(missing)[0]))
    return values


def carried(site: Site, array: pa.Array) -> Array:
    """A column for group metrics and slices ``[n]``: int64 (unsigned numbers by their bits), float64 (null: NaN) or bool; text and bytes
    by their hash; times as stored."""
    kind = array.type
    if pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        numbers, missing = site.read(arrow.floats, array)
        return np.asarray(numbers if missing is None else np.where(missing, np.nan, numbers), dtype=np.float64)
    if pa.types.is_boolean(kind):
        values, missing = site.read(arrow.booleans, array)
    elif pa.types.is_integer(kind):
        values, missing = site.read(arrow.keys, array)
    elif pa.types.is_temporal(kind):
        values, missing = site.read(arrow.times, array, kind.unit if pa.types.is_timestamp(kind) else "s")
    else:
        hashed, missing = site.read(arrow.hashes, array, 0)
        values = hashed.view(np.int64)
    return complete(site, (values, missing), "a value")


def sample_ids(site: Site, array: pa.Array) -> Array:
    """int64 ``[n]`` (unsigned numbers by their bits), or text as an object array."""
    if pa.types.is_integer(array.type):
        return complete(site, site.read(arrow.keys, array), "a sample id")
    if not (pa.types.is_string(array.type) or pa.types.is_large_string(array.type)):
        site.chunk.wrong_type(
            site.column, WrongType(array.type, "integers or text", "use an integer or text column as sample_id"), site.feature
        )
    missing = arrow.nulls(array) if array.null_count else None
    return complete(site, (array.to_numpy(zero_copy_only=False), missing), "a sample id")

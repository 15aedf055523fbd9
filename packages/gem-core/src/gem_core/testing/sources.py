"""Conformance kit for data sources.

Give it a factory with the keywords of ``SourceSpec.build`` after ``config`` and ``features``; every check raises AssertionError::

    @pytest.mark.parametrize("check", source_checks(features), ids=lambda c: c.__name__)
    def test_source(check):
        check(lambda **how: build(config, features, **how))

``features`` is the ``[features]`` table that the source is built with. The source must give ``Batch.sample_ids``, and a training split of
at least 50 samples for the checks to say anything. What it makes of bad input only its author can show; `check_bad_input` holds the answer
to the rule::

    def test_a_null_label(tmp_path):
        check_bad_input(lambda: build(config, features_of(write(tmp_path, label=None))), "label", "part-3", "row 17")
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from gem_core.batch import Batch
from gem_core.config.features import Features
from gem_core.errors import GemError
from gem_core.jagged import Jagged
from gem_core.sources.contract import Source
from gem_core.testing.rules import named

Factory = Callable[..., Source]
Check = Callable[[Factory], None]
_CHECKS: list[Check] = []


def source_checks(features: Features | None = None) -> list[Check]:
    """All checks, to be parametrised over; without ``features`` all but the one that batches are what these declare."""
    if features is None:
        return list(_CHECKS)

    @named
    def batches_are_what_features_declare(make: Factory) -> None:
        """Every batch has the numbers, ids, histories and labels of `[features]`, and every id lies in its table: [0, rows)."""
        for split in ("train", "eval", "test"):
            for batch in _source(make, split):
                _fits(batch, features)

    return [*_CHECKS, batches_are_what_features_declare]


def check_source(make: Factory, features: Features | None = None) -> None:
    """Run all checks."""
    for check in source_checks(features):
        check(make)


def _check(fn: Check) -> Check:
    _CHECKS.append(named(fn))
    return fn


@named
def check_bad_input(make: Callable[[], Iterable[Batch]], *words: str) -> None:
    """Reading bad input raises a GemError that names each of ``words`` (file, row, column, ...) and says what to do; nothing is dropped."""
    told: GemError | None = None
    count = 0
    try:
        count = len(ids_of(make()))
    except GemError as error:
        told = error
    assert told is not None, f"no error: {count} samples were read"
    absent = [word for word in words if word not in str(told)]
    assert not absent, f"the error does not name {', '.join(map(repr, absent))}: {told}"
    assert told.fix, f"the error does not say what to do (GemError(..., fix=...)): {told}"


def _source(
    make: Factory, split: str = "train", batch_size: int = 16, shard: tuple[int, int] = (0, 1), seed: int = 3, drop_last: bool = False
) -> Source:
    return make(split=split, batch_size=batch_size, shard=shard, seed=seed, drop_last=drop_last)


def ids_of(batches: Iterable[Batch]) -> list[Any]:
    """Sample ids in order."""
    found: list[Any] = []
    for batch in batches:
        ids = batch.sample_ids
        assert ids is not None, "the source gives no sample_ids"
        found += ids.tolist() if isinstance(ids, Tensor) else list(ids)
    return found


def flat_tensors(value: Any, name: str = "batch") -> Iterator[tuple[str, Any]]:
    """(path, leaf) of everything in a batch, tensors and plain values."""
    if is_dataclass(value) and not isinstance(value, type):
        for f in fields(value):
            yield from flat_tensors(getattr(value, f.name), f"{name}.{f.name}")
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from flat_tensors(item, f"{name}.{key}")
    else:
        yield name, value


def assert_same_batch(a: Batch, b: Batch) -> None:
    """Every tensor equal in dtype, shape and value, everything else equal."""
    left, right = dict(flat_tensors(a)), dict(flat_tensors(b))
    assert left.keys() == right.keys(), f"different members: {sorted(left.keys() ^ right.keys())}"
    for path, x in left.items():
        y = right[path]
        if isinstance(x, Tensor):
            same = isinstance(y, Tensor) and x.dtype == y.dtype and x.shape == y.shape and torch.equal(x, y)
            assert same, f"{path} differs: {x} and {y}"
        else:
            assert x == y, f"{path} differs: {x} and {y}"


def _assert_same(a: list[Batch], b: list[Batch]) -> None:
    assert len(a) == len(b), f"{len(a)} and {len(b)} batches"
    for x, y in zip(a, b):
        assert_same_batch(x, y)


def _all_once(parts: list[list[Any]], expected: list[Any], what: str) -> None:
    counts = Counter(i for part in parts for i in part)
    repeated = [i for i, c in counts.items() if c > 1]
    assert not repeated, f"{what}: samples handed out twice: {repeated[:5]}"
    missing = set(expected) - counts.keys()
    assert not missing, f"{what}: samples lost: {sorted(missing, key=str)[:5]}"
    assert len(counts) == len(expected), f"{what}: samples that the epoch does not have"


def _fits(batch: Batch, features: Features) -> None:
    """What a model that was built for ``features`` reads is there, and ids lie in their tables."""
    assert tuple(batch.dense_names) == tuple(features.dense), f"dense numbers {list(batch.dense_names)}, declared {list(features.dense)}"
    assert tuple(batch.label_names) == tuple(features.labels), f"labels {list(batch.label_names)}, declared {list(features.labels)}"
    for name, spec in features.vectors.items():
        shape = tuple(batch.vectors[name].shape) if name in batch.vectors else None
        assert shape == (len(batch), spec.dim), f"vectors.{name}: shape {shape}, declared [B, {spec.dim}]"
    groups = {**batch.sequences, **(batch.requests.sequences if batch.requests is not None else {})}
    absent = [f"sparse.{n}" for n in features.sparse if batch.sparse is None or n not in batch.sparse.keys]
    absent += [f"sequences.{n}" for n in features.sequences if n not in groups]
    absent += [
        f"sequences.{n}.fields.{f}" for n, s in features.sequences.items() if n in groups for f in s.fields if f not in groups[n].fields
    ]
    assert not absent, f"the batch lacks {', '.join(absent)}"
    for path in features.id_features():
        kind, name, *rest = path.split(".")
        found = batch.sparse[name].values if kind == "sparse" else groups[name].fields[rest[-1]]  # type: ignore[index]
        ids, rows = found.values if isinstance(found, Jagged) else found, features.rows_of(path)
        assert ids.dtype in (torch.int32, torch.int64), f"{path}: ids are {ids.dtype}"
        outside = ids[(ids < 0) | (ids >= rows)]
        assert not outside.numel(), f"{path}: the id {int(outside[0])} is outside its table, [0, {rows})"


@_check
def batches_are_valid(make: Factory) -> None:
    """Every batch passes `Batch.validate`, holds at most batch_size samples, and has the dtypes and members of the first."""
    for split in ("train", "eval", "test"):
        kinds = None
        for batch in _source(make, split):
            assert 0 < len(batch.validate()) <= 16, f"{split}: a batch of {len(batch)} samples, the batch size is 16"
            now = {p: (v.dtype, v.dim()) if isinstance(v, Tensor) else type(v) for p, v in flat_tensors(batch)}
            kinds = kinds or now
            assert now == kinds, f"members changed between batches of {split}: {set(now.items()) ^ set(kinds.items())}"
        assert kinds, f"split {split} is empty"


@_check
def labels_are_0_or_1(make: Factory) -> None:
    """A label that counts is 0 or 1; one that does not (`label_mask`) is a finite number, since it is multiplied by 0."""
    for split in ("train", "eval", "test"):
        for batch in _source(make, split):
            if batch.labels is not None:
                assert batch.labels.isfinite().all(), f"{split}: a label is not finite"
                counts = torch.ones_like(batch.labels, dtype=torch.bool) if batch.label_mask is None else batch.label_mask
                odd = batch.labels[counts & (batch.labels != 0) & (batch.labels != 1)]
                assert not odd.numel(), f"{split}: labels of {', '.join(batch.label_names)} hold {float(odd[0])}"


@_check
def samples_come_once_an_epoch(make: Factory) -> None:
    """Each epoch of a split holds every sample once, and no sample is in two splits."""
    seen: dict[str, set[Any]] = {}
    for split in ("train", "eval", "test"):
        source = _source(make, split)
        first, second = ids_of(source), ids_of(source)
        assert len(first) == len(set(first)), f"{split}: a sample came twice in one epoch"
        assert sorted(first, key=str) == sorted(second, key=str), f"{split}: two epochs hold different samples"
        seen[split] = set(first)
    shared = seen["train"] & (seen["eval"] | seen["test"]) | seen["eval"] & seen["test"]
    assert not shared, f"splits share samples: {sorted(shared, key=str)[:5]}"


@_check
def sources_built_alike_agree(make: Factory) -> None:
    """Two sources built with the same arguments give the same batches, bit for bit."""
    _assert_same(list(_source(make)), list(_source(make)))


@_check
def training_is_shuffled_by_seed_and_epoch(make: Factory) -> None:
    """Training samples come in another order each epoch and for each seed; evaluation keeps its order."""
    source = _source(make)
    first, second = ids_of(source), ids_of(source)
    assert first != second, "the second epoch has the order of the first"
    assert first != ids_of(_source(make, seed=4)), "another seed has the same order"
    evaluation = _source(make, "eval")
    order = ids_of(evaluation)
    assert order == ids_of(evaluation) == ids_of(_source(make, "eval", seed=4)), "the evaluation split changes its order"


@_check
def batch_size_does_not_change_the_stream(make: Factory) -> None:
    """The order of the samples is that of the seed, however they are cut into batches."""
    want = ids_of(_source(make, batch_size=16))
    for size in (1, 7, 10_000):
        assert ids_of(_source(make, batch_size=size)) == want, f"batch size {size} gives another order"


@_check
def shards_are_disjoint_and_of_one_length(make: Factory) -> None:
    """The ranks' shards hold every sample once, in as many batches on each rank, none of them empty."""
    for split in ("train", "eval"):
        want = ids_of(_source(make, split))
        for world in (2, 3, 7):
            for size in (4, 16):
                parts = [list(_source(make, split, size, (rank, world))) for rank in range(world)]
                assert len({len(p) for p in parts}) == 1, f"{world} ranks have different batch counts: {[len(p) for p in parts]}"
                assert all(len(b) > 0 for p in parts for b in p), "a rank got an empty batch"
                _all_once([ids_of(p) for p in parts], want, f"{split}, {world} ranks")


@_check
def drop_last_gives_full_batches_only(make: Factory) -> None:
    """With drop_last every batch is full, and no more samples are left out than that takes."""
    for world in (1, 3):
        parts = [list(_source(make, "train", 7, (rank, world), drop_last=True)) for rank in range(world)]
        assert len({len(p) for p in parts}) == 1, f"{world} ranks have different batch counts: {[len(p) for p in parts]}"
        assert all(len(b) == 7 for p in parts for b in p), "a batch is not full"
        ids = [i for p in parts for i in ids_of(p)]
        total = len(ids_of(_source(make)))
        kept = total // world // 7 * 7 * world
        assert len(ids) == len(set(ids)) == kept, f"{len(set(ids))} of {total} samples came ({len(ids)} with repeats), {kept} fill batches"


@_check
def a_length_is_the_batches_of_an_epoch(make: Factory) -> None:
    """A source that has a length has that of its shard's epoch: learning rates and the end of training are planned by it."""
    for drop_last in (False, True):
        for rank in range(3):
            source = _source(make, "train", 7, (rank, 3), drop_last=drop_last)
            if hasattr(source, "__len__"):
                length, count = len(source), len(list(source))  # type: ignore[arg-type]
                assert length == count, f"rank {rank} of 3, drop_last={drop_last}: the length is {length}, {count} batches came"


@_check
def what_is_left_is_what_comes(make: Factory) -> None:
    """A source that tells what is left tells the batches of the next iteration: at first, after an epoch, and where a run goes on, in
    batches of any size and on any number of ranks."""
    if not hasattr(_source(make), "left"):
        return
    for taken in (0, 2, None):
        source = _source(make)
        given = len(list(islice(source, taken)))
        for size, world in ((16, 1), (5, 2)):
            resumed = _source(make, batch_size=size, shard=(world - 1, world))
            resumed.load_state_dict(source.state_dict())
            for _ in range(2):
                told: int = resumed.left  # type: ignore[attr-defined]
                count = len(list(resumed))
                assert told == count, f"after {given} batches, in batches of {size} on {world} ranks: {told} left, {count} came"


@_check
def an_abandoned_iterator_does_not_shorten_the_next(make: Factory) -> None:
    """An iterator left on the way ends its epoch: the next one is whole."""
    source = _source(make)
    want = ids_of(_source(make))
    list(islice(source, 2))
    assert sorted(ids_of(source), key=str) == sorted(want, key=str), "the epoch after an abandoned one is not whole"
    evaluation = _source(make, "eval")
    list(islice(evaluation, 1))
    assert ids_of(evaluation) == ids_of(_source(make, "eval")), "the evaluation after an abandoned one is not whole"


@_check
def state_is_plain(make: Factory) -> None:
    """The state is JSON and does not depend on the rank."""
    source = _source(make)
    list(islice(source, 2))
    state = source.state_dict()
    assert json.loads(json.dumps(state)) == state, "the state must be JSON: it is stored beside checkpoints and read without unpickling"
    others = [_source(make, shard=(rank, 2)) for rank in range(2)]
    for other in others:
        list(islice(other, 2))
    assert others[0].state_dict() == others[1].state_dict(), "the state must not depend on the rank"


@_check
def resuming_twice_changes_nothing(make: Factory) -> None:
    """A run that was resumed twice, at any batch, sees the batches of one that never stopped, and so does its next epoch."""
    for shard in ((0, 1), (1, 3)):
        plain = _source(make, batch_size=4, shard=shard)
        want = [list(plain), list(plain)]
        n = len(want[0])
        for a, b in ((1, 2), (2, n - 1), (n - 1, n)):
            source = _source(make, batch_size=4, shard=shard)
            got = list(islice(source, a))
            for upto in (b, None):
                state = json.loads(json.dumps(source.state_dict()))
                source = _source(make, batch_size=4, shard=shard)
                source.load_state_dict(state)
                got += list(source if upto is None else islice(source, upto - len(got)))
            _assert_same(got, want[0])
            _assert_same(list(source), want[1])


@_check
def a_finished_epoch_resumes_into_the_next(make: Factory) -> None:
    """A state taken at the end of an epoch continues with the next epoch."""
    plain = _source(make)
    want = [list(plain), list(plain)]
    source, n = _source(make), len(want[0])
    iterator = iter(source)
    for _ in range(n):
        next(iterator)
    state = source.state_dict()
    resumed = _source(make)
    resumed.load_state_dict(state)
    assert list(resumed) == [], "the finished epoch was read again"
    _assert_same(list(resumed), want[1])
    assert next(iterator, None) is None, "the epoch goes on after its last batch"
    resumed = _source(make)
    resumed.load_state_dict(source.state_dict())
    _assert_same(list(resumed), want[1])


@_check
def reading_ahead_changes_nothing(make: Factory) -> None:
    """A source that reads ahead into ``following`` iterations gives the same batches and states, and resumes from any of them."""
    if not hasattr(_source(make), "following"):
        return
    for shard in ((0, 1), (1, 3)):
        plain = _source(make, batch_size=4, shard=shard)
        want = _epochs(plain, [0, 0, 0])
        n = len(want) // 3
        told: tuple[list[int | None], ...] = ([2, 1, 0], [None, None, None])
        for left in told:
            source = _source(make, batch_size=4, shard=shard)
            _assert_alike(_epochs(source, left), want)
            source.close()  # type: ignore[attr-defined]
        for at in (n - 1, n, n + 1, 2 * n):
            source = _source(make, batch_size=4, shard=shard)
            got = _epochs(source, [None, None, None], at)
            resumed = _source(make, batch_size=4, shard=shard)
            resumed.load_state_dict(json.loads(json.dumps(source.state_dict())))
            source.close()  # type: ignore[attr-defined]
            # An iteration that goes on at the very end of an epoch is empty.
            got += _epochs(resumed, [2 - i for i in range(3 - (at - 1) // n)])
            _assert_alike(got, want)
    source = _source(make)
    _epochs(source, [None], 2)
    assert ids_of(source) == ids_of(list(_source_after(make, 1))), "the epoch after an abandoned one is not the next one"
    source.close()  # type: ignore[attr-defined]


def _source_after(make: Factory, epochs: int) -> Source:
    source = _source(make)
    for _ in range(epochs):
        list(source)
    return source


def _epochs(source: Source, following: list[int | None], count: int | None = None) -> list[tuple[Batch, dict[str, Any]]]:
    """The first ``count`` batches of some iterations, each with the state after it."""
    found: list[tuple[Batch, dict[str, Any]]] = []
    for left in following:
        source.following = left  # type: ignore[attr-defined]
        for batch in source:
            found.append((batch, source.state_dict()))
            if len(found) == count:
                return found
    return found


def _assert_alike(got: list[tuple[Batch, dict[str, Any]]], want: list[tuple[Batch, dict[str, Any]]]) -> None:
    _assert_same([batch for batch, _ in got], [batch for batch, _ in want])
    for (_, mine), (_, other) in zip(got, want):
        assert mine == other, f"the state is {mine}, without reading ahead {other}"


@_check
def resuming_with_other_ranks_and_batch_size_loses_nothing(make: Factory) -> None:
    """Resumed on other numbers of ranks and other batch sizes, an epoch still holds every sample once."""
    want = ids_of(_source(make))
    for worlds in ((1, 3, 2), (3, 1, 4), (2, 5, 1)):
        state: dict[str, Any] | None = None
        parts: list[list[Any]] = []
        for number, (world, size) in enumerate(zip(worlds, (4, 3, 5))):
            sources = [_source(make, batch_size=size, shard=(rank, world)) for rank in range(world)]
            got = []
            for source in sources:
                if state is not None:
                    source.load_state_dict(json.loads(json.dumps(state)))
                got.append(ids_of(source if number == 2 else islice(source, 2)))
            parts += got
            state = sources[0].state_dict()
        _all_once(parts, want, f"resumed over {worlds} ranks")


@_check
def misuse_is_refused(make: Factory) -> None:
    """A split that is not there, a rank outside the world and a batch size of 0 are GemErrors, not empty epochs."""
    wrongs: tuple[dict[str, Any], ...] = ({"split": "trian"}, {"shard": (2, 2)}, {"shard": (-1, 2)}, {"batch_size": 0})
    for wrong in wrongs:
        try:
            count = len(list(_source(make, **wrong)))
        except GemError:
            continue
        raise AssertionError(f"{wrong} gives {count} batches")


@_check
def a_position_in_another_order_is_refused(make: Factory) -> None:
    """A state that was stored under another seed means other samples: loading it is a GemError."""
    source = _source(make)
    list(islice(source, 2))
    other = _source(make, seed=4)
    try:
        other.load_state_dict(json.loads(json.dumps(source.state_dict())))
    except GemError:
        return
    raise AssertionError("the position of seed 3 was taken by a source of seed 4")

"""Tables, lookups, feature tokens and event tokens."""

import pytest
import torch

from gem_core.batch import Batch, SequenceGroup, SparseGroup
from gem_core.config.features import Features
from gem_core.errors import BatchError, ConfigError, DataError
from gem_core.jagged import Jagged
from gem_core.model.config import EventConfig
from gem_core.model.embedding import EventTokens, FeatureTokens, rows_in
from gem_core.model.rows import Rows
from gem_core.model.tables import LocalTables, deferred_tables, sparse_group, table_set
from gem_core.testing.models import random_batch, sample_features


def ids(*rows):
    return Jagged.from_list([torch.tensor(r, dtype=torch.int64) for r in rows])


@pytest.fixture
def features():
    return sample_features()


@pytest.fixture
def parts(features):
    torch.manual_seed(0)
    tables = table_set(features, 8)
    return features, tables, LocalTables(tables)


def test_table_set_names_widths_and_init(features):
    tables = table_set(features, 16)
    by_name = {t.name: t for t in tables.tables}
    assert (by_name["item"].rows, by_name["item"].dim, by_name["item"].init_std) == (50, 8, 8**-0.5)
    assert by_name["category"].dim == by_name["sparse.user"].dim == 16
    assert by_name["sequences.history.fields.action"].rows == 3
    reads = {k.key: (k.table, k.pooling) for k in tables.lookups}
    assert reads["sparse.tags"] == ("sparse.tags", "mean")
    assert reads["sequences.history.fields.item"] == ("item", "none")


def test_sparse_group_holds_every_lookup(features):
    batch = random_batch(features, 4, lengths=[2, 0, 1, 3])
    group = sparse_group(batch, table_set(features, 8).lookups)
    assert group.keys == tuple(k.key for k in table_set(features, 8).lookups)
    assert group.offsets_per_key is not None
    assert group.offsets_per_key[-1] == group.values.numel() == int(group.lengths.sum())
    assert torch.equal(group["sparse.tags"].values, batch.sparse["tags"].values)
    events = group["sequences.history.fields.item"]
    assert torch.equal(events.values, batch.sequences["history"].fields["item"])
    assert torch.equal(events.offsets, batch.sequences["history"].offsets)


def test_sparse_group_reorders_keys_and_ignores_foreign_ones(features):
    batch = random_batch(features, 3)
    jagged = {k: batch.sparse[k] for k in reversed(batch.sparse.keys)} | {"foreign": ids([1], [2], [3])}
    other = Batch(size=3, sparse=SparseGroup.from_jagged(jagged), sequences=batch.sequences)
    lookups = table_set(features, 8).lookups
    assert torch.equal(sparse_group(other, lookups).values, sparse_group(batch, lookups).values)


def test_sparse_group_names_what_is_missing(features):
    lookups = table_set(features, 8).lookups
    batch = random_batch(features, 2)
    with pytest.raises(BatchError, match=r"no sparse feature 'user'"):
        sparse_group(Batch(size=2, sequences=batch.sequences), lookups)
    with pytest.raises(BatchError, match="no history 'history'"):
        sparse_group(Batch(size=2, sparse=batch.sparse), lookups)
    slack = SequenceGroup(torch.tensor([0, 1, 2]), {f: v[:0].new_zeros(5) for f, v in batch.sequences["history"].fields.items()})
    with pytest.raises(BatchError, match="5 events are stored, the offsets end at 2"):
        sparse_group(Batch(size=2, sparse=batch.sparse, sequences={"history": slack}), lookups)


@pytest.mark.parametrize("sparse", [True, False])
def test_local_tables_pool_and_look_up(sparse):
    features = Features.model_validate(
        {"sparse": {"a": {"rows": 9, "dim": 3}, "m": {"rows": 9, "dim": 3, "pooling": "mean"}}, "labels": {"y": {}}}
    )
    tables = LocalTables(table_set(features, 4), sparse=sparse)
    group = SparseGroup.from_jagged({"sparse.a": ids([1, 1, 8], [], [4]), "sparse.m": ids([0, 2], [5], [])})
    out = tables(group)
    wa, wm = tables.weight("sparse.a"), tables.weight("sparse.m")
    assert torch.allclose(out["sparse.a"], torch.stack([2 * wa[1] + wa[8], torch.zeros(3), wa[4]]))
    assert torch.allclose(out["sparse.m"], torch.stack([(wm[0] + wm[2]) / 2, wm[5], torch.zeros(3)]))
    out["sparse.a"].sum().backward()
    assert wa.grad.is_sparse == sparse
    dense = wa.grad.to_dense() if sparse else wa.grad
    assert dense[:, 0].tolist() == [0, 2, 0, 0, 1, 0, 0, 0, 1]


def test_local_tables_weighted_bags():
    features = Features.model_validate({"sparse": {"m": {"rows": 9, "dim": 3, "pooling": "mean"}}, "labels": {"y": {}}})
    tables = LocalTables(table_set(features, 4))
    group = SparseGroup.from_jagged({"sparse.m": ids([0, 2], [], [5])}, {"sparse.m": torch.tensor([1.0, 3.0, 0.5])})
    w = tables.weight("sparse.m")
    assert torch.allclose(tables(group)["sparse.m"], torch.stack([(w[0] + 3 * w[2]) / 4, torch.zeros(3), w[5]]))


def test_an_id_outside_its_table_names_the_feature(parts):
    features, tables, local = parts
    batch = random_batch(features, 3, lengths=[1, 1, 1])
    batch.sequences["history"].fields["item"][1] = 50
    with pytest.raises(DataError, match=r"id 50 is outside \[0, 50\), the rows of table 'item'(.|\n)*sequences.history.fields.item"):
        local(sparse_group(batch, tables.lookups))


def test_deferred_tables_allocate_later(features):
    with deferred_tables():
        tables = LocalTables(table_set(features, 8))
    assert all(t.is_meta for _, t in tables.state_items())
    tables.to_empty(device="cpu").reset_parameters()
    names = [n for n, _ in tables.state_items()]
    assert "item.weight" in names
    assert "sequences.history.fields.action.accumulator" in names
    assert tables.weight("item").std().item() == pytest.approx(8**-0.5, rel=0.2)
    assert float(tables.accumulator("item").sum()) == 0
    assert tables.table_states()["item"].weight is tables.weight("item")


@pytest.mark.parametrize("count", [None, 3, 6, 7, 20])
def test_feature_tokens_give_the_tokens_asked_for(parts, count):
    features, tables, local = parts
    tokens = FeatureTokens(features, tables, 12, count=count)
    batch = random_batch(features, 5)
    x = tokens(batch, local(sparse_group(batch, tables.lookups)))
    assert x.shape == (5, count or 6, 12)  # four sparse features, one vector, one token for the dense ones
    assert tokens.count == (count or 6)


def test_feature_tokens_take_embeddings_of_the_same_width_as_they_are(parts):
    features, tables, local = parts
    batch = random_batch(features, 5)
    embedded = local(sparse_group(batch, tables.lookups))
    x = FeatureTokens(features, tables, 8)(batch, embedded)
    assert torch.equal(x[:, 1], embedded["sparse.item"])


def test_feature_tokens_refuse_other_inputs(parts):
    features, tables, local = parts
    tokens = FeatureTokens(features, tables, 8)
    batch = random_batch(features, 2)
    embedded = local(sparse_group(batch, tables.lookups))
    with pytest.raises(BatchError, match="dense columns are age, price"):
        tokens(Batch(size=2, dense=batch.dense, dense_names=("age", "price"), vectors=batch.vectors), embedded)
    with pytest.raises(BatchError, match="nothing for the vector feature 'creative'"):
        tokens(Batch(size=2, dense=batch.dense, dense_names=batch.dense_names), embedded)
    only_history = Features.model_validate({"sequences": {"h": {"fields": {"a": {"rows": 3}}}}, "labels": {"y": {}}})
    with pytest.raises(ConfigError, match="no feature of the sample itself"):
        FeatureTokens(only_history, table_set(only_history, 8), 8)


def test_event_tokens_sum_equals_concat_with_the_same_matrices(parts):
    features, tables, local = parts
    batch = random_batch(features, 4)
    embedded = local(sparse_group(batch, tables.lookups))
    one = EventTokens("history", features, tables, 10, EventConfig(combine="sum"))
    other = EventTokens("history", features, tables, 10, EventConfig(combine="concat"))
    with torch.no_grad():
        other.maps[0].weight.copy_(torch.cat([m.weight for m in one.maps], 1))
        other.maps[0].bias.copy_(torch.stack([m.bias for m in one.maps]).sum(0))
    assert torch.allclose(one(batch, embedded), other(batch, embedded), atol=1e-6)


def test_the_candidate_is_the_event_with_its_ids(parts):
    """An event whose target fields are the candidate's ids, and whose other fields are the learned vectors, has the candidate's token."""
    features, tables, local = parts
    events = EventTokens("history", features, tables, 10)
    batch = random_batch(features, 4, lengths=[1, 1, 1, 1])
    fields = dict(batch.sequences["history"].fields)
    fields["item"], fields["category"] = batch.sparse["item"].values, batch.sparse["category"].values
    batch = Batch(size=4, sparse=batch.sparse, sequences={"history": SequenceGroup(batch.sequences["history"].offsets, fields)})
    embedded = local(sparse_group(batch, tables.lookups))
    parts = events.fields(batch, embedded)
    parts[2:] = [m.expand(4, -1) for m in events.fields.missing]
    assert torch.allclose(events._combine(parts), events.candidate(embedded, 4), atol=1e-6)


def test_multi_valued_event_fields_are_pooled_inside_the_event():
    features = Features.model_validate(
        {"sparse": {"a": {"rows": 5}}, "sequences": {"h": {"fields": {"tags": {"rows": 9, "pooling": "mean"}}}}, "labels": {"y": {}}}
    )
    tables = table_set(features, 4)
    local = LocalTables(tables)
    group = SequenceGroup(torch.tensor([0, 2, 2, 3]), {"tags": ids([1, 3], [], [8])})
    batch = Batch(size=3, sparse=SparseGroup.from_jagged({"a": ids([0], [1], [2])}), sequences={"h": group})
    packed = sparse_group(batch, tables.lookups)
    assert packed["sequences.h.fields.tags"].lengths.tolist() == [2, 0, 1]
    events = EventTokens("h", features, tables, 4, EventConfig(combine="sum"), candidate=False)
    w = local.weight("sequences.h.fields.tags")
    assert torch.allclose(events(batch, local(packed)), torch.stack([(w[1] + w[3]) / 2, torch.zeros(4), w[8]]))


def test_ages_are_counted_from_the_sample_in_its_own_unit():
    features = Features.model_validate(
        {
            "timestamp": "t",
            "timestamp_unit": "ms",
            "sparse": {"a": {"rows": 5}},
            "sequences": {"h": {"fields": {"b": {"rows": 9}}, "timestamps": "times"}},
            "labels": {"y": {}},
        }
    )
    events = EventTokens("h", features, table_set(features, 4), 4, EventConfig(time_buckets=8, time_scale=10.0))
    group = SequenceGroup(torch.tensor([0, 2, 2, 3]), {"b": torch.zeros(3, dtype=torch.int64)}, torch.tensor([90, 100, 205]))
    now = Batch(size=3, sequences={"h": group}, timestamps=torch.tensor([100_000, 0, 200_000]))
    assert torch.allclose(events.rows(now).ages, torch.log1p(torch.tensor([1.0, 0.0, 0.0])))  # an event of the future has age 0
    unknown = Batch(size=3, sequences={"h": group})
    assert torch.allclose(events.rows(unknown).ages, torch.log1p(torch.tensor([1.0, 0.0, 0.0])))
    with pytest.raises(BatchError, match="no event times"):
        events.rows(Batch(size=3, sequences={"h": SequenceGroup(group.offsets, group.fields)}))


def test_time_buckets_cover_the_range_and_saturate(parts):
    features, tables, _ = parts
    events = EventTokens("history", features, tables, 4, EventConfig(time_buckets=16, time_scale=1.0, time_max=1000.0))
    ages = torch.log1p(torch.tensor([0.0, 1.0, 30.0, 999.0, 1e9]))
    assert events._bucket(ages).tolist() == [0, 1, 7, 15, 15]


def test_places_count_from_the_newest_event(parts):
    features, tables, _ = parts
    events = EventTokens("history", features, tables, 4, EventConfig(positions=2))
    rows = Rows(torch.tensor([0, 3, 3, 4]), 4, 3)
    placed = events.placed(torch.zeros(4, 4), Batch(size=3), {}, rows)
    assert torch.equal(placed, events.place.weight[torch.tensor([2, 2, 1, 1])])


def test_what_the_features_cannot_give_is_refused():
    base = {
        "tables": {"t": {"rows": 5}},
        "sparse": {"a": {"rows": 5}},
        "sequences": {"h": {"fields": {"b": {"table": "t"}}, "target": {"b": "a"}}},
        "labels": {"y": {}},
    }
    features = Features.model_validate(base)
    with pytest.raises(ConfigError, match=r"reads table 't', its target feature 'a' reads 'sparse.a'"):
        EventTokens("h", features, table_set(features, 4), 4)
    base["sparse"] = {"a": {"table": "t"}}
    features = Features.model_validate(base)
    with pytest.raises(ConfigError, match="time_buckets needs the events' times"):
        EventTokens("h", features, table_set(features, 4), 4, EventConfig(time_buckets=3))


def test_row_layout():
    rows = Rows(torch.tensor([0, 2, 2, 5]), 5, 3)
    assert rows.sample.tolist() == [0, 0, 2, 2, 2]
    assert rows.position.tolist() == [0, 1, 0, 1, 2]
    assert rows.recency.tolist() == [1, 0, 2, 1, 0]
    more = rows.extended(2, True)
    assert more.offsets.tolist() == [0, 5, 8, 14]
    assert (more.count, more.max_length, more.num_targets.tolist(), more.context_len.tolist()) == (14, 6, [1, 1, 1], [2, 2, 2])
    values = torch.arange(14.0).unsqueeze(1)
    assert more.newest(values, 2).squeeze(2).tolist() == [[2, 3], [0, 0], [11, 12]]
    assert more.first(values, 2).squeeze(2).tolist() == [[0, 1], [5, 6], [8, 9]]
    assert more.last(values).flatten().tolist() == [4, 7, 13]


GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
def test_rows_of_a_learned_table_in_a_lower_precision(device):
    """The rows are the table's, rounded; the gradient sums in fp32, where sums of bf16 would have stood still long before."""
    table = torch.nn.Embedding(3, 8, device=device)
    places = torch.zeros(20_000, dtype=torch.int64, device=device)
    places[:7] = 2
    rows = rows_in(table, places, torch.bfloat16)
    assert torch.equal(rows, table.weight.bfloat16()[places])
    rows.backward(torch.ones_like(rows))
    assert table.weight.grad.dtype == torch.float32
    assert table.weight.grad.sum(1).tolist() == [8.0 * 19_993, 0.0, 56.0]
    own = rows_in(table, places[:9], torch.float32)
    assert torch.equal(own, table(places[:9]))


def test_events_stay_in_the_precision_of_their_products():
    """Ages and places that are added under autocast do not make fp32 rows of all events."""
    features, options = sample_features(), EventConfig(time_buckets=4, positions=3)
    tables = LocalTables(table_set(features, 8))
    name = next(n for n, s in features.sequences.items() if s.timestamps is not None)
    tokens = EventTokens(name, features, tables.table_set, 16, options)
    batch = random_batch(features, 5)
    embedded = tables(sparse_group(batch, tables.table_set.lookups))
    plain = tokens.placed(tokens(batch, embedded), batch, embedded, tokens.rows(batch))
    with torch.autocast("cpu", torch.bfloat16):
        cast = tokens.placed(tokens(batch, embedded), batch, embedded, tokens.rows(batch))
    assert plain.dtype == torch.float32
    assert cast.dtype == torch.bfloat16
    assert torch.allclose(cast.float(), plain, rtol=2e-2, atol=6e-2)


@pytest.mark.parametrize("combine", ["concat", "masknet", "sum"])
@pytest.mark.parametrize("learned", [{"time_buckets": 4}, {"positions": 3}, {"time_buckets": 4, "positions": 3}, {}])
@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_tokens_at_once_are_those_in_steps(combine, learned, scale):
    features = sample_features()
    tables = LocalTables(table_set(features, 8))
    name = next(n for n, s in features.sequences.items() if s.timestamps is not None)
    tokens = EventTokens(
        name, features, tables.table_set, 16, EventConfig(**{"combine": combine, "scale": scale, "time_buckets": 0} | learned)
    )
    batch = random_batch(features, 5)
    embedded = tables(sparse_group(batch, tables.table_set.lookups))
    rows = tokens.rows(batch)
    for cast in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            expected = tokens.placed(tokens(batch, embedded), batch, embedded, rows)
            found = tokens.at_once(batch, embedded, rows)
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected)

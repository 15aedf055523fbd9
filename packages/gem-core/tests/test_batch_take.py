"""Batch.take against cutting single samples out."""

from __future__ import annotations

import pytest
import torch

from gem_core.batch import Batch, Requests, SequenceGroup, SparseGroup
from gem_core.jagged import Jagged

B = 7


def batch(single: bool) -> Batch:
    torch.manual_seed(0)
    events = torch.tensor([0, 3, 1, 0, 2, 5, 1])
    inner = torch.randint(0, 3, (int(events.sum()),))
    bags = {"a": torch.ones(B, dtype=torch.int64), "b": torch.ones(B, dtype=torch.int64) if single else torch.tensor([2, 0, 1, 0, 3, 1, 0])}
    sparse = {k: Jagged.from_lengths(torch.randint(0, 99, (int(n.sum()),)), n) for k, n in bags.items()}
    weights = {k: torch.rand(j.values.shape[0]) for k, j in sparse.items()}
    group = SequenceGroup(
        torch.cat([torch.zeros(1, dtype=torch.int64), events.cumsum(0)]),
        {
            "id": torch.arange(int(events.sum())),
            "vector": torch.rand(int(events.sum()), 2),
            "many": Jagged.from_lengths(torch.arange(int(inner.sum())), inner),
        },
        torch.arange(int(events.sum())) * 10,
        5,
    )
    return Batch(
        size=B,
        dense=torch.rand(B, 2),
        dense_names=("x", "y"),
        vectors={"v": torch.rand(B, 3)},
        sparse=SparseGroup.from_jagged(sparse, weights),
        sequences={"h": group},
        labels=torch.rand(B, 1),
        label_names=("ctr",),
        label_mask=torch.rand(B, 1) > 0.5,
        weights=torch.rand(B),
        num_targets=torch.arange(B),
        requests=Requests(torch.tensor([0, 0, 1, 1, 1, 0, 1]), {"r": SequenceGroup(torch.tensor([0, 1, 3]), {"id": torch.arange(3)})}),
        timestamps=torch.arange(B),
        columns={"c": torch.arange(B)},
        sample_ids=[f"s{i}" for i in range(B)],
    ).validate()


@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize("rows", [[5, 0, 6, 1, 4, 2, 3], [3], [4, 4, 1], []])
def test_take_picks_samples_in_any_order(rows: list[int], single: bool) -> None:
    whole = batch(single)
    taken = whole.take(torch.tensor(rows, dtype=torch.int64)).validate()
    assert len(taken) == len(rows)
    assert taken.sample_ids == [f"s{i}" for i in rows]
    for at, row in enumerate(rows):
        one, want = taken.select_range(at, at + 1), whole.select_range(row, row + 1)
        for name in ("dense", "labels", "label_mask", "weights", "num_targets", "timestamps"):
            assert torch.equal(getattr(one, name), getattr(want, name))
        assert torch.equal(one.vectors["v"], want.vectors["v"])
        assert torch.equal(one.columns["c"], want.columns["c"])
        assert torch.equal(one.requests.kv_index, want.requests.kv_index)
        assert torch.equal(one.sparse.values, want.sparse.values)
        assert torch.equal(one.sparse.weights, want.sparse.weights)
        assert torch.equal(one.sparse.lengths, want.sparse.lengths)
        a, b = one.sequences["h"], want.sequences["h"]
        assert torch.equal(a.offsets, b.offsets)
        assert torch.equal(a.timestamps, b.timestamps)
        assert torch.equal(a.fields["id"], b.fields["id"])
        assert torch.equal(a.fields["vector"], b.fields["vector"])
        assert [t.tolist() for t in a.fields["many"].to_list()] == [t.tolist() for t in b.fields["many"].to_list()]

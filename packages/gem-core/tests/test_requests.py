"""Histories stored once a request: expansion against plain Python, and the models that read such batches."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gem_core import load_config
from gem_core.batch import Requests, SequenceGroup, SparseGroup
from gem_core.config import resolve
from gem_core.jagged import Jagged
from gem_core.model.loss import task_loss
from gem_core.plugins import manager
from gem_core.requests import by_request, expanded, history_lengths, sizes
from gem_core.sources.synthetic import SyntheticConfig, SyntheticSource
from gem_core.testing.sources import assert_same_batch
from gem_core.train.feed import Feed


def synthetic(n=12):
    config = SyntheticConfig(rows=64, eval_rows=8, test_rows=8, users=20, length={"law": "lognormal", "mean": 6, "max": 16})
    return next(iter(SyntheticSource(config, split="train", batch_size=n)))


def repeating(index, first):
    """A batch whose samples have the histories that ``index`` and ``first`` say, stored for every sample."""
    batch = synthetic(len(index))
    shared = batch.take(first[index]).sequences
    return replace(batch, sequences=shared)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=9), st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=40)
def test_expanding_repeats_every_kind_of_field(index, random):
    lengths = [random.randrange(4) for _ in range(4)]
    n = sum(lengths)
    inner = [random.randrange(3) for _ in range(n)]
    field = Jagged.from_lengths(torch.arange(sum(inner)), torch.tensor(inner, dtype=torch.int64))
    fields = {"id": torch.arange(n), "wide": torch.randn(n, 2), "tags": field}
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    group = SequenceGroup(offsets, fields, torch.arange(n) * 10, 5)
    sparse = SparseGroup.from_jagged({"r": Jagged(torch.arange(n), offsets)}, {"r": torch.rand(n)})
    batch = replace(synthetic(len(index)), sequences={}, requests=Requests(torch.tensor(index), {"h": group}, sparse)).validate()
    assert replace(batch, requests=Requests(torch.tensor(index), {}, sparse)).validate() is not None
    found = expanded(batch, sizes(batch)).validate()
    assert found.requests is None
    rows = {k: [v.tolist() for v in group.jagged(k).to_list()] for k in ("id", "wide")}
    for key, values in rows.items():
        assert [v.tolist() for v in found.sequences["h"].jagged(key).to_list()] == [values[i] for i in index]
    events = field.to_list()
    want = [events[e].tolist() for i in index for e in rows["id"][i]]
    assert [v.tolist() for v in found.sequences["h"].fields["tags"].to_list()] == want
    assert found.sequences["h"].timestamps.tolist() == [10 * e for i in index for e in rows["id"][i]]
    assert [v.tolist() for v in found.sparse["r"].to_list()] == [rows["id"][i] for i in index]
    assert torch.equal(found.sparse["item"].values, batch.sparse["item"].values)
    assert torch.equal(history_lengths(batch)["h"], found.sequences["h"].lengths)


INDEX, FIRST = torch.tensor([0, 0, 1, 1, 1, 2, 0, 3]), torch.tensor([0, 2, 5, 7])


@pytest.mark.parametrize("name", ["gem", "din", "hstu", "dlrm"])
def test_models_give_what_the_repeated_histories_give(name):
    """Logits, losses, gradients and FLOPs."""
    plain = repeating(INDEX, FIRST)
    shared = by_request(plain, INDEX, FIRST).validate()
    assert shared.tokens < plain.tokens
    assert_same_batch(expanded(shared), plain)
    overrides = ["model.preset=tiny"] if name == "gem" else []
    resolved = resolve(load_config(None, [f"model.name={name}", *overrides]))
    torch.manual_seed(0)
    model = manager().find("model", name).build(resolved.model, resolved.config.features).eval()
    grads = []
    for batch in (plain, shared):
        model.zero_grad()
        out = model(batch)
        loss = task_loss(out, batch, task_weights=[1.0] * len(out.task_names), total=1.0)
        loss.backward()
        dense = {n: p.grad.to_dense() if p.grad.is_sparse else p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        grads.append((out.logits.detach(), loss.detach(), dense))
    assert torch.equal(grads[0][0], grads[1][0])
    assert grads[0][2].keys() == grads[1][2].keys()
    for key, grad in grads[0][2].items():
        assert torch.equal(grad, grads[1][2][key]), key
    assert model.flops(plain) == model.flops(shared)


def test_the_feed_repeats_on_the_device():
    shared = by_request(repeating(INDEX, FIRST), INDEX, FIRST)

    class Once:
        def __iter__(self):
            yield shared

        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            pass

    (fed,) = Feed(Once(), torch.device("cpu"))
    assert fed.host is shared
    assert_same_batch(fed.batch, repeating(INDEX, FIRST))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_expanding_does_not_wait_for_the_device():
    shared = by_request(repeating(INDEX, FIRST), INDEX, FIRST)
    known, there = sizes(shared), shared.to("cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = expanded(there, known)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_same_batch(found.to("cpu"), expanded(shared))

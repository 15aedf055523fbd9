"""Next-item models: what each position sees and is asked, the losses written out, negatives, overfitting, FLOPs, refused configurations."""

import math

import pytest
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from gem_core.batch import Batch, SequenceGroup, SparseGroup
from gem_core.config import Features
from gem_core.errors import BatchError, ConfigError, DataError
from gem_core.jagged import Jagged, lengths_to_offsets
from gem_core.model import builtin_specs
from gem_core.model.config import RetrievalConfig
from gem_core.model.contract import Retrieval
from gem_core.model.loss import batch_total, task_loss
from gem_core.model.retrieval import following_items, next_items
from gem_core.model.retrieval_loss import NegativeSampler, position_losses
from gem_core.testing.models import random_batch, take

ITEMS = 50
SECTIONS = {
    "tables": {"item": {"rows": ITEMS, "dim": 16, "init_std": 0.1}},
    "sparse": {"item": {"table": "item"}, "user": {"rows": 20}},
    "sequences": {
        "h": {"fields": {"item": {"table": "item"}, "action": {"rows": 3}}, "timestamps": "t", "target": {"item": "item"}, "max_length": 16}
    },
    "next_item": {"item": "item", "pad": 0},
}
FEATURES = Features.model_validate(SECTIONS)
MODELS = {
    "sasrec": {"dim": 16, "ffn": 32, "dropout": 0.0, "positions": 16},
    "hstu": {"dim": 24, "qk_dim": 8, "v_dim": 8, "position_bias": 8, "time_bias": 6, "positions": 16, "count_from": "oldest"},
    "gem": {"dim": 16, "sequence": {"dim": 24, "attention": ["causal", "causal_window"], "window": 4, "ffn": 32, "rotary": "position"}},
}


def features(**changes):
    return Features.model_validate({**SECTIONS, **changes})


def build(name, declared=FEATURES, **retrieval):
    spec = next(s for s in builtin_specs() if s.name == name)
    torch.manual_seed(0)
    options = {**MODELS.get(name, {}), **({"retrieval": retrieval} if name in MODELS else {})}
    return spec.build(spec.config_type.model_validate(options), declared)


def batch_of(size=9, **options):
    batch = random_batch(FEATURES, size, **options)
    group = batch.sequences["h"]
    fields = {**group.fields, "item": group.fields["item"].clamp(min=1)}
    sparse = SparseGroup.from_jagged(
        {k: Jagged(batch.sparse[k].values.clamp(min=1 if k == "item" else 0), batch.sparse[k].offsets) for k in batch.sparse.keys}
    )
    return Batch(size=size, sparse=sparse, sequences={"h": SequenceGroup(group.offsets, fields, group.timestamps, group.max_length)})


def test_targets_are_the_items_one_step_later():
    ids = torch.tensor([7, 8, 9, 4, 5, 0, 6])
    group = SequenceGroup(torch.tensor([0, 3, 3, 5, 7]), {"item": ids, "action": ids % 3}, ids, 16)
    sparse = SparseGroup.from_jagged({"item": Jagged.from_lengths(torch.tensor([10, 11, 12, 13]), torch.ones(4, dtype=torch.int64))})
    batch = next_items(Batch(size=4, sparse=sparse, sequences={"h": group}), FEATURES)
    assert batch.targets.tolist() == [8, 9, 10, 5, 12, 6, 13]
    assert batch.target_mask.tolist() == [True] * 7
    assert ids.tolist() == [7, 8, 9, 4, 5, 0, 6], "the history itself must not change"
    padded = next_items(
        Batch(size=4, sparse=sparse, sequences={"h": SequenceGroup(group.offsets, {**group.fields, "item": ids.roll(1)})}), FEATURES
    )
    assert padded.target_mask.tolist() == [t != 0 for t in padded.targets.tolist()]
    assert batch_total(padded) == padded.target_mask.sum() == 6
    assert next_items(padded, FEATURES) is padded, "targets that the source delivers stay"


def test_a_sample_needs_one_following_item():
    sparse = SparseGroup.from_jagged({"item": Jagged(torch.tensor([1, 2]), torch.tensor([0, 2, 2]))})
    with pytest.raises(DataError, match="2 samples have no or several items"):
        following_items(Batch(size=2, sparse=sparse), FEATURES)
    with pytest.raises(BatchError, match="no sparse feature 'item'"):
        following_items(Batch(size=2), FEATURES)


@pytest.mark.parametrize("name", MODELS)
def test_no_position_knows_a_later_event_or_the_item_to_be_found(name):
    model = build(name, loss="softmax").eval()
    batch = batch_of(6, lengths=[5, 8, 1, 0, 7, 3])

    def states(batch):
        embedded = model.tables(model._group(_inputs(model, batch), None, batch))
        found, history = model.encode(batch, embedded)
        return history.rows.events(found)

    before = states(batch)
    group = batch.sequences["h"]
    place = torch.arange(24) - group.offsets[:-1].repeat_interleave(group.lengths)
    later = {k: torch.where(place >= 3, (v + 1) % (3 if k == "action" else ITEMS), v) for k, v in group.fields.items()}
    times = torch.where(place >= 3, group.timestamps + 5000, group.timestamps)
    sparse = SparseGroup(
        batch.sparse.keys, torch.cat([(batch.sparse["item"].values + 3) % ITEMS, batch.sparse["user"].values]), batch.sparse.lengths
    )
    changed = Batch(size=6, sparse=sparse, sequences={"h": SequenceGroup(group.offsets, later, times, group.max_length)})
    after = states(changed)
    assert torch.allclose(after[place < 3], before[place < 3], atol=1e-6)
    assert not torch.allclose(after[place >= 3], before[place >= 3], atol=1e-2)


def _inputs(model, batch):
    from gem_core.model.tables import sparse_group

    return sparse_group(batch, model.table_set.lookups[:-1])


@pytest.mark.parametrize("name", ["hstu", "gem"])
def test_features_of_the_user_reach_the_states_and_sasrec_reads_none(name):
    batch = batch_of(4, lengths=[3, 4, 2, 5])
    other = SparseGroup(
        batch.sparse.keys, torch.cat([batch.sparse["item"].values, (batch.sparse["user"].values + 1) % 20]), batch.sparse.lengths
    )
    moved = Batch(size=4, sparse=other, sequences=batch.sequences)
    some = batch.sparse["user"].lengths > 0
    model = build(name, loss="softmax").eval()
    assert not torch.allclose(model(moved).query[some], model(batch).query[some], atol=1e-4)
    assert [k.key for k in build("sasrec", loss="softmax").table_set.lookups] == [
        "sequences.h.fields.item", "sequences.h.fields.action", "next_item",
    ]  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("loss", ["bce", "gbce", "sampled_softmax", "softmax"])
def test_every_parameter_learns_and_odd_histories_train(name, loss):
    model = build(name, loss=loss, negatives=3, sampling="popularity")
    batch = next_items(batch_of(8, lengths=[0, 1, 6, 0, 2, 9, 16, 1]), FEATURES)
    assert isinstance(model, Retrieval)
    value = task_loss(model(batch), batch)
    value.backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        gradient = parameter.grad.coalesce().values() if parameter.grad.is_sparse else parameter.grad
        assert bool(torch.isfinite(gradient).all()), key
        assert bool(gradient.any()), key
    nothing = next_items(batch_of(3, lengths=[0, 0, 0]), FEATURES)
    assert task_loss(model(nothing), nothing).item() == 0.0
    model.eval()
    query = model(batch).query
    assert query.shape == (8, 16)
    assert bool((query[[0, 3]] == 0).all()), "without history all items score alike"
    alone = model(take(batch_of(8, lengths=[0, 1, 6, 0, 2, 9, 16, 1]), [5])).query
    assert torch.allclose(alone[0], query[5], atol=1e-5)


def test_forward_reads_nothing_from_the_device():
    for name in MODELS:
        with torch.device("meta"):
            model = build(name, loss="gbce", negatives=4, false_negatives="history")
        batch = next_items(batch_of(5, lengths=[3, 0, 2, 4, 1]), FEATURES).to("meta")
        assert model(batch).loss.shape == ()
        assert model.eval()(batch).query.shape == (5, 16)


@pytest.mark.parametrize("loss", ["bce", "gbce", "sampled_softmax"])
@pytest.mark.parametrize("false_negatives", ["keep", "target", "history"])
def test_losses_written_out(loss, false_negatives):
    """Position by position in Python, from the definitions of the papers."""
    torch.manual_seed(1)
    n, k, rows, width = 7, 40, 12, 5
    config = RetrievalConfig(loss=loss, negatives=k, false_negatives=false_negatives, t=0.6)
    sampler = NegativeSampler(rows, 0, config)
    events, offsets = torch.randint(1, rows, (n,)), torch.tensor([0, 3, 3, 7])
    targets = torch.randint(1, rows, (n,))
    draw = sampler(targets, torch.ones(n), events, offsets, width)
    assert draw.whole
    assert draw.negatives.shape == (n, k)
    states, items = torch.randn(n, width, dtype=torch.float64), torch.randn(rows, width, dtype=torch.float64)
    got = position_losses(states, items, draw, config)
    for i in range(n):
        own = float(states[i] @ items[targets[i]])
        begin, end = (0, 3) if i < 3 else (3, 7)
        out = set() if false_negatives == "keep" else {int(targets[i])}
        out |= set(events[begin:end].tolist()) if false_negatives == "history" else set()
        scores = [float(states[i] @ items[j]) for j in draw.negatives[i].tolist() if j not in out]
        alpha = k / (rows - 2)
        beta = 1.0 if loss == "bce" else alpha * (0.6 * (1 - 1 / alpha) + 1 / alpha)
        if loss == "sampled_softmax":
            expected = math.log(math.exp(own) + sum(map(math.exp, scores))) - own
        else:
            sigma = [1 / (1 + math.exp(-s)) for s in (own, *scores)]
            expected = -math.log(sigma[0] ** beta) - sum(math.log(1 - s) for s in sigma[1:])
        assert float(got[i]) == pytest.approx(expected, rel=1e-9), i


@pytest.mark.parametrize("shared", [False, True])
def test_gathered_vectors_give_the_losses_of_the_whole_product(shared):
    torch.manual_seed(2)
    config = RetrievalConfig(loss="sampled_softmax", negatives=3, shared=shared, sampling="popularity", log_q=True)
    sampler = NegativeSampler(400, None, config)
    events = torch.randint(400, (6,))
    draw = sampler(torch.randint(400, (6,)), torch.ones(6), events, torch.tensor([0, 2, 6]), 4)
    assert not draw.whole
    assert draw.ids.shape == (6 + 3 * (1 if shared else 6),)
    assert draw.negatives.shape == ((3,) if shared else (6, 3))
    states, items = torch.randn(6, 4), torch.randn(400, 4)
    got = position_losses(states, items[draw.ids], draw, config)
    scores = states @ items.T - sampler.counts.div(sampler.counts.sum()).log()
    for i in range(6):
        drawn = draw.negatives if shared else draw.negatives[i]
        kept = [scores[i, j] for j in drawn.tolist() if j != int(draw.targets[i])]
        own = scores[i, draw.targets[i]]
        assert float(got[i]) == pytest.approx(float(torch.logsumexp(torch.stack([own, *kept]), 0) - own), rel=1e-5)


def test_softmax_is_over_all_items_but_the_pad():
    states, items = torch.randn(5, 4), torch.randn(9, 4)
    targets = torch.tensor([1, 8, 3, 3, 5])
    config = RetrievalConfig(loss="softmax")
    draw = NegativeSampler(9, 0, config)(targets, torch.ones(5), targets, torch.tensor([0, 5]), 4)
    expected = F.cross_entropy((states @ items.T)[:, 1:], targets - 1, reduction="none")
    assert torch.allclose(position_losses(states, items, draw, config), expected, atol=1e-6)


@pytest.mark.parametrize("loss", ["bce", "gbce", "sampled_softmax"])
def test_losses_are_sums_in_fp32_under_autocast(loss):
    torch.manual_seed(4)
    config = RetrievalConfig(loss=loss, negatives=256, false_negatives="keep")
    states, items, targets = torch.randn(5, 16) * 1e-3, torch.randn(400, 16), torch.arange(5)
    draw = NegativeSampler(400, None, config)(targets, torch.ones(5), targets, torch.tensor([0, 5]), 16)
    expected = position_losses(states, items, draw, config)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.allclose(position_losses(states, items, draw, config), expected, rtol=1e-4, atol=0)


def test_a_masked_position_gives_neither_loss_nor_gradient():
    batch = next_items(batch_of(3, lengths=[4, 2, 3]), FEATURES)
    masked = torch.ones(9, dtype=torch.bool)
    masked[[1, 8]] = False
    targets = batch.targets.clone()
    targets[[1, 8]] = 0  # the pad, whose score is -inf under softmax
    for loss in ("softmax", "bce"):
        model = build("sasrec", loss=loss, negatives=2)
        values = []
        for wanted in (targets, batch.targets):
            torch.manual_seed(3)
            output = model(Batch(size=3, sequences=batch.sequences, targets=wanted, target_mask=masked))
            values.append(output.loss)
        assert torch.isfinite(values[0])
        assert values[0].item() == pytest.approx(values[1].item(), rel=1e-6)
        values[0].backward()
        assert all(bool(torch.isfinite(p.grad.to_dense() if p.grad.is_sparse else p.grad).all()) for p in model.parameters())


def test_negatives_follow_their_law_and_spare_the_pad():
    torch.manual_seed(4)
    uniform = NegativeSampler(11, 4, RetrievalConfig(loss="bce", negatives=5, shared=True))
    drawn = torch.stack(
        [uniform(torch.ones(1).long(), torch.ones(1), torch.ones(1).long(), torch.tensor([0, 1]), 8).negatives for _ in range(4000)]
    )
    counts = torch.bincount(drawn.flatten(), minlength=11)
    assert counts[4] == 0
    assert torch.allclose(counts[counts > 0] / 20_000, torch.full((10,), 0.1), atol=0.012)  # 5 standard errors
    popular = NegativeSampler(11, 4, RetrievalConfig(loss="bce", negatives=5000, shared=True, sampling="popularity"))
    targets, weights = torch.tensor([1, 1, 1, 2, 3]), torch.tensor([1.0, 2.0, 1.0, 1.0, 0.0])
    shares = torch.bincount(popular(targets, weights, targets, torch.tensor([0, 5]), 8).negatives, minlength=11) / 5000
    expected = torch.tensor([1, 4, 2, 1, 0, 1, 1, 1, 1, 1, 1]) / 14  # count + 1; the target without weight does not count
    assert shares[4] == 0
    assert torch.allclose(shares, expected, atol=0.03)
    assert "counts" in popular.state_dict()


@pytest.mark.parametrize("name", MODELS)
def test_overfit_100_users(name):
    """Random sequences can only be learnt by heart; then the first place is the right one."""
    model = build(name, loss="softmax")
    batch = next_items(batch_of(100, max_length=8, seed=3), FEATURES)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    model.tables.sparse = False
    for _ in range(120):
        optimizer.zero_grad()
        loss = task_loss(model(batch), batch)
        if loss.item() < 0.3:
            break
        loss.backward()
        optimizer.step()
    model.eval()
    some = batch.sequences["h"].lengths > 0
    best = (model(batch).query @ model.item_vectors(torch.arange(ITEMS)).T).argmax(1)
    right = (best == following_items(batch, FEATURES))[some].float().mean()
    assert right > 0.9, f"{right:.2f} of 100 users, loss {loss.item():.3f}"


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("loss", ["softmax", "bce"])
def test_flops_are_what_runs(name, loss):
    model = build(name, loss=loss, negatives=2)
    batch = next_items(batch_of(5, lengths=[6, 1, 0, 3, 9]), FEATURES)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(batch)
    flops = model.count_flops({"h": torch.tensor([6, 1, 0, 3, 9])}, 5)
    unseen = 2 * 19 * 16 if loss == "bce" else 0  # the targets' products, a sum in torch
    assert flops.forward == counter.get_total_flops() + unseen
    assert sum(model.flops(batch).values()) == flops.training


REFUSED = {
    "attention": {"attention": "full"},
    "candidate": {"candidate": True},
    "cls": {"cls": 1},
    "event.compare": {"event": {"compare": True}},
    "event.time_buckets": {"event": {"time_buckets": 4}},
    "rotary": {"rotary": "time"},
    "next_event": {"next_event": 0.1},
    "pffn.kind": {"pffn": {"kind": "none"}},
}


@pytest.mark.parametrize("key", REFUSED)
def test_gem_refuses_towers_that_look_ahead(key):
    spec = next(s for s in builtin_specs() if s.name == "gem")
    options = {"dim": 16, "sequence": {"dim": 16, "attention": "causal", **REFUSED[key]}}
    with pytest.raises(ConfigError) as error:
        spec.build(spec.config_type.model_validate(options), FEATURES)
    assert f"model.sequence.{key}" in str(error.value)


def test_refused_combinations():
    with pytest.raises(ConfigError, match="'din' scores candidates"):
        build("din")
    with pytest.raises(ConfigError, match="49 negatives are drawn from 49 items"):
        build("sasrec", loss="gbce", negatives=49)
    without_user = features(sparse={"item": {"table": "item"}})
    with pytest.raises(ConfigError, match="there are none"):
        build("gem", without_user)
    spec = next(s for s in builtin_specs() if s.name == "gem")
    with pytest.raises(ConfigError, match="needs the history's tower"):
        spec.build(spec.config_type.model_validate({"sequence": False}), FEATURES)
    with pytest.raises(BatchError, match="no targets"):
        build("sasrec")(batch_of(2))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"next_item": {"item": "nothing"}}, "no sparse feature 'nothing'"),
        ({"next_item": {"item": "user"}}, "0 event fields have the target 'user'"),
        ({"next_item": {"item": "item", "seen": "user"}}, "must read one table"),
        ({"next_item": {"item": "item", "pad": 50}}, "no row of the table"),
    ],
)
def test_declarations_that_cannot_be_meant(changes, message):
    with pytest.raises(ValueError, match=message):
        features(**changes)


def test_offsets_of_the_batch_helper():
    assert batch_of(3, lengths=[1, 0, 2]).sequences["h"].offsets.tolist() == lengths_to_offsets(torch.tensor([1, 0, 2])).tolist()

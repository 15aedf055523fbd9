"""The whole models: options, ablations, candidates, sharing of tables, meta device, compilation, what they refuse."""

import pytest
import torch
from pydantic import ValidationError
from torch._dynamo.testing import CompileCounter

from gem_core.batch import Batch
from gem_core.config.features import Features
from gem_core.errors import BatchError, ConfigError
from gem_core.model import builtin_specs
from gem_core.model.config import DinConfig, GemConfig
from gem_core.model.din import Dice, Din
from gem_core.model.gem import Gem
from gem_core.model.loss import task_loss
from gem_core.model.presets import preset
from gem_core.model.tables import LocalTables
from gem_core.testing.models import random_batch, sample_features, take

TOWER = {"dim": 16, "heads": 2}
SMALL = {"dim": 8, "embedding_dim": 8, "sequence": TOWER}


def gem(features=None, **options):
    torch.manual_seed(0)
    return Gem(GemConfig.model_validate({**SMALL, **options}), features or sample_features())


def with_tower(**options):
    return {"sequence": {**TOWER, **options}}


def two_histories():
    data = sample_features().model_dump(exclude_defaults=True)
    data["sequences"]["views"] = {"fields": {"item": {"table": "item"}}, "target": {"item": "item"}}
    return Features.model_validate(data)


# --- options -----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        with_tower(event={"combine": "sum", "positions": 3, "time_buckets": 4, "compare": True}),
        with_tower(attention=["causal", "none"], pffn={"kind": "none"}),
        with_tower(attention="none", pooling={"seeds": 0, "recent": 3}),
        with_tower(pffn={"keys": 4, "activation": "silu", "scale_in": 0.5, "scale_out": 2.0}, norm="layer"),
        with_tower(layers=1, head_dim=6, rotary="time", qk_norm=True),
        with_tower(candidate=True, pooling={"seeds": 0, "last": True}),
        with_tower(pooling={"seeds": 6, "candidate_queries": 2, "tokens": 3, "kron": 2}, event={"combine": "masknet"}),
        {**with_tower(attention="window", window=2), "comp_skip": True, "layers": 3},
        {"interaction": {"experts": ["dot"], "tokens": 3}, "norm": "rms", "gates": True},
        {"interaction": {"experts": ["dcnv2"], "dcnv2": {"rank": 2, "layers": 3}}, "feature_tokens": 11},
        {"interaction": {"wukong": {"rank": 0, "fm_tokens": 3}, "summary": 5}, "head": {"shared": 4, "hidden": []}},
        {"dropout": 0.5, "embedding_dropout": 0.5, "layers": 3},
    ],
    ids=str,
)
def test_every_option_runs_forward_and_backward(options):
    model = gem(**options).train()
    batch = random_batch(sample_features(), 6)
    output = model(batch)
    assert output.logits.shape == (6, 2)
    task_loss(output, batch).backward()
    missing = [n for n, p in model.named_parameters() if p.grad is None]
    assert not missing


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (with_tower(dim=15), "not a multiple of heads"),
        (with_tower(head_dim=5, pffn={"kind": "norm_gdpa"}), "heads x head_dim must be dim 16"),
        (with_tower(head_dim=5, rotary="position"), "even head_dim"),
        (with_tower(attention="block", candidate=True), "block attention has no candidate"),
        (with_tower(next_event=0.1), "attention must be causal"),
        (with_tower(next_event=0.1, attention="causal", layers=0), "at least one block"),
        ({"interaction": {"tokens": 4, "wukong": {"fm_tokens": 4}}}, "must be below tokens"),
        (with_tower(pooling={"seeds": 0, "tokens": 2}), "tokens needs queries"),
        ({"comp_skip": True, "layers": 2}, "must be odd"),
        ({"comp_skip": True, "layers": 3, **with_tower(attention="causal", next_event=0.1)}, "drop one of the two"),
        ({"sequenze": {}}, "Extra inputs"),
        ({"layers": 0}, "greater than 0"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options, message):
    with pytest.raises(ValidationError, match=message):
        GemConfig.model_validate({**SMALL, **options})


def test_dropout_acts_in_training_only():
    batch = random_batch(sample_features(), 6)
    for option in ({"dropout": 0.5}, {"embedding_dropout": 0.5}, with_tower(dropout=0.5)):
        model = gem(**option)
        assert not torch.equal(model.train()(batch).logits, model(batch).logits), option
        assert torch.equal(model.eval()(batch).logits, model(batch).logits)


def test_without_sequence_the_history_and_its_tables_are_not_there():
    model = gem(sequence=False).eval()
    assert {t.name for t in model.table_set.tables} == {"item", "category", "sparse.user", "sparse.tags"}
    batch = random_batch(sample_features(), 4)
    bare = Batch(size=4, dense=batch.dense, dense_names=batch.dense_names, vectors=batch.vectors, sparse=batch.sparse, labels=batch.labels)
    assert torch.equal(model(bare).logits, model(batch).logits)
    assert model.count_flops({}, 4).attention == {}


def test_the_history_and_its_order_matter():
    model = gem(**with_tower(event={"time_buckets": 8})).eval()
    batch = random_batch(sample_features(), 3, lengths=[5, 5, 5])
    history = batch.sequences["history"]
    other = random_batch(sample_features(), 3, lengths=[5, 5, 5], seed=9).sequences["history"]
    changed = Batch(**{**vars(batch), "sequences": {"history": other}})
    assert not torch.allclose(model(batch).logits, model(changed).logits)
    later = Batch(**{**vars(batch), "timestamps": batch.timestamps + 10**6})
    assert not torch.allclose(model(batch).logits, model(later).logits)
    assert history.timestamps is not None


def test_candidate_and_event_share_their_table():
    model = gem(**with_tower(candidate=True)).train()
    batch = random_batch(sample_features(), 4, lengths=[0, 0, 0, 0])
    task_loss(model(batch), batch).backward()
    touched = model.tables.weight("item").grad.coalesce().indices()[0]
    assert set(touched.tolist()) == set(batch.sparse["item"].values.tolist())


def test_a_group_overrides_the_shared_tower():
    features = two_histories()
    options = {
        "sequence": {**TOWER, "ffn": 8},
        "groups": {"views": {"dim": 24, "layers": 1, "attention": "causal", "pooling": {"seeds": 2}}},
    }
    model = gem(features, **options)
    config = model.config
    assert (config.groups["views"].dim, config.groups["views"].ffn, config.groups["views"].heads) == (24, 8, 2)
    assert GemConfig.model_validate(config.model_dump(mode="json", exclude_none=True)) == config
    assert [sorted(layer.blocks) for layer in model.layers] == [["history", "views"], ["history"]]
    batch = random_batch(features, 5)
    assert model(batch).logits.shape == (5, 2)
    alone = model.eval()(take(batch, [3])).logits
    assert torch.allclose(alone[0], model(batch).logits[3], atol=1e-5)
    assert model.count_flops({"history": torch.tensor([3]), "views": torch.tensor([2])}, 1).forward > 0
    with pytest.raises(ConfigError, match="there is no history 'clicks'"):
        gem(groups={"clicks": {}})


def test_next_event_loss_is_there_in_training_and_sees_no_future():
    model = gem(**with_tower(attention="causal", next_event=0.5, candidate=True, cls=1))
    batch = random_batch(sample_features(), 4, lengths=[5, 2, 0, 1])
    assert model.eval()(batch).aux_losses == {}
    aux = model.train()(batch).aux_losses
    assert list(aux) == ["next_event.history"]
    assert aux["next_event.history"].item() > 0
    seen = {}
    model.next_event["history"].register_forward_hook(lambda _m, inputs, _o: seen.update(states=inputs[0]))
    model.eval().next_event.train()
    model.training = True
    model(batch)
    before = seen["states"]
    fields = dict(batch.sequences["history"].fields)
    fields["dwell"] = fields["dwell"].clone()
    fields["dwell"][4] += 5.0
    later = {
        "history": type(batch.sequences["history"])(batch.sequences["history"].offsets, fields, batch.sequences["history"].timestamps, 5)
    }
    model(Batch(**{**vars(batch), "sequences": later}))
    changed = (seen["states"] != before).any(1)
    assert changed.tolist() == [False] * 4 + [True] + [False] * 3


def test_comp_skip_alternates_and_reuses_what_was_pooled():
    model = gem(**with_tower(attention="window", window=1), comp_skip=True, layers=3).eval()
    blocks = [layer.blocks["history"] for layer in model.layers]
    assert [(b.pffn is not None, b.attention is not None) for b in blocks] == [(True, False), (False, True), (True, False)]
    assert [len(layer.pools) for layer in model.layers] == [1, 0, 1]
    seen = []
    for layer in model.layers:
        layer.register_forward_hook(lambda _m, _i, out: seen.append(out[1]["history"].pooled))
    model(random_batch(sample_features(), 4))
    assert seen[0] is seen[1]
    assert seen[2] is not seen[1]


# --- where it runs -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (with_tower(pffn={"kind": "norm_gdpa"}), [True, True, False]),
        (with_tower(pffn={"kind": "gdpa"}), [False] * 3),
        (with_tower(pffn={"kind": "norm_gdpa"}, pooling={"seeds": 2, "recent": 1}), [False] * 3),
        (with_tower(pffn={"kind": "norm_gdpa"}, cls=1), [False] * 3),
        (with_tower(pffn={"kind": "norm_gdpa"}, attention="causal", next_event=0.1), [False, True, False]),
        (with_tower(pffn={"kind": "norm_gdpa"}, layers=2), [True, False, False]),
        ({**with_tower(pffn={"kind": "norm_gdpa"}, attention="causal"), "comp_skip": True}, [False] * 3),
    ],
    ids=str,
)
def test_rows_are_promised_to_one_reader_where_they_have_one(options, expected):
    """The next layer's PFFN, if it has norms of its own, and nothing beside it: not rows that are taken, not the next event's loss."""
    model = gem(layers=3, **options)
    assert [bool(layer.read_once) for layer in model.layers] == expected


def test_meta_model_is_materialised_by_reset_parameters():
    with torch.device("meta"):
        model = gem(**with_tower(candidate=True, pooling={"seeds": 2, "candidate_queries": 1}))
    model.to_empty(device="cpu")
    for p in model.parameters():
        p.data.fill_(float("nan"))
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert all(torch.isfinite(p).all() for p in model.parameters())
    batch = random_batch(sample_features(), 4)
    assert torch.isfinite(model(batch).logits).all()


def test_double_precision_and_autocast():
    batch = random_batch(sample_features(), 5)
    model = gem(**with_tower(candidate=True)).eval()
    exact = model(batch).logits
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = model(batch).logits
    assert low.dtype == torch.float32
    assert torch.allclose(low, exact, atol=0.1)
    assert not torch.equal(low, exact)
    wide = model.double()(random_batch(sample_features(), 5, dtype=torch.float64)).logits
    assert torch.allclose(wide, exact, atol=1e-4)


def test_compiles_without_graph_breaks():
    options = with_tower(candidate=True, event={"compare": True, "time_buckets": 4})
    model = gem(layers=1, **options).eval()
    model.tables = LocalTables(model.table_set, sparse=False)
    batch = random_batch(sample_features(), 5, lengths=[3, 0, 2, 4, 1])
    compiled = torch.compile(model, backend="eager", fullgraph=True, dynamic=True)
    assert torch.allclose(compiled(batch).logits, model(batch).logits, atol=1e-5)
    other = random_batch(sample_features(), 4, lengths=[2, 6, 0, 1], seed=4)
    assert torch.allclose(compiled(other).logits, model(other).logits, atol=1e-5)


@pytest.mark.parametrize("more", [{}, {"candidate": True, "cls": 2, "rotary": "position", "pooling": {"candidate_queries": 1}}])
def test_layers_alike_share_what_is_compiled(more):
    """The first one does not differ in making what the others find, either."""
    torch._dynamo.reset()
    options = with_tower(**more)
    model = gem(layers=3, feature_tokens=11, interaction={"tokens": 11}, **options)
    counter = CompileCounter()
    for layer in model.layers:
        layer.compile(backend=counter, dynamic=True)
    for size in (5, 11):
        model(random_batch(sample_features(), size)).logits.sum().backward()
    assert counter.frame_count == 1


def test_compiled_training_with_sparse_gradients():
    """The lookups stay outside the graphs, the rest is traced with its backward."""
    model = gem(layers=1, **with_tower(attention="none", pffn={"kind": "none"}, pooling={"seeds": 1})).train()
    batch = random_batch(sample_features(), 4, lengths=[2, 0, 1, 3])
    task_loss(model(batch), batch).backward()
    expected = {n: p.grad.to_dense() for n, p in model.named_parameters()}
    model.zero_grad()
    task_loss(torch.compile(model, backend="aot_eager", dynamic=True)(batch), batch).backward()
    assert model.tables.weight("item").grad.is_sparse
    for n, p in model.named_parameters():
        assert torch.allclose(p.grad.to_dense(), expected[n], atol=1e-6), n


def test_tables_can_be_replaced():
    model = gem().eval()
    batch = random_batch(sample_features(), 4)
    local, asked = model.tables, []

    class Elsewhere(torch.nn.Module):
        table_set, optimizer_in_backward = local.table_set, True

        def forward(self, group):
            asked.append(group.keys)
            return local(group)

    before = model(batch).logits
    model.tables = Elsewhere()
    assert torch.equal(model(batch).logits, before)
    assert asked == [tuple(k.key for k in local.table_set.lookups)]


# --- refusals ----------------------------------------------------------------------------------------------------------------------------


def test_batches_of_another_kind_are_refused():
    model, batch = gem(), random_batch(sample_features(), 2)
    with pytest.raises(BatchError, match="several candidates a history"):
        model(Batch(**{**vars(batch), "num_targets": torch.tensor([1, 2])}))


def test_features_that_cannot_make_the_model_are_refused():
    features = sample_features().model_dump(exclude_defaults=True)
    unlabelled = Features.model_validate({**features, "labels": {}})
    for build in (lambda: gem(unlabelled), lambda: Din(DinConfig(), unlabelled)):
        with pytest.raises(ConfigError, match="no label is declared"):
            build()
    features["sequences"]["history"].pop("target")
    untargeted = Features.model_validate(features)
    with pytest.raises(ConfigError, match="DIN compares the candidate with the events of 'history'"):
        Din(DinConfig(), untargeted)
    with pytest.raises(ConfigError, match="compare needs to know"):
        gem(untargeted, **with_tower(event={"compare": True}))
    assert gem(untargeted, **with_tower(candidate=True))(random_batch(untargeted, 3)).logits.shape == (3, 2)
    features["sequences"]["history"].pop("timestamps")
    untimed = Features.model_validate(features)
    with pytest.raises(ConfigError, match="needs the events' times"):
        gem(untimed, **with_tower(rotary="time"))


# --- DIN ---------------------------------------------------------------------------------------------------------------------------------


def test_din_weights_events_by_the_candidate():
    torch.manual_seed(0)
    features = sample_features()
    model = Din(DinConfig(embedding_dim=8, attention_activation="prelu"), features).eval()
    batch = random_batch(features, 4, lengths=[3, 0, 1, 2])
    interest = model.histories["history"]
    from gem_core.model.tables import sparse_group

    embedded = model.tables(sparse_group(batch, model.table_set.lookups))
    e, c = torch.cat(interest.fields(batch, embedded), 1), torch.cat(interest.fields.candidate(embedded, 4), 1)
    read = interest(batch, embedded)
    bounds = batch.sequences["history"].offsets.tolist()
    for b in range(4):
        own = e[bounds[b] : bounds[b + 1]]
        asked = c[b].expand_as(own)
        weights = interest.unit(torch.cat([own, asked, own - asked, own * asked], 1))
        assert torch.allclose(read[b], (weights * own).sum(0), atol=1e-6)
    interest.softmax = True
    weights = interest.unit(torch.cat([e[:3], c[:1].expand(3, -1), e[:3] - c[:1], e[:3] * c[:1]], 1)).softmax(0)
    assert torch.allclose(interest(batch, embedded)[0], (weights * e[:3]).sum(0), atol=1e-6)


def test_dice_formula_and_running_statistics():
    x = torch.randn(50, 3) * 2 + 1
    dice = Dice(3)
    with torch.no_grad():
        dice.alpha.copy_(torch.tensor([0.0, 0.3, 1.0]))
    p = torch.sigmoid((x - x.mean(0)) / (x.var(0, unbiased=False) + 1e-8).sqrt())
    assert torch.allclose(dice(x), p * x + (1 - p) * dice.alpha * x, atol=1e-6)
    assert torch.allclose(dice.mean, 0.1 * x.mean(0), atol=1e-6)
    state = dice.mean.clone()
    one = dice(x[:1])
    assert torch.equal(dice.mean, state)
    assert torch.isfinite(one).all()


# --- registration ------------------------------------------------------------------------------------------------------------------------


def test_specs_and_presets():
    specs = {s.name: s for s in builtin_specs()}
    assert {"gem", "din"} <= set(specs)
    tiny = specs["gem"].build(GemConfig.model_validate(preset("tiny")), sample_features())
    assert tiny(random_batch(sample_features(), 3)).logits.shape == (3, 2)
    assert hash(GemConfig.model_validate(preset("base"))) == hash(GemConfig.model_validate(preset("base")))

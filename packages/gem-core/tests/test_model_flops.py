"""FLOPs and parameters against torch's own counter, hand counts, and the pinned presets."""

import itertools

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from gem_core.errors import ConfigError
from gem_core.model import builtin_specs
from gem_core.model.classic import Dcn, Dlrm, WukongModel
from gem_core.model.config import DcnConfig, DinConfig, DlrmConfig, GemConfig, HstuConfig, SasRecConfig, SequenceConfig, WukongModelConfig
from gem_core.model.din import Din
from gem_core.model.flops import attention_pairs
from gem_core.model.gem import Gem
from gem_core.model.pooling import SeedPooling
from gem_core.model.presets import PRESETS, counts, dense_parameters, find, preset
from gem_core.model.sequential import Hstu, SasRec
from gem_core.testing.models import random_batch, sample_features

LENGTHS = [3, 0, 7, 12, 1]
TOWER = {"dim": 16, "heads": 2, "pooling": {"seeds": 3}}
RICH = {
    **TOWER,
    "candidate": True,
    "cls": 2,
    "ffn": 24,
    "window": 3,
    "pffn": {"keys": 5},
    "pooling": {"seeds": 3, "candidate_queries": 2, "recent": 2},
}


def counted(model, batch):
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.eval()(batch)
    return counter.get_total_flops()


@pytest.mark.parametrize(
    "options",
    [
        {"sequence": {**TOWER, "pooling": {"seeds": 6, "tokens": 3, "kron": 2}}, "comp_skip": True, "layers": 3},
        {"sequence": {**TOWER, "event": {"combine": "masknet", "compare": True}}},
        {"sequence": TOWER},
        {"sequence": False},
        {"sequence": {**TOWER, "pffn": {"kind": "norm_gdpa"}, "attention": ["block", "window"], "block": 4, "window": 2}},
        {
            "sequence": {**RICH, "attention": ["causal", "causal_window"]},
            "gates": True,
            "interaction": {"experts": ["dcnv2", "wukong", "dot"]},
        },
        {"sequence": {**TOWER, "layers": 1}, "feature_tokens": 4, "interaction": {"summary": 3}, "head": {"tokens": 2, "shared": 9}},
    ],
)
def test_gem_flops_are_what_runs(options):
    features = sample_features()
    model = Gem(GemConfig.model_validate({"dim": 8, "embedding_dim": 8, **options}), features)
    batch = random_batch(features, 5, lengths=LENGTHS)
    flops = model.count_flops({"history": torch.tensor(LENGTHS)}, 5)
    assert flops.forward == counted(model, batch)
    assert sum(flops.parts.values()) == flops.forward
    assert sum(model.flops(batch).values()) == flops.training == 3 * sum(flops.gemm.values()) + 3.5 * sum(flops.attention.values())


def test_din_flops_are_what_runs():
    features = sample_features()
    model = Din(DinConfig(embedding_dim=8), features)
    batch = random_batch(features, 5, lengths=LENGTHS)
    flops = model.count_flops({"history": torch.tensor(LENGTHS)}, 5)
    width = 8 + 8 + 8 + 1 + 5  # item, category, action, dwell, picture
    weighted_sums = 2 * sum(LENGTHS) * width  # elementwise in torch, hence not seen by its counter
    assert flops.forward == counted(model, batch) + weighted_sums
    assert flops.parts["attention"] == sum(LENGTHS) * (2 * 4 * width * 64 + 2 * 64) + weighted_sums


OTHERS = {
    "dlrm": {"embedding_dim": 8},
    "dcnv2": {"embedding_dim": 8, "rank": 3},
    "wukong": {"embedding_dim": 8, "dim": 8, "history": "sum"},
    "interformer": {"embedding_dim": 8, "dim": 16},
    "sasrec": {"embedding_dim": 8, "dim": 16},
    "hstu": {"embedding_dim": 8, "dim": 16, "qk_dim": 6, "v_dim": 10, "max_attention": 3, "time_bias": 4},
}


@pytest.mark.parametrize("name", OTHERS)
def test_flops_of_the_other_models_are_what_runs(name):
    features = sample_features()
    spec = next(s for s in builtin_specs() if s.name == name)
    model = spec.build(spec.config_type.model_validate(OTHERS[name]), features)
    batch = random_batch(features, 5, lengths=LENGTHS)
    flops = model.count_flops({"history": torch.tensor(LENGTHS)}, 5)
    elementwise = 2 * 5 * 2 * 16 if name == "sasrec" else 0  # the products of states and candidates, a sum in torch
    assert flops.forward == counted(model, batch) + elementwise
    assert sum(model.flops(batch).values()) == flops.training


def test_hand_counts_of_the_other_models():
    """Parameters and FLOPs written out. 5 samples, 6 feature tokens and 1 pooled history; an event has 8 + 8 + 8 + 1 + 5 numbers."""
    features, lengths, b, event = sample_features(), {"history": torch.tensor(LENGTHS)}, 5, 30
    events = sum(LENGTHS)

    def dense(model):
        return sum(p.numel() for n, p in model.named_parameters() if not n.startswith("tables."))

    tokens = 2 * 64 + 64 + 64 * 8 + 8 + 6 * 8 + 8 + event * 8 + 8  # dense MLP, vector, event map
    tokens_flops = b * 2 * (2 * 64 + 64 * 8 + 6 * 8) + events * 2 * event * 8

    dlrm = Dlrm(DlrmConfig(embedding_dim=8, top=(10,)), features)
    pairs = 7 * 6 // 2
    assert dense(dlrm) == tokens + 2 * ((pairs + 8) * 10 + 10 + 10 + 1)
    assert dlrm.count_flops(lengths, b).forward == tokens_flops + b * (2 * 49 * 8 + 2 * 2 * ((pairs + 8) * 10 + 10))

    width = 4 * 8 + 6 + 2 + event
    dcn = Dcn(DcnConfig(embedding_dim=8, layers=2, rank=3, deep=(10,)), features)
    assert dense(dcn) == 2 * (2 * 3 * width + width) + width * 10 + 10 + (width + 10) * 2 + 2
    assert dcn.count_flops(lengths, b).forward == b * 2 * (2 * 2 * 3 * width + width * 10 + (width + 10) * 2)

    options = {"embedding_dim": 8, "dim": 8, "layers": 1, "tokens": 4, "wukong": {"rank": 2, "hidden": 9}, "head": {"hidden": []}}
    wukong = WukongModel(WukongModelConfig.model_validate(options), features)
    layer = 7 * 2 + 2 * 14 + (14 * 9 + 9 + 9 * 16 + 16) + 2 * 7 + 4 * 7 + 2 * 8
    assert dense(wukong) == tokens + layer + 2 * (32 + 1)
    fm = 2 * (2 * 7 * 2 * 8) + 2 * (14 * 9 + 9 * 16)
    assert wukong.count_flops(lengths, b).forward == tokens_flops + b * (fm + 2 * 2 * 7 * 8 + 2 * 4 * 7 * 8 + 2 * 2 * 32)

    pairs = sum(n * (n + 1) // 2 for n in LENGTHS)
    sasrec = SasRec(SasRecConfig(embedding_dim=8, dim=16, layers=1, ffn=20, positions=5), features)
    block = (16 * 48 + 48) + (16 * 16 + 16) + (16 * 20 + 20 + 20 * 16 + 16)
    assert dense(sasrec) == (8 + 1 + 5) + (event * 16 + 16) + 6 * 16 + block + 2 * 16 + 16 + (16 * 32 + 32) + 2
    flops = (events + b) * 2 * event * 16 + events * 2 * (16 * 48 + 16 * 16 + 2 * 16 * 20) + 4 * 16 * pairs + b * 2 * (16 * 32 + 32)
    assert sasrec.count_flops(lengths, b).forward == flops

    hstu = Hstu(HstuConfig(embedding_dim=8, dim=16, layers=1, heads=2, qk_dim=3, v_dim=5, hidden=(7,)), features)
    context = 2 * 64 + 64 + 64 * 16 + 16 + 2 * (8 * 16 + 16) + 6 * 16 + 16  # user, tags: width 8; vector: 6
    assert dense(hstu) == context + (8 + 1 + 5) + (event * 16 + 16) + (16 * 32 + 32) + (10 * 16 + 16) + 2 * (16 * 7 + 7 + 7 + 1)
    rows = events + 5 * b  # four context rows and the candidate
    seen = sum((n + 4) * 4 + 4 * n + n * (n + 1) // 2 + n + 5 for n in LENGTHS)
    own = b * 2 * (2 * 64 + 64 * 16 + 2 * 8 * 16 + 6 * 16) + (events + b) * 2 * event * 16
    attention = 2 * 2 * (3 + 5) * seen
    assert hstu.count_flops(lengths, b).attention == {"attention": attention}
    assert hstu.count_flops(lengths, b).forward == own + rows * 2 * (16 * 32 + 10 * 16) + attention + b * 2 * 2 * (16 * 7 + 7)
    assert hstu.count_flops(lengths, b).attention_backward == {"attention": 2 * 2 * (3 * 3 + 2 * 5) * seen}


def test_hand_count_of_one_layer():
    """n = 6 feature tokens of width 8; one history, d = 16, H = 2; every term written out."""
    features = sample_features()
    options = {"layers": 1, "dim": 8, "embedding_dim": 8, "sequence": {**TOWER, "attention": "causal"}, "head": {"hidden": [10]}}
    options["interaction"] = {"tokens": 4, "wukong": {"rank": 2, "hidden": 11}}
    model = Gem(GemConfig.model_validate(options), features)
    parts = model.count_flops({"history": torch.tensor(LENGTHS)}, 5).parts
    b, n, d, events, rows = 5, 6, 16, sum(LENGTHS), 6 + 3
    pairs = sum(length * (length + 1) // 2 for length in LENGTHS)
    assert parts["events"] == events * 2 * (8 + 8 + 8 + 1 + 5) * d
    assert parts["pffn"] == b * n * 2 * 8 * 2 * d + events * 2 * (2 * d * d) + 4 * d * events * n
    assert parts["attention"] == events * 2 * (3 * d * d + d * d) + 4 * d * pairs
    assert parts["pooling"] == events * 2 * d * 2 * d + 4 * d * events * 3 + b * 3 * 2 * d * 8
    fm = 2 * (2 * rows * 2 * 8) + 2 * (rows * 2 * 11 + 11 * 2 * 8)
    assert parts["interaction"] == b * (fm + 2 * 2 * rows * 8 + 2 * 4 * rows * 8)
    assert parts["heads"] == b * 2 * 2 * (4 * 8 * 10 + 10)
    assert parts["features"] == b * 2 * (2 * 64 + 64 * 8 + 6 * 8)  # dense MLP, vector projection; embeddings of width 8 as they are
    dense = dense_parameters(model)
    assert dense["attention"] == d * 3 * d + 3 * d + d * d + d
    assert dense["interaction"] == 4 * rows + (rows * 2 + 2 * rows * 2 + rows * 2 * 11 + 11 + 11 * 16 + 16) + 2 * rows + 2 * 8
    assert sum(dense.values()) == sum(p.numel() for n, p in model.named_parameters() if not n.startswith("tables."))


KINDS = ("full", "causal", "window", "causal_window")


@pytest.mark.parametrize(("kind", "cls", "candidate"), [("block", 0, False), *itertools.product(KINDS, (0, 2), (False, True))])
def test_attended_pairs_by_brute_force(kind, cls, candidate):
    c = SequenceConfig(attention=kind, window=3, block=4, candidate=candidate, cls=cls)
    seen = 0
    for length in LENGTHS:
        history = length + cls
        for i in range(history + candidate):
            for j in range(history + candidate):
                context = i < cls or j < cls
                near = abs(min(i, history) - j) <= 3 or "window" not in kind
                before = j <= i or "causal" not in kind
                block = i // 4 == j // 4 or kind != "block"
                if j == history or i == history:
                    seen += i == j or (i == history and (j < cls or near))
                else:
                    seen += context or (near and before and block)
    assert attention_pairs(kind, c, torch.tensor(LENGTHS)) == seen


def test_next_event_counts_for_training_only():
    features = sample_features()
    lengths = {"history": torch.tensor(LENGTHS)}
    sequence = {**TOWER, "attention": "causal"}
    plain = Gem(GemConfig.model_validate({"sequence": sequence}), features).count_flops(lengths, 5)
    aided = Gem(GemConfig.model_validate({"sequence": {**sequence, "next_event": 0.1}}), features).count_flops(lengths, 5)
    assert aided.forward == plain.forward
    assert aided.training - plain.training == 3 * (sum(LENGTHS) - 1) * (2 * 16 * 16 + 2 * 64 * 16)
    assert aided.by_part_training["auxiliary"] == aided.training - plain.training


# name: (table parameters, dense parameters, forward FLOPs and training FLOPs over 64 samples of the reference log)
PINNED = {
    "tiny": (2_560_000, 107_415, 172_549_376, 536_910_208),
    "small": (102_400_000, 3_933_715, 9_794_517_504, 30_411_651_840),
    "base": (4_096_000_000, 206_686_338, 1_162_962_960_384, 3_739_570_126_848),
    "base-window": (4_096_000_000, 206_686_338, 778_681_909_248, 2_394_586_447_872),
    "large": (16_384_000_000, 1_535_339_266, 7_297_608_187_904, 22_949_032_689_664),
    "xl": (999_424_000_000, 6_406_296_834, 48_029_645_012_992, 148_305_539_366_912),
}


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_pinned(name):
    c = counts(name, samples=64)
    assert (c.sparse, c.dense_total, c.flops.forward, c.flops.training) == PINNED[name]


def test_preset_shapes_of_the_design():
    base = find("base")
    with torch.device("meta"):
        model = Gem(GemConfig.model_validate(base.model), base.features())
    fm = model.layers[0].interaction.experts[0].fm.mlp.layers
    assert [(m.in_features, m.out_features) for m in fm] == [(3072, 1024), (1024, 12288)]
    wide = {n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and max(m.in_features, m.out_features) > 2048}
    assert all(".fm.mlp." in n for n in wide)
    assert model.features.count == 128
    assert model.layers[0].blocks["history"].pffn.keys == 128
    assert [(m.in_features, m.out_features) for m in model.heads.mlps.tasks[0].layers] == [(1024, 512), (512, 1)]
    assert (len(model.layers), len(model.layers[0].interaction.experts), len(model.table_set.tables)) == (6, 2, 32)
    lengths = base.lengths()
    assert float(lengths.double().mean()) == pytest.approx(500, rel=0.03)
    assert int(lengths.max()) == 4096


def test_xl_holds_a_trillion_parameters_without_memory():
    xl = find("xl")
    with torch.device("meta"):
        model = Gem(GemConfig.model_validate(xl.model), xl.features())
    assert model.table_set.parameters == pytest.approx(1e12, rel=1e-3)
    assert all(p.is_meta for p in model.parameters())


def test_presets_are_copies_and_unknown_ones_are_refused():
    preset("tiny")["layers"] = 99
    assert preset("tiny")["layers"] == 2
    with pytest.raises(ConfigError, match=r"unknown preset 'tinny'(.|\n)*tiny, small, base"):
        preset("tinny")


def test_the_printed_table_names_every_part():
    text = counts("tiny", samples=64).table()
    for word in ("tables", "pffn", "attention", "pooling", "interaction", "heads", "dense total", "training"):
        assert word in text


def test_shared_queries_need_not_project_the_rows():
    """Of `base`: keys, values and attention of 32 seeds, or six products of 128 queries with each row and the sums' map to values."""
    features = find("base").features()
    with torch.device("meta"):
        model = Gem(GemConfig.model_validate(preset("base")), features)
    lengths = {"history": torch.tensor([300, 0, 500])}
    found = model.count_flops(lengths, 3)
    spared = 6 * (800 * (3 * 2 * 512 * 1024 + 3.5 * 4 * 32 * 512) - 800 * 12 * 128 * 512 - 3 * 6 * 32 * 512 * 512)
    assert found.spared == {"pooling": spared}
    parts, least = found.by_part_training, found.least_by_part_training
    assert least["pooling"] == parts["pooling"] - spared
    assert {p: n for p, n in least.items() if p != "pooling"} == {p: n for p, n in parts.items() if p != "pooling"}


@pytest.mark.parametrize("pooling", [{"seeds": 0, "recent": 2}, {"seeds": 4, "candidate_queries": 1}, {"seeds": 64}])
def test_nothing_is_spared_where_it_is_not_less(pooling):
    """Rows taken as they are, queries of a candidate, more queries than columns."""
    model = Gem(GemConfig.model_validate({"sequence": {"dim": 16, "heads": 2, "candidate": True, "pooling": pooling}}), sample_features())
    assert not any(model.count_flops({"history": torch.tensor([30, 50])}, 2).spared.values())


def test_linear_maps_of_a_recipe_need_not_tell_their_width():
    model = Gem(GemConfig.model_validate({"sequence": {"dim": 64, "heads": 2, "pooling": {"seeds": 4}}}), sample_features())
    lengths = {"history": torch.tensor([30, 50])}
    plain = model.count_flops(lengths, 2)
    assert any(plain.spared.values())
    pools = [m for m in model.modules() if isinstance(m, SeedPooling)]
    for pool in pools:
        pool.kv.linear = torch.nn.Sequential(pool.kv.linear)
    assert pools
    assert model.count_flops(lengths, 2) == plain

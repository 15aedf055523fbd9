import pytest

from gem_core.config.features import Dense, Features, Label, Sparse
from gem_core.errors import ConfigError
from gem_core.model import builtin_specs
from gem_core.model.classic import Dcn, Dlrm, WukongModel
from gem_core.model.config import (
    DcnConfig,
    DinConfig,
    DlrmConfig,
    GemConfig,
    HstuConfig,
    InterFormerConfig,
    SasRecConfig,
    WukongModelConfig,
)
from gem_core.model.din import Din
from gem_core.model.gem import Gem
from gem_core.model.interformer import InterFormer
from gem_core.model.sequential import Hstu, SasRec
from gem_core.testing.models import ModelConformance, random_batch, sample_features

TOWER = {"dim": 16, "heads": 2, "event": {"time_buckets": 8, "positions": 4}}
EVERYTHING = {
    "dim": 8,
    "embedding_dim": 8,
    "feature_tokens": 9,
    "gates": True,
    "sequence": {
        **TOWER,
        "attention": ["causal", "window"],
        "rotary": "time",
        "qk_norm": True,
        "ffn": 24,
        "candidate": True,
        "cls": 2,
        "pffn": {"keys": 5},
        "pooling": {"seeds": 2, "candidate_queries": 2, "recent": 2},
        "next_event": 0.1,
        "window": 3,
    },
    "interaction": {"experts": ["wukong", "dcnv2", "dot"], "tokens": 6, "summary": 7},
    "head": {"tokens": 4, "shared": 16, "hidden": [8]},
}


class TestGem(ModelConformance):
    def build(self, features):
        return Gem(GemConfig.model_validate({"dim": 8, "embedding_dim": 8, "sequence": TOWER}), features)


class TestGemEverything(ModelConformance):
    def build(self, features):
        return Gem(GemConfig.model_validate(EVERYTHING), features)


class TestGemBlock(ModelConformance):
    def build(self, features):
        sequence = {
            **TOWER,
            "attention": "block",
            "block": 4,
            "rotary": "position",
            "pffn": {"kind": "norm_gdpa"},
            "pooling": {"candidate_queries": 1},
        }
        return Gem(GemConfig.model_validate({"dim": 8, "embedding_dim": 8, "sequence": sequence}), features)


class TestGemKunlun(ModelConformance):
    def build(self, features):
        sequence = {**TOWER, "attention": "window", "window": 3, "rotary": "time", "pooling": {"seeds": 6, "tokens": 3, "kron": 2}}
        options = {"dim": 8, "embedding_dim": 8, "layers": 3, "comp_skip": True, "sequence": sequence}
        return Gem(GemConfig.model_validate(options), features)


class TestGemWithoutSequence(ModelConformance):
    def build(self, features):
        return Gem(GemConfig.model_validate({"dim": 8, "embedding_dim": 8, "sequence": False}), features)


class TestDin(ModelConformance):
    def build(self, features):
        return Din(DinConfig(embedding_dim=8), features)


class TestDinSoftmaxPrelu(ModelConformance):
    def build(self, features):
        return Din(DinConfig(embedding_dim=8, softmax=True, attention_activation="prelu", activation="prelu"), features)


class TestDlrm(ModelConformance):
    def build(self, features):
        return Dlrm(DlrmConfig(embedding_dim=8), features)


class TestDcnParallel(ModelConformance):
    def build(self, features):
        return Dcn(DcnConfig(embedding_dim=8, layers=2), features)


class TestDcnStacked(ModelConformance):
    def build(self, features):
        return Dcn(DcnConfig(embedding_dim=8, layers=2, rank=4, structure="stacked", history="sum"), features)


class TestWukong(ModelConformance):
    def build(self, features):
        return WukongModel(WukongModelConfig(embedding_dim=8, dim=8, layers=2), features)


class TestInterFormer(ModelConformance):
    def build(self, features):
        return InterFormer(InterFormerConfig(embedding_dim=8, dim=16, positions=3), features)


class TestSasRec(ModelConformance):
    def build(self, features):
        return SasRec(SasRecConfig(embedding_dim=8, dim=16, ffn=32, dropout=0.0), features)


class TestHstu(ModelConformance):
    def build(self, features):
        return Hstu(HstuConfig(embedding_dim=8, dim=16, qk_dim=6, v_dim=8, scale_length=16), features)


class TestHstuEverything(ModelConformance):
    def build(self, features):
        options = {"convention": "production", "alpha": 0.5, "position_bias": 4, "time_bias": 6, "max_attention": 3, "positions": 4}
        return Hstu(HstuConfig(embedding_dim=8, dim=16, qk_dim=8, v_dim=8, scale_length=16, **options), features)


def test_dlrm_wants_a_pair():
    labels = {"ctr": Label()}
    with pytest.raises(ConfigError, match="pairs of features, and there is only one"):
        Dlrm(DlrmConfig(embedding_dim=8), Features(sparse={"x": Sparse(rows=9)}, labels=labels))
    Dlrm(DlrmConfig(embedding_dim=8), Features(sparse={"x": Sparse(rows=9)}, dense={"y": Dense()}, labels=labels))


NAMES = ["gem", "din", "dlrm", "dcnv2", "wukong", "interformer", "sasrec", "hstu"]


@pytest.mark.parametrize("name", NAMES)
def test_registered(name):
    spec = next(s for s in builtin_specs() if s.name == name)
    model = spec.build(spec.config_type(), sample_features())
    assert model(random_batch(sample_features(), 3)).task_names == ("ctr", "cvr")

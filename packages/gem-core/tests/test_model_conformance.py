import pytest

from gem_core.model.config import DinConfig, GemConfig
from gem_core.model.din import Din
from gem_core.model.gem import Gem
from gem_core.testing.models import ModelConformance

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


class TestGemWithoutSequence(ModelConformance):
    def build(self, features):
        return Gem(GemConfig.model_validate({"dim": 8, "embedding_dim": 8, "sequence": False}), features)


class TestDin(ModelConformance):
    def build(self, features):
        return Din(DinConfig(embedding_dim=8), features)


class TestDinSoftmaxPrelu(ModelConformance):
    def build(self, features):
        return Din(DinConfig(embedding_dim=8, softmax=True, attention_activation="prelu", activation="prelu"), features)


@pytest.mark.parametrize("name", ["gem", "din"])
def test_registered(name):
    from gem_core.model import builtin_specs
    from gem_core.testing.models import random_batch, sample_features

    spec = next(s for s in builtin_specs() if s.name == name)
    model = spec.build(spec.config_type(), sample_features())
    assert model(random_batch(sample_features(), 3)).task_names == ("ctr", "cvr")

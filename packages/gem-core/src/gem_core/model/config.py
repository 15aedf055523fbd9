"""Options of the GEM model. ``[model]`` holds those of `GemConfig`; every part reads its own section."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from gem_core.config.base import FrozenConfig, merged

AttentionKind = Literal["full", "causal", "window", "causal_window", "block", "none"]
NormKind = Literal["rms", "layer"]


class EventConfig(FrozenConfig):
    """How the fields of an event become one token."""

    combine: Literal["sum", "concat", "masknet"] = Field(
        "concat", description="sum of the fields' embeddings, one linear map of all of them, or a MaskNet of all of them"
    )
    compare: bool = Field(False, description="also the products of the event's target fields with the candidate's")
    positions: int = Field(0, ge=0, description="learned embedding of N places; 0: none")
    count_from: Literal["newest", "oldest"] = Field("newest", description="where places are counted from; further ones share the last")
    place_std: float = Field(1.0, ge=0, description="standard deviation of the places' initial embeddings")
    scale: float = Field(1.0, gt=0, description="factor of the fields' token before place and age are added")
    time_buckets: int = Field(0, ge=0, description="learned embedding of log(1 + age / time_scale) in N buckets; 0: none")
    time_scale: float = Field(60.0, gt=0, description="seconds; ages well below it are not told apart")
    time_max: float = Field(3.15e7, gt=0, description="seconds; ages from here on share the last bucket")


class PffnConfig(FrozenConfig):
    """Personalised FFN by GDPA: history rows attend, without softmax, to keys and values generated from the feature tokens."""

    kind: Literal["gdpa", "norm_gdpa", "none"] = Field(
        "gdpa", description="gdpa: s + W_o gdpa(W_q norm(s)); norm_gdpa: the fused form that takes the queries as they are"
    )
    keys: int | None = Field(None, gt=0, description="number of generated keys; None: token-wise, one key a feature token")
    activation: str = "gelu"
    scale_in: float | None = Field(None, gt=0, description="None: head_dim ** -0.5")
    scale_out: float | None = Field(None, gt=0, description="None: keys ** -0.5")


class PoolingConfig(FrozenConfig):
    """Which summary tokens of a history go into the interaction."""

    seeds: int = Field(4, ge=0, description="learned queries (PMA, HSP), the same for all samples")
    candidate_queries: int = Field(0, ge=0, description="queries generated from the candidate's event token")
    tokens: int | None = Field(None, gt=0, description="what the queries read becomes N tokens by SumKron; None: one token a query")
    kron: int = Field(8, gt=0, description="terms of SumKron")
    recent: int = Field(0, ge=0, description="the newest K events as they are")
    last: bool = Field(True, description="the candidate's own row, where it is appended to the history")

    @model_validator(mode="after")
    def _check(self) -> PoolingConfig:
        if self.tokens is not None and not self.seeds + self.candidate_queries:
            raise ValueError("tokens needs queries whose reading it summarises: set seeds or candidate_queries")
        return self

    @property
    def read_tokens(self) -> int:
        """Tokens from pooling by attention."""
        return self.seeds + self.candidate_queries if self.tokens is None else self.tokens


class SequenceConfig(FrozenConfig):
    """A history tower: event tokens ``[ΣL, dim]``, a block a layer, and the pooling."""

    dim: int = Field(64, gt=0)
    heads: int = Field(2, gt=0)
    head_dim: int | None = Field(None, gt=0, description="None: dim / heads")
    layers: int | None = Field(None, ge=0, description="blocks of this tower; None: as many as the model has layers")
    event: EventConfig = EventConfig()
    attention: AttentionKind | tuple[AttentionKind, ...] = Field("full", description="a list is cycled over the layers")
    window: int = Field(128, gt=0, description="events on each side in window attention")
    block: int = Field(64, gt=0, description="rows a block in block attention")
    rotary: Literal["none", "position", "time"] = Field("none", description="angles from the position, or from the log age of the event")
    rotary_base: float = Field(10000.0, gt=1)
    qk_norm: bool = Field(False, description="RMS norm of queries and keys over the head dimension; bounds the scores")
    pffn: PffnConfig = PffnConfig()
    ffn: int = Field(0, ge=0, description="hidden width of a plain FFN after the attention; 0: none")
    norm: NormKind = "rms"
    candidate: bool = Field(False, description="append the candidate as an event that reads the history, and that the history never sees")
    cls: int = Field(0, ge=0, description="feature summaries prepended as tokens that see and are seen by all history rows")
    pooling: PoolingConfig = PoolingConfig()
    dropout: float = Field(0.0, ge=0, lt=1)
    next_event: float = Field(0.0, ge=0, description="weight of the auxiliary loss that predicts each next event after the first block")

    @model_validator(mode="after")
    def _check(self) -> SequenceConfig:
        if self.head_dim is None and self.dim % self.heads:
            raise ValueError(f"dim {self.dim} is not a multiple of heads {self.heads}; change one or set head_dim")
        if self.pffn.kind == "norm_gdpa" and self.heads * self.width != self.dim:
            raise ValueError(f"pffn.kind = 'norm_gdpa' takes rows as queries: heads x head_dim must be dim {self.dim}")
        if (self.rotary != "none" or "block" in self.kinds) and self.width % 2:
            raise ValueError(f"rotary and block attention need an even head_dim, got {self.width}")
        if "block" in self.kinds and (self.candidate or self.cls):
            raise ValueError("block attention has no candidate or CLS rows; use pooling.candidate_queries and pooling.seeds")
        if self.next_event and set(self.kinds[:1]) - {"causal", "causal_window"}:
            raise ValueError("next_event predicts the next event, so the first block's attention must be causal or causal_window")
        if self.next_event and self.layers == 0:
            raise ValueError("next_event needs at least one block")
        return self

    @property
    def width(self) -> int:
        """Dimension of one head."""
        return self.head_dim if self.head_dim is not None else self.dim // self.heads

    @property
    def kinds(self) -> tuple[AttentionKind, ...]:
        return self.attention if isinstance(self.attention, tuple) else (self.attention,)

    @property
    def summary_tokens(self) -> int:
        """Tokens a sample that this tower adds to every interaction."""
        p = self.pooling
        return p.read_tokens + p.recent + self.cls + int(self.candidate and p.last)


class WukongConfig(FrozenConfig):
    """Factorisation-machine block and linear compression (Wukong)."""

    fm_tokens: int | None = Field(None, gt=0, description="tokens of the FM block (nF), the others are linear (nL); None: half of them")
    rank: int = Field(8, ge=0, description="columns k of Y in X (X^T Y); 0: all pairwise products X X^T")
    hidden: int = Field(128, gt=0, description="hidden width of the FM block's MLP")


class CrossConfig(FrozenConfig):
    """DCNv2: cross layers over the flattened tokens."""

    layers: int = Field(2, gt=0)
    rank: int | None = Field(None, gt=0, description="rank of the cross matrices; None: full")


class DotConfig(FrozenConfig):
    """DOT: all pairwise dot products, then an MLP."""

    hidden: int = Field(128, gt=0)


class InteractionConfig(FrozenConfig):
    """Interaction layer: ``X' = norm(sum of experts(X) + shortcut(X))``."""

    experts: tuple[Literal["wukong", "dcnv2", "dot"], ...] = Field(("wukong",), min_length=1, description="summed experts (DHEN)")
    tokens: int = Field(16, gt=1, description="tokens that a layer gives; for wukong nF + nL")
    summary: int | None = Field(None, gt=0, description="feature tokens are compressed to N before they join the pooled ones; None: all")
    wukong: WukongConfig = WukongConfig()
    dcnv2: CrossConfig = CrossConfig()
    dot: DotConfig = DotConfig()

    @model_validator(mode="after")
    def _check(self) -> InteractionConfig:
        if self.wukong.fm_tokens is not None and self.wukong.fm_tokens >= self.tokens:
            raise ValueError(f"wukong.fm_tokens {self.wukong.fm_tokens} must be below tokens {self.tokens}: the others are linear")
        return self


class HeadConfig(FrozenConfig):
    """Prediction heads over the last layer's tokens."""

    tokens: int | None = Field(None, gt=0, description="tokens are compressed to N before they are flattened; None: all")
    shared: int = Field(0, ge=0, description="width of a hidden layer that all tasks share; 0: none")
    hidden: tuple[int, ...] = Field((64,), description="hidden layers of each task's own MLP")


class TableOptions(FrozenConfig):
    """What every model says about its tables."""

    embedding_dim: int = Field(32, gt=0, description="width of tables that state none")
    embedding_dropout: float = Field(0.0, ge=0, lt=1)


class RetrievalConfig(FrozenConfig):
    """``[model.retrieval]``: what is learned and how items are scored where ``[features.next_item]`` is declared.

    A score is ``state . item / temperature``, both normalised to length 1 first with ``normalize``.
    """

    loss: Literal["bce", "gbce", "sampled_softmax", "softmax"] = Field("sampled_softmax", description="softmax: over all items")
    negatives: int = Field(128, gt=0, description="items drawn for each position; not used by softmax")
    sampling: Literal["uniform", "popularity"] = Field("uniform", description="popularity: by how often an item was a target so far")
    shared: bool = Field(False, description="one draw for all positions of a batch")
    false_negatives: Literal["keep", "target", "history"] = Field(
        "target", description="leave drawn items out that are the position's target, or also any item of the sample's history"
    )
    log_q: bool = Field(False, description="sampled_softmax: subtract the log of an item's probability of being drawn")
    t: float = Field(0.75, ge=0, le=1, description="gbce: calibration; 0 is bce, 1 undoes what the sampling does to the scores")
    temperature: float = Field(1.0, gt=0)
    normalize: bool = False


class GemConfig(TableOptions):
    """``[model]`` of ``name = "gem"``. ``sequence = false`` removes the history towers.

    For retrieval the history's tower stands alone: interaction, pooling and heads, which score a candidate, are not built.
    """

    retrieval: RetrievalConfig = RetrievalConfig()

    layers: int = Field(2, gt=0)
    dim: int = Field(32, gt=0, description="width of a feature token")
    feature_tokens: int | None = Field(None, gt=0, description="feature tokens a sample; None: one a feature")
    dense_hidden: int = Field(64, gt=0, description="hidden width of the MLP that makes the dense features' token")
    comp_skip: bool = Field(
        False, description="CompSkip: layers 0, 2, ... run PFFN and pooling, layers 1, 3, ... self-attention, reusing the pooled tokens"
    )
    gates: bool = Field(False, description="InterFormer gates sigma(z * (W z + b)) on both summaries")
    norm: NormKind = "layer"
    dropout: float = Field(0.0, ge=0, lt=1, description="in the interaction's and heads' MLPs")
    sequence: SequenceConfig | Literal[False] = SequenceConfig()
    groups: dict[str, SequenceConfig] = Field(default_factory=dict, description="towers of single histories; unset keys as in `sequence`")
    interaction: InteractionConfig = InteractionConfig()
    head: HeadConfig = HeadConfig()

    @model_validator(mode="before")
    @classmethod
    def _inherit(cls, data: Any) -> Any:
        if not isinstance(data, dict) or not isinstance(data.get("groups"), dict):
            return data
        base = data.get("sequence")
        if base is False:
            return data
        shared = base.model_dump(exclude_unset=True) if isinstance(base, SequenceConfig) else (base or {})
        groups = {k: merged(shared, v) if isinstance(v, dict) else v for k, v in data["groups"].items()}
        return {**data, "groups": groups}

    @model_validator(mode="after")
    def _check(self) -> GemConfig:
        towers = [*self.groups.values(), *([self.sequence] if self.sequence is not False else [])]
        if self.comp_skip and any(t.next_event for t in towers):
            raise ValueError("comp_skip leaves self-attention out of the first block, which next_event reads; drop one of the two")
        if self.comp_skip and self.layers % 2 == 0:
            raise ValueError(
                f"comp_skip pools in layers 0, 2, ..., so the last layer must be one of these: layers {self.layers} must be odd"
            )
        return self

    def tower(self, group: str) -> SequenceConfig | None:
        """Options of the tower of one history; None where towers are off."""
        return None if self.sequence is False else self.groups.get(group, self.sequence)


class DinConfig(TableOptions):
    """``[model]`` of ``name = "din"``."""

    attention_hidden: tuple[int, ...] = Field((64,), description="hidden layers of the local activation unit")
    attention_activation: Literal["dice", "prelu"] = "dice"
    softmax: bool = Field(False, description="normalise the weights over a history; the paper does not")
    hidden: tuple[int, ...] = Field((200, 80), description="hidden layers of each task's MLP")
    activation: Literal["dice", "prelu"] = "dice"
    dropout: float = Field(0.0, ge=0, lt=1, description="in the tasks' MLPs")


class DlrmConfig(TableOptions):
    """``[model]`` of ``name = "dlrm"``."""

    bottom: tuple[int, ...] = Field((64,), description="hidden layers of the MLP over the dense features; its output is one more vector")
    top: tuple[int, ...] = Field((128, 64), description="hidden layers of each task's MLP")
    history: Literal["none", "mean", "sum"] = Field("mean", description="how a history becomes one more vector")
    dropout: float = Field(0.0, ge=0, lt=1)


class DcnConfig(TableOptions):
    """``[model]`` of ``name = "dcnv2"``."""

    layers: int = Field(3, gt=0, description="cross layers")
    rank: int | None = Field(None, gt=0, description="rank of the cross matrices; None: full")
    deep: tuple[int, ...] = Field((128, 64), description="hidden layers of the deep network")
    structure: Literal["parallel", "stacked"] = "parallel"
    history: Literal["none", "mean", "sum"] = Field("mean", description="how a history joins the features")
    dropout: float = Field(0.0, ge=0, lt=1)


class WukongModelConfig(TableOptions):
    """``[model]`` of ``name = "wukong"``: Wukong layers over the feature tokens."""

    layers: int = Field(3, gt=0)
    dim: int = Field(32, gt=0, description="width of a token")
    feature_tokens: int | None = Field(None, gt=0, description="feature tokens a sample; None: one a feature")
    tokens: int = Field(16, gt=1, description="tokens that a layer gives, nF + nL")
    wukong: WukongConfig = WukongConfig()
    head: HeadConfig = HeadConfig()
    history: Literal["none", "mean", "sum"] = Field("mean", description="how a history becomes one more token")
    dropout: float = Field(0.0, ge=0, lt=1)


class InterFormerConfig(TableOptions):
    """``[model]`` of ``name = "interformer"``, with the sizes of the paper's public benchmarks."""

    layers: int = Field(2, gt=0)
    dim: int = Field(32, gt=0, le=256, description="width of feature and event tokens")
    heads: int = Field(2, gt=0)
    summary: int = Field(4, gt=0, description="tokens of the feature summary, prepended to the history as CLS tokens")
    seeds: int = Field(2, ge=0, description="queries of the pooling by attention (PMA)")
    recent: int = Field(2, ge=0, description="newest events that join the summary")
    positions: int = Field(0, ge=0, description="learned embedding of the last N places beside the rotary positions; 0: none")
    interaction: InteractionConfig = InteractionConfig()
    hidden: tuple[int, ...] = Field((64,), description="hidden layers of each task's MLP")
    dropout: float = Field(0.0, ge=0, lt=1)

    @model_validator(mode="after")
    def _check(self) -> InterFormerConfig:
        if self.dim % self.heads or self.dim // self.heads % 2:
            raise ValueError(f"dim {self.dim} over heads {self.heads} must give an even head dimension")
        return self


class SasRecConfig(TableOptions):
    """``[model]`` of ``name = "sasrec"``."""

    layers: int = Field(2, gt=0)
    dim: int = Field(64, gt=0)
    heads: int = Field(1, gt=0)
    ffn: int = Field(256, gt=0, description="hidden width of the FFN")
    positions: int = Field(200, gt=0, description="learned embedding of N places")
    count_from: Literal["newest", "oldest"] = Field("newest", description="where places are counted from; further ones share the last")
    dropout: float = Field(0.2, ge=0, lt=1)
    history: str | None = Field(None, description="which history to read; None: the only one")
    retrieval: RetrievalConfig = RetrievalConfig()

    @model_validator(mode="after")
    def _check(self) -> SasRecConfig:
        if self.dim % self.heads:
            raise ValueError(f"dim {self.dim} is not a multiple of heads {self.heads}")
        return self


class HstuConfig(TableOptions):
    """``[model]`` of ``name = "hstu"``."""

    layers: int = Field(2, gt=0)
    dim: int = Field(64, gt=0)
    heads: int = Field(2, gt=0)
    qk_dim: int = Field(32, gt=0, description="width of a head's queries and keys")
    v_dim: int = Field(32, gt=0, description="width of a head's values and gates")
    convention: Literal["research", "production"] = Field("research", description="research: SiLU on U, V, Q and K; production: on U alone")
    alpha: float = Field(1.0, gt=0, description="factor of the scores inside SiLU")
    scale_length: int | None = Field(None, gt=0, description="N in SiLU(alpha QK)/N; None: the history's max_length")
    max_attention: int | None = Field(None, gt=0, description="a row sees this many rows before it; None: all")
    position_bias: int = Field(0, ge=0, description="relative position bias up to this distance; 0: none")
    time_bias: int = Field(0, ge=0, description="buckets of the time-gap bias, log-spaced from 1 s to 10 years; 0: none")
    positions: int = Field(0, ge=0, description="learned embedding of N places; 0: none")
    count_from: Literal["newest", "oldest"] = Field("newest", description="where places are counted from; further ones share the last")
    context: bool = Field(True, description="features that are not the candidate's go before the history as context rows")
    hidden: tuple[int, ...] = Field((64,), description="hidden layers of each task's MLP over the candidate's row")
    dropout: float = Field(0.0, ge=0, lt=1)
    history: str | None = Field(None, description="which history to read; None: the only one")
    retrieval: RetrievalConfig = RetrievalConfig()

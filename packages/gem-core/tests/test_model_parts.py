"""Sequence block, pooling, interaction and heads: against independent formulas, gradients, and who sees whom."""

import pytest
import torch
from torch import nn
from torch.autograd import gradcheck

from gem_core.model import layers
from gem_core.model.config import (
    CrossConfig,
    DotConfig,
    HeadConfig,
    HstuConfig,
    InteractionConfig,
    PffnConfig,
    PoolingConfig,
    SequenceConfig,
    WukongConfig,
)
from gem_core.model.experts import SummedExperts
from gem_core.model.heads import Heads
from gem_core.model.interaction import Cross, Dot, FactorizationMachine, Wukong
from gem_core.model.interformer import GeneratedFfn
from gem_core.model.layers import (
    FeedForward,
    Gate,
    MaskNet,
    NormLinear,
    TokenMix,
    _AddedLinear,
    _RowsLinear,
    _WithEach,
    added_linear,
    rows_linear,
)
from gem_core.model.pooling import Pooling, SeedPooling, SumKron
from gem_core.model.rows import Rows
from gem_core.model.sequence import NextEvent, Pffn, SelfAttention, SequenceBlock, rotary_angles
from gem_core.model.sequential import HstuLayer
from gem_core.ops.block import rotate

LENGTHS = [3, 0, 1, 5]
DIM, HEADS, WIDTH, TOKENS, TOKEN_DIM = 8, 2, 4, 3, 6


def layout(lengths=LENGTHS, *, cls=0, candidate=False):
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    rows = Rows(offsets, int(offsets[-1]), max(lengths, default=0))
    return rows.extended(cls, candidate) if cls or candidate else rows


def randn(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def inputs(rows):
    return randn(rows.count, DIM), randn(rows.batch_size, TOKENS, TOKEN_DIM, seed=1)


def rms(x):
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def layer_norm(x):
    return nn.functional.layer_norm(x, x.shape[-1:], eps=1e-6)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def attention(kind="full", **options):
    return SelfAttention(DIM, HEADS, WIDTH, kind, **options).double()


# --- formulas ----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keys", [None, 2])
def test_pffn_formula(keys):
    rows = layout()
    s, x = inputs(rows)
    pffn = Pffn(DIM, HEADS, WIDTH, TOKENS, TOKEN_DIM, PffnConfig(keys=keys, activation="silu", scale_in=0.7, scale_out=0.3)).double()
    out = pffn(s, x, rows)
    for b in range(4):
        rows_b = slice(rows.offsets[b], rows.offsets[b + 1])
        tokens = x[b] if keys is None else pffn.mix.weight @ x[b]
        kv = (rms(tokens) @ pffn.kv.linear.weight.T + pffn.kv.linear.bias).view(-1, 2, HEADS, WIDTH)
        q = (rms(s[rows_b]) @ pffn.q.linear.weight.T + pffn.q.linear.bias).view(-1, HEADS, WIDTH)
        scores = torch.einsum("qhd,khd->hqk", q, kv[:, 0])
        o = torch.einsum("hqk,khd->qhd", 0.3 * nn.functional.silu(0.7 * scores), kv[:, 1]).flatten(1)
        assert torch.allclose(out[rows_b], s[rows_b] + o @ pffn.out.weight.T + pffn.out.bias)


def test_norm_gdpa_form_takes_the_rows_as_queries():
    rows = layout()
    s, x = inputs(rows)
    pffn = Pffn(DIM, HEADS, WIDTH, TOKENS, TOKEN_DIM, PffnConfig(kind="norm_gdpa")).double()
    assert pffn.q is None
    out = pffn(s, x, rows)
    b, rows_b = 3, slice(rows.offsets[3], rows.offsets[4])
    k, v = (rms(x[b]) @ pffn.kv.linear.weight.T + pffn.kv.linear.bias).view(-1, 2, HEADS, WIDTH).unbind(1)
    l = layer_norm(s[rows_b])
    weights = TOKENS**-0.5 * nn.functional.gelu(WIDTH**-0.5 * torch.einsum("qhd,khd->hqk", l.view(-1, HEADS, WIDTH), k))
    o = torch.einsum("hqk,khd->qhd", weights, v).flatten(1) + l
    assert torch.allclose(out[rows_b], rms(o) + s[rows_b])


@pytest.mark.parametrize("kind", ["full", "causal", "window", "causal_window", "block"])
@pytest.mark.parametrize("rotary", [False, True])
def test_attention_formula(kind, rotary):
    rows = layout([0, 6, 7])
    s, _ = inputs(rows)
    module = attention(kind, window=2, block=4, qk_norm=True)
    angles = rotary_angles(rows, WIDTH, "position") if rotary else None
    out = module(s, rows, angles)
    for b in (1, 2):
        part = slice(rows.offsets[b], rows.offsets[b + 1])
        n = part.stop - part.start
        q, k, v = (rms(s[part]) @ module.qkv.linear.weight.T + module.qkv.linear.bias).view(n, 3, HEADS, WIDTH).unbind(1)
        q, k = rms(q), rms(k)
        if rotary:
            turn = torch.polar(
                torch.ones(()).double(), torch.outer(torch.arange(n), 10000.0 ** (-torch.arange(0, WIDTH, 2) / WIDTH)).double()
            )
            q, k, v = (
                torch.view_as_real(torch.view_as_complex(t.reshape(n, HEADS, -1, 2)) * turn.unsqueeze(1)).flatten(2)
                if t is not v or kind == "block"
                else t
                for t in (q, k, v)
            )
        i, j = torch.arange(n).unsqueeze(1), torch.arange(n)
        seen = {
            "full": (i >= 0) & (j >= 0),
            "causal": j <= i,
            "window": (i - j).abs() <= 2,
            "causal_window": (j <= i) & (i - j <= 2),
            "block": i // 4 == j // 4,
        }[kind]
        scores = torch.einsum("qhd,khd->hqk", q, k) * WIDTH**-0.5
        o = torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v).flatten(1)
        assert torch.allclose(out[part], s[part] + o @ module.out.weight.T + module.out.bias, atol=1e-6), kind


def test_seed_pooling_formula_and_empty_history():
    rows = layout()
    s, _ = inputs(rows)
    candidate = randn(4, DIM, seed=2)
    pool = SeedPooling(DIM, HEADS, WIDTH, TOKEN_DIM, seeds=2, candidate_queries=1).double()
    out, after = pool(s, rows, candidate)
    assert torch.equal(after, s)
    assert torch.allclose(out[1], pool.out.bias.expand(3, -1))
    part = slice(rows.offsets[3], rows.offsets[4])
    k, v = (rms(s[part]) @ pool.kv.linear.weight.T + pool.kv.linear.bias).view(-1, 2, HEADS, WIDTH).unbind(1)
    asked = (rms(candidate[3]) @ pool.queries.linear.weight.T + pool.queries.linear.bias).view(1, HEADS, WIDTH)
    q = torch.cat([pool.seeds, asked])
    o = torch.einsum("hqk,khd->qhd", (torch.einsum("qhd,khd->hqk", q, k) * WIDTH**-0.5).softmax(-1), v).flatten(1)
    assert torch.allclose(out[3], o @ pool.out.weight.T + pool.out.bias)


def test_sum_kron_formula():
    h = randn(3, 5, 4)
    kron = SumKron(5, 2, 4, 6, terms=3).double()
    z, w = kron.mix.weight.view(2, 3, 5), kron.map.weight.view(6, 3, 4)
    expected = sum(torch.stack([z[:, i] @ hb @ w[:, i].T for hb in h]) for i in range(3))
    assert torch.allclose(kron(h), expected + kron.map.bias)


def test_generated_ffn_formula():
    rows = layout()
    s, x = randn(rows.count, DIM), randn(4, TOKENS, DIM, seed=1)
    ffn = GeneratedFfn(TOKENS, DIM).double()
    for b, out in enumerate(ffn(s, x, rows).split(LENGTHS)):
        part = s[rows.offsets[b] : rows.offsets[b + 1]]
        assert torch.allclose(out, part + DIM**-0.5 * part @ (ffn.generate.weight @ x[b]))


def test_mask_net_formula():
    s = randn(4, 5)
    net = MaskNet(5, 3).double()
    up, down = net.mask.layers
    mask = (s @ up.weight.T + up.bias).relu() @ down.weight.T + down.bias
    assert torch.allclose(net(s), (s * mask) @ net.map.weight.T + net.map.bias)


@pytest.mark.parametrize("convention", ["research", "production"])
def test_hstu_layer_formula(convention):
    rows = layout([0, 6], candidate=True)
    s = randn(rows.count, DIM)
    biases = {"position_bias": 2, "time_bias": 3, "max_attention": 2}
    config = HstuConfig(dim=DIM, heads=2, qk_dim=3, v_dim=5, convention=convention, alpha=0.7, **biases)
    layer = HstuLayer(config, 20).double()
    times = torch.tensor([9, 0, 1, 3, 50, 51, 52, 60])
    edges = torch.tensor([2, 40])
    part = slice(1, 8)
    out = layer(s, rows, times, edges)[part]
    mixed = layer_norm(s[part]) @ layer.uvqk.linear.weight.T + layer.uvqk.linear.bias
    u, v, q, k = (nn.functional.silu(mixed) if convention == "research" else mixed).split([10, 10, 6, 6], 1)
    u = nn.functional.silu(u) if convention == "production" else u
    i, j = torch.arange(7).unsqueeze(1), torch.arange(7)
    t = times[part]
    bias = layer.position[:, (j - i).clamp(-2, 2) + 2] + layer.time[:, torch.bucketize((t - t.unsqueeze(1)).abs(), edges, right=True)]
    scores = 0.7 * torch.einsum("qhd,khd->hqk", q.view(7, 2, 3), k.view(7, 2, 3)) + bias
    seen = (j <= i) & (i - j <= 2)
    o = torch.einsum("hqk,khd->qhd", nn.functional.silu(scores) * seen / 20, v.view(7, 2, 5)).flatten(1)
    gated = layer_norm(o) * u
    assert torch.allclose(out, s[part] + gated @ layer.out.weight.T + layer.out.bias, atol=1e-6)
    layer.dropout.register_forward_hook(lambda _module, read, _out: 3 * read[0])
    assert torch.allclose(layer(s, rows, times, edges)[part], s[part] + 3 * gated @ layer.out.weight.T + layer.out.bias, atol=1e-6)


def test_hstu_layer_begins_as_little_more_than_its_residual():
    torch.manual_seed(0)
    rows = layout([0, 200], candidate=True)
    s = torch.randn(rows.count, 50)
    layer = HstuLayer(HstuConfig(dim=50, heads=1, qk_dim=50, v_dim=50, position_bias=20), 200)
    assert (layer(s, rows) - s).std() < 0.12


@pytest.mark.parametrize("rank", [0, 2])
def test_factorization_machine_formula(rank):
    x = randn(3, 5, 4)
    fm = FactorizationMachine(5, 2, 4, rank=rank, hidden=7).double()
    products = torch.stack([xb @ xb.T if rank == 0 else xb @ (xb.T @ fm.project) for xb in x]).flatten(1)
    h = nn.functional.layer_norm(products, (products.shape[1],), fm.norm.weight, fm.norm.bias, 1e-6)
    up, down = fm.mlp.layers
    expected = (h @ up.weight.T + up.bias).relu() @ down.weight.T + down.bias
    assert torch.allclose(fm(x), expected.view(3, 2, 4))


def test_wukong_layer_formula():
    x = randn(3, 5, 4)
    layer = SummedExperts(5, 4, InteractionConfig(tokens=5, wukong=WukongConfig(fm_tokens=2, rank=2, hidden=7))).double()
    (expert,) = layer.experts
    joined = torch.cat([expert.fm(x), torch.stack([expert.linear.weight @ xb for xb in x])], 1)
    assert torch.allclose(layer(x), layer_norm(joined + x))


def test_experts_are_summed_with_one_shortcut():
    x = randn(3, 5, 4)
    layer = SummedExperts(5, 4, InteractionConfig(experts=("wukong", "dcnv2", "dot"), tokens=6)).double()
    summed = sum(e(x) for e in layer.experts) + layer.shortcut.weight @ x
    assert torch.allclose(layer(x), layer_norm(summed))
    assert [type(e) for e in layer.experts] == [Wukong, Cross, Dot]


@pytest.mark.parametrize("rank", [None, 3])
def test_cross_formula(rank):
    x = randn(3, 2, 4)
    cross = Cross(2, 3, 4, CrossConfig(layers=2, rank=rank)).double()
    x0 = y = x.flatten(1)
    for layer in cross.cross.layers:
        w, b = (layer.weight, layer.bias) if rank is None else (layer[1].weight @ layer[0].weight, layer[1].bias)
        y = x0 * (y @ w.T + b) + y
    assert torch.allclose(cross(x), (y @ cross.map.weight.T + cross.map.bias).view(3, 3, 4))


def test_dot_uses_every_pair_once():
    x = randn(2, 4, 3)
    dot = Dot(4, 2, 3).double()
    pairs = torch.stack([(x[:, i] * x[:, j]).sum(1) for i in range(4) for j in range(i + 1, 4)], 1)
    assert torch.allclose(dot(x), dot.mlp(pairs).view(2, 2, 3))


def test_heads_formula():
    x = randn(3, 5, 4)
    heads = Heads(5, 4, ("ctr", "cvr"), HeadConfig(tokens=2, shared=7, hidden=(6,))).double()
    y = (x.transpose(1, 2) @ heads.mix.weight.T).transpose(1, 2).flatten(1)
    y = nn.functional.silu(y @ heads.shared.weight.T + heads.shared.bias)
    for t, mlp in enumerate(heads.mlps.tasks):
        assert torch.allclose(heads(x)[:, t], mlp(y).squeeze(1))


def test_gate_begins_open():
    z = randn(4, 6)
    gate = Gate(6).double()
    with torch.no_grad():
        gate.linear.weight.zero_()
        gate.linear.bias.zero_()
    assert torch.allclose(gate(z), nn.functional.silu(z))


def test_next_event_loss_formula():
    rows = layout([3, 0, 1, 2])
    states, events = randn(6, DIM), randn(6, DIM, seed=1)
    module = NextEvent(DIM, negatives=5, temperature=0.5).double()
    torch.manual_seed(3)
    drawn = (torch.rand(5) * 6).long()
    torch.manual_seed(3)
    loss = module(states, events, rows)
    unit = nn.functional.normalize
    q, keys = unit(module.map(states)), unit(events)
    terms = []
    for i in (0, 1, 4):  # the rows that have a next event in their own sample
        scores = torch.cat([(q[i] @ keys[i + 1])[None], keys[drawn] @ q[i]]) / 0.5
        terms.append(torch.logsumexp(scores, 0) - scores[0])
    assert torch.allclose(loss, torch.stack(terms).mean())
    assert float(module(states[:1], events[:1], layout([1]))) == 0


# --- replaced linear modules -------------------------------------------------------------------------------------------------------------


def test_rows_linear_has_the_gradients_of_linear():
    x, w, b = randn(9, 4), randn(3, 4, seed=1), randn(3, seed=2)
    assert gradcheck(_RowsLinear.apply, [t.requires_grad_() for t in (x, w, b)])
    for wanted in range(3):
        given = [t.detach().requires_grad_(i == wanted) for i, t in enumerate((x, w, b))]
        found, expected = (f(*given).square().sum() for f in (_RowsLinear.apply, nn.functional.linear))
        found.backward()
        alone = given[wanted].grad
        assert torch.allclose(alone, torch.autograd.grad(expected, given[wanted])[0])


@pytest.mark.parametrize("shape", [(6, 4), (2, 3, 4)])
def test_rows_of_any_shape(shape, monkeypatch):
    monkeypatch.setattr(layers, "_many", lambda _: True)
    linear, x = nn.Linear(4, 3).double(), randn(*shape).requires_grad_()
    assert torch.equal(rows_linear(linear, x), linear(x))
    assert gradcheck(lambda x, *_: rows_linear(linear, x), (x, linear.weight, linear.bias))


def test_product_with_each_sample():
    weight, x = randn(3, 5).requires_grad_(), randn(2, 5, 4).requires_grad_()
    assert torch.allclose(_WithEach.apply(weight, x), weight @ x)
    assert gradcheck(_WithEach.apply, (weight, x))
    assert gradcheck(lambda w: _WithEach.apply(w.t(), x.detach()[:, :3]), (weight,))


def test_sums_beside_a_product():
    residual, x, w, b = (t.requires_grad_() for t in (randn(6, 3), randn(6, 4), randn(3, 4), randn(3)))

    def run(residual, x, w, b):
        return residual + nn.functional.linear(x, w, b)

    assert torch.equal(_AddedLinear.apply(run, residual, x, w, b), run(residual, x, w, b))
    assert gradcheck(lambda *given: _AddedLinear.apply(run, *given), (residual, x, w, b))
    linear, dropout = nn.Linear(4, 3).double(), nn.Dropout(0.5)
    assert torch.equal(added_linear(linear, x, residual, dropout.eval()), residual + linear(x))


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def test_a_replaced_linear_is_used():
    x = torch.randn(5, 8)
    for module, names in ((NormLinear(8, 6), ("linear",)), (FeedForward(8, 16), ("up", "down"))):
        before = module(x)
        for name in names:
            old = getattr(module, name)
            new = Doubled(old.in_features, old.out_features)
            new.load_state_dict(old.state_dict())
            setattr(module, name, new)
        assert not torch.allclose(module(x), before)
    plain, norm = NormLinear(8, 6), NormLinear(8, 6)
    norm.load_state_dict(plain.state_dict())
    norm.linear.__class__ = type("Same", (nn.Linear,), {})
    assert torch.allclose(norm(x), plain(x), atol=1e-6)


# --- gradients ---------------------------------------------------------------------------------------------------------------------------


def differentiate(module, *tensors):
    """Gradcheck over the inputs and every parameter of ``module``."""
    parameters = dict(module.named_parameters())

    def run(*values):
        state = dict(zip(parameters, values[len(tensors) :]))
        return torch.func.functional_call(module, state, values[: len(tensors)])

    values = [t.clone().requires_grad_() for t in tensors] + [p.detach().clone().requires_grad_() for p in parameters.values()]
    return gradcheck(run, values, atol=1e-6)


class With(nn.Module):
    """A module with the layout bound, so that only tensors are left as arguments."""

    def __init__(self, module, *bound, last=()):
        super().__init__()
        self.module, self.bound, self.last = module, bound, last

    def forward(self, *tensors):
        return self.module(*tensors, *self.bound, *self.last)


PARTS = {
    "pffn": lambda: With(Pffn(4, 2, 2, 2, 3, PffnConfig(activation="silu")), layout([2, 0, 1])),
    "pffn generated": lambda: With(Pffn(4, 2, 2, 2, 3, PffnConfig(keys=3)), layout([2, 0, 1])),
    "pffn norm_gdpa": lambda: With(Pffn(4, 2, 2, 2, 3, PffnConfig(kind="norm_gdpa")), layout([2, 0, 1])),
    "attention candidate cls": lambda: With(SelfAttention(4, 2, 2, "causal_window", window=1), layout([2, 0, 1], cls=1, candidate=True)),
    "attention block": lambda: With(
        SelfAttention(4, 2, 2, "block", block=2), layout([3, 0, 1]), last=(rotary_angles(layout([3, 0, 1]), 2, "position"),)
    ),
    "attention qk norm": lambda: With(SelfAttention(4, 2, 2, "full", qk_norm=True, norm="layer"), layout([2, 0, 1])),
    "ffn": lambda: FeedForward(4, 6),
    "gate": lambda: Gate(4),
    "mix": lambda: TokenMix(3, 2),
    "wukong": lambda: Wukong(3, 4, 2, WukongConfig(rank=2, hidden=3)),
    "wukong full": lambda: Wukong(3, 4, 2, WukongConfig(rank=0, hidden=3)),
    "sum kron": lambda: SumKron(3, 2, 2, 3, terms=2),
    "cross": lambda: Cross(3, 2, 2),
    "dot": lambda: Dot(3, 2, 2, DotConfig(hidden=3)),
    "experts": lambda: SummedExperts(
        3, 2, InteractionConfig(experts=("wukong", "dot"), tokens=4, wukong=WukongConfig(rank=2, hidden=3), dot=DotConfig(hidden=3))
    ),
}


@pytest.mark.parametrize("name", PARTS)
def test_gradcheck(name):
    module = PARTS[name]().double()
    rows = module.bound[0] if isinstance(module, With) else None
    if name.startswith("pffn"):
        tensors = (randn(3, 4), randn(3, 2, 3, seed=1))
    elif rows is not None:
        tensors = (randn(rows.count, 4),)
    else:
        tensors = (randn(3, 4) if name in ("ffn", "gate") else randn(2, 3, 2),)
    assert differentiate(module, *tensors)


def test_gradcheck_pooling():
    rows = layout([2, 0, 1], cls=1, candidate=True)
    pooling = Pooling(PoolingConfig(seeds=1, candidate_queries=1, recent=2), 4, 2, 2, 3, cls=1, candidate=True).double()

    class Ordered(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = pooling

        def forward(self, s, candidate):
            return self.inner(s, rows, candidate)  # the rows themselves too: their gradient goes through the projection's

    assert differentiate(Ordered(), randn(rows.count, 4), randn(3, 4, seed=1))


# --- who sees whom -----------------------------------------------------------------------------------------------------------------------


def influence(function, s):
    """``[N, N]`` bool: whether output row i changes with input row j."""
    jacobian = torch.autograd.functional.jacobian(function, s)
    return jacobian.abs().amax((1, 3)) > 1e-12


def block(attention, **options):
    config = SequenceConfig(dim=DIM, heads=HEADS, attention=attention, ffn=8, **options)
    return SequenceBlock(config, TOKENS, TOKEN_DIM).double()


def same_sample(rows):
    return rows.sample.unsqueeze(1) == rows.sample


@pytest.mark.parametrize("kind", ["full", "causal", "window", "block"])
def test_histories_are_isolated_and_masks_hold(kind):
    rows = layout([3, 0, 1, 6])
    s, x = inputs(rows)
    seen = influence(lambda t: block(kind, window=2, block=4)(t, x, rows), s)
    i, j = rows.position.unsqueeze(1), rows.position
    allowed = {"full": i >= 0, "causal": j <= i, "window": (i - j).abs() <= 2, "block": i // 4 == j // 4}[kind]
    assert torch.equal(seen, same_sample(rows) & allowed)


def test_the_history_never_sees_the_candidate_and_the_candidate_sees_it_all():
    rows = layout([3, 0, 6], candidate=True)
    s, x = inputs(rows)
    seen = influence(lambda t: block("causal", candidate=True)(t, x, rows), s)
    candidate = torch.isin(torch.arange(rows.count), rows.offsets[1:] - 1)
    own = same_sample(rows)
    assert torch.equal(seen[candidate], own[candidate])
    assert not seen[~candidate][:, candidate].any()


def test_cls_rows_see_and_are_seen_by_the_history():
    rows = layout([3, 0, 6], cls=2)
    s, x = inputs(rows)
    seen = influence(lambda t: block("causal_window", cls=2, window=1)(t, x, rows), s)
    cls, own = rows.position < 2, same_sample(rows)
    assert torch.equal(seen[cls], own[cls])
    assert torch.equal(seen[:, cls], own[:, cls])
    i, j = rows.position.unsqueeze(1), rows.position
    events = ~cls.unsqueeze(1) & ~cls
    assert torch.equal(seen & events, own & events & (j <= i) & (i - j <= 1))


def test_feature_tokens_change_their_own_sample_only():
    rows = layout([3, 0, 1, 6])
    s, x = inputs(rows)
    module = block("full")
    changed = module(s, x + torch.tensor([0.0, 1.0, 0.0, 1.0]).double().view(4, 1, 1) * randn(4, TOKENS, TOKEN_DIM, seed=5), rows)
    same = (changed == module(s, x, rows)).all(1)
    assert same.tolist() == [True] * 4 + [False] * 6


def test_rotary_scores_depend_on_distance_only():
    rows = layout([5])
    q, k = randn(1, HEADS, WIDTH).expand(5, -1, -1), randn(1, HEADS, WIDTH, seed=1).expand(5, -1, -1)
    cos, sin = rotary_angles(rows, WIDTH, "position").of(rows)
    scores = torch.einsum("qhd,khd->hqk", rotate(q, cos.double(), sin.double()), rotate(k, cos.double(), sin.double()))
    assert torch.allclose(scores[:, 0, 1], scores[:, 3, 4], atol=1e-5)
    assert not torch.allclose(scores[:, 0, 1], scores[:, 0, 2])


def test_rotary_by_time_uses_the_ages():
    rows = layout([2, 1])
    rows.ages = torch.tensor([2.0, 0.5, 0.0])
    cos, sin = rotary_angles(rows, 4, "time", base=100.0).of(rows)
    assert torch.allclose(cos, torch.outer(rows.ages, torch.tensor([1.0, 0.1])).cos())
    assert torch.allclose(sin, torch.outer(rows.ages, torch.tensor([1.0, 0.1])).sin())

"""The guard's parts: thresholds, hysteresis, spikes, drift, state."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import nn

import gem_precision
from gem_core.errors import NumericsError
from gem_core.testing.strategies import run_processes
from gem_core.train.pack import pack, unpack
from gem_precision.formats import quantize_mx
from gem_precision.gemm import quantise
from gem_precision.guard import GuardConfig, NumericsGuard
from gem_precision.guard.losses import LossWatch
from gem_precision.guard.metrics import metrics, violations
from gem_precision.policy import Operand, mx_linear
from gem_precision.recipe import RecipeConfig
from gem_precision.site import SUMS, Site, linear_levels, measure


def sums(**changes: float) -> list[float]:
    base = dict.fromkeys(SUMS, 0.0) | {"amax": 1.0, "count": 1000.0, "signal": 1000.0, "error": 1.0, "dot": 999.5, "coded": 1000.0}
    return [float(v) for v in (base | changes).values()]


def guarded(**options) -> tuple[NumericsGuard, Site]:
    site = Site("net.up", "linear", linear_levels("mxfp8", mx_linear()))
    return NumericsGuard([site], GuardConfig(**{"sample_every": 1, "patience": 2, "quiet": 3} | options)), site


def feed(guard: NumericsGuard, step: int, loss: float = 1.0, **operands: list[float]) -> None:
    """One step in which the site reported these sums; ``fprop_x`` stands for fprop.x."""
    for name, values in operands.items():
        next(iter(guard.sites.values())).samples[name.replace("_", ".")] = torch.tensor(values, dtype=torch.float64)
    guard.on_step(step, torch.tensor(loss))


def test_metrics_from_sums():
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    q = quantize_mx(x)
    m = metrics(measure(x, q).tolist())
    decoded = q.dequantize()
    assert m["amax"] == pytest.approx(float(x.abs().max()))
    assert m["sqnr_db"] == pytest.approx(float(10 * torch.log10(x.square().sum() / (x - decoded).square().sum())), rel=1e-5)
    assert m["cosine"] == pytest.approx(float(nn.functional.cosine_similarity(x.flatten(), decoded.flatten(), dim=0)), abs=1e-6)
    assert m["relative_error"] == pytest.approx(float(((x - decoded) / x).abs().mean()), rel=1e-4)
    assert m["norm"] == pytest.approx(float(x.norm()), rel=1e-5)
    assert violations(m, GuardConfig()) == []
    empty = metrics(measure(x[:0], quantize_mx(x[:0])).tolist())
    assert violations(empty, GuardConfig()) == []


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"saturated": 2.0}, {"saturation"}),
        ({"flushed": 300.0}, {"underflow"}),
        ({"relative": 200.0}, {"relative_error"}),
        ({"error": 100.0}, {"sqnr_db"}),
        ({"dot": 900.0}, {"cosine"}),
        ({"dead": 1.0}, {"dead"}),
        ({"spoiled": 32.0}, {"spoiled"}),
        ({"spoiled": 32.0, "bad": 1.0}, set()),
    ],
)
def test_each_threshold(change, names):
    """A tensor that was not finite before is somebody else's fault."""
    assert {name for name, _ in violations(metrics(sums(**change)), GuardConfig())} == names


def test_patience_then_demotion_to_where_the_operand_is_not_quantised():
    guard, site = guarded()
    feed(guard, 1, wgrad_dy=sums(flushed=300.0))
    assert site.precision == "mxfp8"
    feed(guard, 2, wgrad_dy=sums(flushed=300.0))
    assert site.precision == "mxfp8-wgrad-bf16"
    feed(guard, 3, wgrad_dy=sums(), fprop_x=sums(flushed=300.0))
    feed(guard, 4, wgrad_dy=sums(), fprop_x=sums(flushed=300.0))
    assert site.precision == "bf16"
    first, second = guard.decisions
    assert (first.before, first.after, first.step) == ("mxfp8", "mxfp8-wgrad-bf16", 2)
    assert first.evidence["underflow"] == 0.3
    assert "wgrad.dy: underflow" in str(first)
    assert second.reason == "fprop.x: underflow"
    assert "fprop.x" in guard.describe()[0][2]


def test_one_clean_sample_resets_the_strikes():
    guard, site = guarded()
    for step in range(1, 10):
        feed(guard, step, fprop_x=sums(flushed=300.0) if step % 2 else sums())
    assert site.precision == "mxfp8"


@pytest.mark.parametrize("grave", [{"dead": 1.0}, {"spoiled": 32.0}])
def test_faults_need_no_patience(grave):
    guard, site = guarded()
    feed(guard, 1, fprop_w=sums(**grave))
    assert site.precision == "bf16"


def test_promotion_after_a_quiet_period_that_doubles():
    guard, site = guarded(max_demotions=9)
    step, quiet = 1, []
    for _ in range(3):
        feed(guard, step, fprop_x=sums(dead=1.0))
        assert site.precision == "bf16"
        begin = step
        while site.precision == "bf16":
            step += 1
            feed(guard, step, fprop_x=sums())
        quiet.append(step - begin)
        while site.level:
            step += 1
            feed(guard, step, fprop_x=sums())
        step += 1
    assert quiet == [3, 6, 12]


def test_a_site_that_falls_too_often_stays_down():
    guard, site = guarded(max_demotions=1)
    feed(guard, 1, fprop_x=sums(dead=1.0))
    for step in range(2, 200):
        feed(guard, step, fprop_x=sums())
    assert site.precision == "bf16"


def test_spikes():
    watch = LossWatch(GuardConfig(spike_window=20))
    generator = torch.Generator().manual_seed(0)
    losses = (0.6 + 0.02 * torch.randn(500, generator=generator)).tolist()
    assert [watch.see(x) for x in losses] == [None] * 500
    assert watch.see(2.0) == "spike"
    assert watch.see(0.6) is None
    assert watch.see(math.nan) == "nonfinite"
    # a slow rise is not a spike
    assert all(watch.see(0.6 + 0.01 * i) is None for i in range(200))


def test_spike_shelters_all_sites_and_they_come_back():
    guard, site = guarded(spike_window=8)
    for step in range(1, 20):
        feed(guard, step, loss=0.6 + 0.001 * (step % 3), fprop_x=sums())
    feed(guard, 20, loss=5.0, fprop_x=sums())
    assert site.precision == "bf16"
    assert "spike" in guard.decisions[0].reason
    assert guard.records[site.name].demotions == 0
    for step in range(21, 30):
        feed(guard, step, loss=0.6, fprop_x=sums())
    assert site.precision == "mxfp8"


def test_attention_which_is_not_tried_in_bf16_comes_back_after_a_quiet_period():
    site = Site("layer", "attention", [("mxfp8", "low"), ("bf16", None)])
    guard = NumericsGuard([site], GuardConfig(sample_every=1, quiet=3, alarm_steps=2, spike_window=8))
    feed(guard, 1, q=sums(dead=1.0))
    assert site.precision == "bf16"
    for step in range(2, 4):
        feed(guard, step)
    assert site.precision == "bf16"
    feed(guard, 4)
    assert site.precision == "mxfp8"
    # and an alarm ends while nothing is tried, so that steps are replayed again
    for step in range(5, 20):
        feed(guard, step, loss=0.6 + 0.001 * (step % 3), q=sums())
    feed(guard, 20, loss=5.0, q=sums())
    assert (site.precision, guard.alarm) == ("bf16", 2)
    feed(guard, 21, loss=0.6)
    feed(guard, 22, loss=0.6)
    assert guard.alarm == 0


def samples_apart(rank: int, world: int, _: None) -> dict:
    """Experts that are spread: every rank knows all sites, and samples its own; the last has none."""
    sites = [Site(f"expert.{i}", "linear", linear_levels("mxfp8", mx_linear())) for i in range(3)]
    guard = NumericsGuard(sites, GuardConfig(sample_every=1))
    if rank < 2:
        operands = {"fprop.x": sums(dead=float(rank == 1))} | ({"dgrad.w": sums()} if rank else {})
        sites[rank].samples.update({name: torch.tensor(values, dtype=torch.float64) for name, values in operands.items()})
    guard.on_step(1, torch.tensor(1.0))
    return pack(guard.state_dict())[0]


def test_sites_that_are_not_on_all_ranks_are_judged_apart_and_known_to_all(tmp_path):
    states = run_processes(3, samples_apart, None, tmp_path)
    assert states[0]["levels"] == {"expert.0": 0, "expert.1": 2, "expert.2": 0}
    assert states[0]["records"]["expert.1"]["worst"].keys() == {"fprop.x", "dgrad.w"}
    assert states == states[:1] * 3


def sampled_again(rank: int, world: int, _: None) -> list:
    """Steps in which ranks sample what they did before, less, and more; of each what is judged, and whether names travelled."""
    sites = [Site(f"expert.{i}", "linear", linear_levels("mxfp8", mx_linear())) for i in range(3)]
    guard, told = NumericsGuard(sites, GuardConfig(sample_every=1)), []
    real = torch.distributed.all_gather_object
    torch.distributed.all_gather_object = lambda *arguments: (told.append(step), real(*arguments))
    seen = []
    for step, mine in enumerate([{0: 0, 1: 1}, {0: 0, 1: 1}, {1: 1}, {0: 2, 1: 0}, {0: 1, 1: 2}, {}], 1):
        if rank in mine:
            sites[mine[rank]].samples["fprop.x"] = torch.tensor(sums(), dtype=torch.float64)
        guard.on_step(step, torch.tensor(1.0))
        seen.append({name: record.worst.get("fprop.x", {}).get("amax") for name, record in guard.records.items()})
        for record in guard.records.values():
            record.worst = {}
    return [seen, told]


def test_names_of_what_is_sampled_travel_once(tmp_path):
    found = run_processes(2, sampled_again, None, tmp_path)
    assert found[0] == found[1]
    seen, told = found[0]
    assert told == [1, 4]
    assert [{name[-1]: None for name, worst in step.items() if worst is not None} for step in seen] == [
        dict.fromkeys(names) for names in ("01", "01", "1", "02", "12", "")
    ]


def test_nonfinite_losses_raise_the_alarm_then_shelter_then_stop():
    guard, site = guarded(sample_every=1000, alarm_steps=3, stop_after=4)
    feed(guard, 1, loss=0.5)
    assert not site.sampling
    feed(guard, 2, loss=math.nan)
    assert site.sampling
    for step in range(3, 8):
        feed(guard, step, loss=math.nan)
    with pytest.raises(NumericsError, match="safest precision"):
        feed(guard, 8, loss=math.nan)
    assert site.precision == "bf16"


def test_sampling_rhythm_and_evaluation_is_not_sampled():
    net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32))
    guard = gem_precision.apply(net, "mxfp8", config=RecipeConfig(guard=GuardConfig(sample_every=4)))
    site = guard.sites["0"]
    sampled = []
    for step in range(1, 10):
        net.eval()
        net(torch.full((4, 64), 1e30))
        net.train()
        loss = net(torch.randn(4, 64)).float().square().mean()
        loss.backward()
        if site.samples:
            sampled.append(step)
            assert site.samples["fprop.x"][0] < 100
            assert set(site.samples) == {"fprop.x", "fprop.w", "wgrad.x", "dy", "dgrad.dy", "dgrad.w", "wgrad.dy"} - {"dgrad.dy", "dgrad.w"}
        guard.on_step(step, loss.detach())
    assert sampled == [1, 4, 8]


def test_recordings_are_named_by_the_levels_and_samples_are_not_recorded():
    guard, site = guarded(sample_every=3)
    names = []
    for step in range(1, 8):
        names.append(guard.recording())
        assert (names[-1] is None) == site.sampling
        feed(guard, step, **({"wgrad_dy": sums(dead=1.0)} if step == 3 else {}))
    assert names == [None, (0,), None, (1,), (1,), None, (1,)]
    assert guard.capturable
    site.generator = torch.Generator()
    assert not guard.capturable
    off, _ = guarded(enabled=False)
    assert off.recording() == (0,)


@pytest.mark.parametrize("along", [0, 1])
@pytest.mark.parametrize("block", [(1, 32), (32, 32), (1, 0), (128, 128)])
def test_windows_cover_a_large_tensor(block, along):
    """Every window is measured as if it were alone; the turns reach all of them; NaN anywhere is seen at once."""
    operand = Operand("mx" if 32 in block else "fp8", block=block)
    x = torch.randn(300, 4500, generator=torch.Generator().manual_seed(0))
    wide = x if along == 1 else x.t()
    q = quantise(x, operand, along=along)
    seen = set()
    places = -(-wide.shape[0] // 128) * -(-wide.shape[1] // 2048)
    for turn in range(places):
        sums = dict(zip(SUMS, measure(wide, q, turn).tolist()))
        assert sums["count"] <= 128 * 2048
        assert 28 < 10 * math.log10(sums["signal"] / sums["error"]) < 36
        seen.add(sums["signal"])
    assert len(seen) == places
    x[299, 4499] = math.nan
    sums = dict(zip(SUMS, measure(wide, quantise(x, operand, along=along), 0).tolist()))
    assert sums["bad"] == 1
    assert sums["spoiled"] >= 1


def test_a_demoted_site_is_still_tried():
    net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32))
    guard = gem_precision.apply(net, "mxfp8", config=RecipeConfig(guard=GuardConfig(sample_every=1)))
    site = guard.sites["0"]
    site.move(2)
    plain = torch.nn.functional.linear(torch.ones(4, 64), net[0].weight.bfloat16().float())
    net(torch.ones(4, 64, requires_grad=True)).float().sum().backward()
    assert {"fprop.x", "fprop.w", "wgrad.x", "wgrad.dy", "dgrad.dy"} <= set(site.samples)
    with guard.shadow():
        torch.testing.assert_close(net[0](torch.ones(4, 64)) - net[0].bias, plain, rtol=1e-5, atol=1e-5)


def test_drift_demotes_the_site_of_the_largest_error():
    sites = [Site(n, "linear", linear_levels("mxfp8", mx_linear())) for n in ("first", "second")]
    guard = NumericsGuard(sites, GuardConfig(sample_every=1, drift_every=2))
    guard.watch(lambda rows: 0.9 if sites[1].level else 0.91)
    for step in (1, 2):
        sites[0].samples["fprop.x"] = torch.tensor(sums(relative=20.0), dtype=torch.float64)
        sites[1].samples["fprop.x"] = torch.tensor(sums(relative=40.0), dtype=torch.float64)
        values = guard.on_step(step, torch.tensor(0.5))
    assert [d.site for d in guard.decisions] == ["second"]
    assert (guard.decisions[0].evidence["ne"], guard.decisions[0].evidence["shadow_ne"]) == (0.91, 0.9)
    assert [d["site"] for d in guard.take_decisions()] == ["second"]
    assert guard.take_decisions() == []
    assert values["guard_drift"] == pytest.approx(0.91 / 0.9 - 1)
    for step in (3, 4):
        guard.on_step(step, torch.tensor(0.5))
    assert len(guard.decisions) == 1


def test_state_goes_through_a_checkpoint():
    config = RecipeConfig(stochastic_gradients=True, guard=GuardConfig(sample_every=1))

    def fresh() -> tuple[nn.Module, NumericsGuard]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 32))
        return net, gem_precision.apply(net, "mxfp8", config=config)

    def step(net: nn.Module, guard: NumericsGuard, n: int) -> list[torch.Tensor]:
        net.zero_grad()
        loss = net(torch.randn(8, 64, generator=torch.Generator().manual_seed(n))).float().square().mean()
        loss.backward()
        guard.on_step(n, loss.detach())
        return [p.grad.clone() for p in net.parameters()]

    net, guard = fresh()
    guard._demote(1, guard.sites["1"], 1, "by hand", {"amax": 3.0})
    for n in range(1, 5):
        step(net, guard, n)
    described, tensors = pack([guard.state_dict(), guard.rank_state()])
    other_net, other = fresh()
    state, own = unpack(json.loads(json.dumps(described)), tensors)
    other.load_state_dict(state)
    other.load_rank_state(own)
    assert [str(d) for d in other.decisions] == [str(d) for d in guard.decisions]
    assert other.sites["1"].precision == "mxfp8-wgrad-bf16"
    # stochastic rounding goes on where it was
    for a, b in zip(step(net, guard, 5), step(other_net, other, 5)):
        assert torch.equal(a, b)
    assert pack(other.state_dict())[0] == pack(guard.state_dict())[0]


def test_disabled_guard_does_nothing():
    guard, site = guarded(enabled=False)
    assert not site.sampling
    assert guard.on_step(1, torch.tensor(math.nan)) == {}


def test_decisions_are_logged(caplog):
    guard, _ = guarded()
    feed(guard, 1, fprop_x=sums(dead=2.0))
    assert "net.up: mxfp8 -> bf16: fprop.x: dead (dead 2" in caplog.text


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_no_step_waits_for_the_device():
    net = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 64)).cuda()
    guard = gem_precision.apply(net, "fp8-block", config=RecipeConfig(allow_slow=True, guard=GuardConfig(sample_every=2)))
    x = torch.randn(256, 256, device="cuda")
    for step in range(1, 8):
        loss = net(x).float().square().mean()
        loss.backward()
        if step == 4:
            torch.cuda.set_sync_debug_mode("error")
        guard.on_step(step, loss.detach())
    torch.cuda.set_sync_debug_mode("default")

"""Captured steps: batches in rooms with slack compute what they do without, and on a GPU replayed steps are the steps themselves."""

from __future__ import annotations

import dataclasses
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gem_core.batch import Batch, SequenceGroup, SparseGroup
from gem_core.config import Features, config_from_dict, resolve
from gem_core.errors import ConfigError, RunError
from gem_core.jagged import Jagged, lengths_to_offsets
from gem_core.model.layers import side_by_side
from gem_core.model.loss import task_loss
from gem_core.model.retrieval import next_items
from gem_core.plugins import manager
from gem_core.train import captured as train_captured
from gem_core.train import step as train_step
from gem_core.train.build import build_parts
from gem_core.train.captured import MOST, Captured, FixedBatch, FixedRows, Room, check_capture, give_back, recorded
from gem_core.train.feed import Fed
from gem_core.train.measure import Meter, peak
from gem_core.train.runtime import Runtime
from gem_core.train.step import TrainStep

FEATURES = {
    "columns": ["user"],
    "tables": {"item": {"rows": 50}},
    "sparse": {"item": {"table": "item"}, "tags": {"rows": 12, "pooling": "mean"}, "weighted": {"rows": 9, "weights": "w"}},
    "sequences": {"history": {"max_length": 9, "target": {"item": "item"}, "fields": {"item": {"table": "item"}}}},
    "labels": {"ctr": {}},
}
TOWER = {"dim": 16, "heads": 2, "attention": "causal", "pffn": {"kind": "none"}, "ffn": 32, "rotary": "position"}
RANKING = {
    "gem": {
        "layers": 2, "dim": 8, "embedding_dim": 8,
        "sequence": {
            "dim": 16, "heads": 2, "attention": "causal", "candidate": True, "cls": 1, "rotary": "position", "next_event": 0.3,
            "event": {"positions": 4, "compare": True}, "pooling": {"seeds": 2, "candidate_queries": 1, "recent": 2},
        },
    },
    "sasrec": {"dim": 8, "embedding_dim": 8, "layers": 2, "heads": 1, "ffn": 16, "positions": 5, "dropout": 0.0},
    "hstu": {
        "dim": 8, "embedding_dim": 8, "layers": 2, "heads": 1, "qk_dim": 8, "v_dim": 8, "positions": 5, "position_bias": 6, "dropout": 0.0,
    },
}  # fmt: skip
RETRIEVAL = {
    "gem": {"layers": 2, "embedding_dim": 8, "sequence": {**TOWER, "event": {"positions": 5, "count_from": "oldest"}}},
    "sasrec": RANKING["sasrec"] | {"retrieval": {"loss": "sampled_softmax", "negatives": 8, "false_negatives": "history"}},
    "hstu": RANKING["hstu"] | {"retrieval": {"loss": "gbce", "negatives": 8, "false_negatives": "keep"}},
}
STEPS = [("gem", False, "rowwise_adagrad"), ("sasrec", True, "adamw"), ("hstu", True, "adamw"), ("gem", True, "adamw")]


def features(retrieval: bool) -> dict:
    if not retrieval:
        return FEATURES
    sparse = {"item": {"table": "item"}, "seen": {"table": "item"}}
    return FEATURES | {"labels": {}, "sparse": sparse, "next_item": {"item": "item", "seen": "seen", "pad": 0}}


def a_batch(seed: int, size: int, retrieval: bool, longest: int = 9) -> Batch:
    g = torch.Generator().manual_seed(seed)

    def ids(rows: int, lengths: torch.Tensor) -> Jagged:
        return Jagged.from_lengths(torch.randint(1, rows, (int(lengths.sum()),), generator=g), lengths)

    lengths = torch.randint(0, longest + 1, (size,), generator=g)
    history, one = ids(50, lengths), torch.ones(size, dtype=torch.int64)
    sparse = {"item": ids(50, one)}
    if not retrieval:
        sparse |= {
            "tags": ids(12, torch.randint(0, 4, (size,), generator=g)),
            "weighted": ids(9, torch.randint(0, 3, (size,), generator=g)),
        }
    weights = None if retrieval else {"weighted": torch.rand(sparse["weighted"].values.shape, generator=g)}
    batch = Batch(
        size=size,
        sparse=SparseGroup.from_jagged(sparse, weights),
        sequences={"history": SequenceGroup(history.offsets, {"item": history.values}, max_length=9)},
        labels=None if retrieval else torch.randint(0, 2, (size, 1), generator=g).float(),
        label_names=() if retrieval else ("ctr",),
        columns={"user": torch.arange(size)},
    )
    return next_items(batch, Features.model_validate(features(True))) if retrieval else batch


def the_model(name: str, retrieval: bool):
    config = config_from_dict({"features": features(retrieval), "model": {"name": name, **(RETRIEVAL if retrieval else RANKING)[name]}})
    torch.manual_seed(1)
    resolved = resolve(config)
    return manager().find("model", name).build(resolved.model, config.features), config.features


@pytest.mark.parametrize("retrieval", [False, True], ids=["ranking", "retrieval"])
@pytest.mark.parametrize("name", ["gem", "sasrec", "hstu"])
def test_slack_changes_neither_loss_nor_gradients(name, retrieval, monkeypatch):
    """One room filled by three batches, the middle one the largest: what it leaves behind is the slack of the last."""
    model, declared = the_model(name, retrieval)
    batches = [a_batch(1, 11, retrieval, 5), a_batch(2, 11, retrieval), a_batch(3, 11, retrieval, 4)]
    # the draws of negatives are made for all rows, slack included, so the same ones are handed to both
    table = torch.randint(1, 50, (4096, 8), generator=torch.Generator().manual_seed(5))
    if retrieval:
        monkeypatch.setattr(model.sampler, "_drawn", lambda shape, device: table[: shape[0]] if len(shape) == 2 else table[0])
    monkeypatch.setattr(torch, "rand", lambda *shape, **_: torch.linspace(0, 0.999, shape[0]))
    fixed = FixedBatch(batches[0], Room.of(batches[1]).rounded(), declared, "history" if retrieval else None)
    for given in batches:
        fixed.fill(given)
        assert fixed.batch.sequences["history"].fields["item"].shape[0] > given.tokens
        found = []
        for batch in (given, fixed.batch):
            model.zero_grad()
            loss = task_loss(model(batch), batch, total=1.0)
            loss.backward()
            found.append((loss.detach(), {n: None if p.grad is None else p.grad.to_dense().clone() for n, p in model.named_parameters()}))
        assert found[0][0].isfinite()
        assert found[0][0] > 0
        torch.testing.assert_close(found[1][0], found[0][0], rtol=2e-6, atol=0)
        for parameter, grad in found[0][1].items():
            other = found[1][1][parameter]
            assert (grad is None) == (other is None), parameter
            if grad is not None:
                bound = 2e-6 * float(grad.abs().max() + 1e-3)
                torch.testing.assert_close(other, grad, rtol=2e-5, atol=bound, msg=lambda m, name=parameter: f"{name}: {m}")


WAITS = {"_local_scalar_dense", "nonzero", "_unique2", "unique_dim", "unique_consecutive", "masked_select", "lift_fresh", "is_nonzero"}
"""Operations whose result the host reads, or that bring host numbers to the device: a recorded step may have none."""


class Waits(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.split("::")[1]
        by_mask = name.startswith(("index", "_index")) and len(args) > 1 and isinstance(args[1], list | tuple)
        if name in WAITS or name == "repeat_interleave" or (by_mask and any(getattr(i, "dtype", None) == torch.bool for i in args[1])):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("name", "retrieval", "tables"), STEPS)
def test_a_step_waits_for_nothing(name, retrieval, tables):
    """Forward, loss, backward and both optimizers on a fixed batch. On a CPU an op is one call, so this is about all around the ops."""
    device = torch.device("cpu")
    model = (RETRIEVAL if retrieval else RANKING)[name] | {"embedding_dropout": 0.2}
    train = {"steps": 3, "tables": {"kind": tables}, "clip_norm": 1.0}
    config = config_from_dict({"features": features(retrieval), "model": {"name": name, **model}, "train": train})
    step = TrainStep(build_parts(resolve(config), Runtime(device)), config, Runtime(device), Meter(device, peak("", {"fp32"})))
    batch = a_batch(1, 11, retrieval)
    fixed = FixedBatch(batch, Room.of(batch).rounded(), config.features, "history" if retrieval else None)
    fixed.fill(batch)
    totals = torch.ones(3, dtype=torch.float64)
    step._compute([fixed.batch], totals)
    with Waits() as seen:
        step._compute([fixed.batch], totals)
        assert seen.found == []
        torch.ones(2)[torch.tensor([True, False])].sum().item()
    assert {"index", "_local_scalar_dense"} <= set(seen.found)


def test_a_room_takes_what_fits_without_much_slack():
    room = Room(8, {"h": 1000}, {"a": 8, "b": 300})
    assert room.rounded() == Room(8, {"h": 1152}, {"a": 8, "b": 320})
    assert room.rounded().takes(room)
    large = Room(8, {"h": 100_000}, {})
    assert large.rounded() == Room(8, {"h": 100_352}, {})
    assert large.rounded().takes(large, 1.05)
    assert not Room(8, {"h": 106_000}, {}).takes(large, 1.05)
    assert not room.takes(Room(8, {"h": 1001}, {"a": 8, "b": 300}))
    assert not room.takes(Room(7, {"h": 900}, {"a": 7, "b": 300}))
    assert room.takes(Room(8, {"h": 700}, {"a": 8, "b": 236}))
    assert not room.takes(Room(8, {"h": 600}, {"a": 8, "b": 300}))
    assert not room.takes(Room(8, {}, {"a": 8, "b": 300}))


def test_rooms_are_tight_until_there_are_enough():
    """Batches of a training's lengths: rooms within a few per cent of what they need, and never more than are allowed."""
    captured = Captured(Features(), torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    waste = []
    for events in (30_000 + 1800 * torch.randn(400, generator=generator)).int().tolist():
        lengths = torch.full((4,), events // 4)
        batch = Batch(size=4, sequences={"history": SequenceGroup(lengths_to_offsets(lengths), {"item": torch.zeros(int(lengths.sum()))})})
        waste.append(captured._of(batch).fixed.room.events["history"] / int(lengths.sum()) - 1)
    assert 4 < len(captured._recorded) <= MOST
    assert sum(waste[50:]) / len(waste[50:]) < 0.012


def test_a_recording_serves_while_the_step_keeps_its_name(monkeypatch):
    """A name that changes is a new recording, after one step as usual; a step without a name is computed, and the recording stays."""
    done, names = [], iter("aaa-abbb-b")
    captured = Captured(Features(), torch.device("cpu"), lambda: None if (name := next(names)) == "-" else name)
    captured._pool = "a pool"

    class Graph:
        replay = staticmethod(lambda: done.append("replayed"))

    monkeypatch.setattr(train_captured, "recorded", lambda compute, pool, **_: (done.append("recorded"), (Graph(), torch.zeros(1)))[1])
    seen = []
    for _ in range(10):
        room = captured.enter(Batch(size=2, dense=torch.zeros(2, 1)), [1.0, 1.0, 0.0])
        room.part("step", lambda: done.append("computed"))
        seen.append((" ".join(done), captured.news))
        done.clear()
    new = ["computed", "recorded replayed", "replayed"]
    assert [what for what, _ in seen] == [*new, "computed", "replayed", *new, "computed", "replayed"]
    assert [news for _, news in seen] == [1, 2, 2, 2, 2, 3, 4, 4, 4, 4]


@pytest.mark.parametrize("short", [False, True])
def test_a_room_is_recorded_at_once_where_memory_is_short(short, monkeypatch):
    """A step computed as usual would need memory beside that of the graphs; the first step of all, and of a new name, has it."""
    done, names = [], iter("aaaaabb")
    captured = Captured(Features(), torch.device("cpu"), lambda: next(names))
    captured._pool = "a pool"
    monkeypatch.setattr(captured, "_short_of_memory", lambda room: short)

    class Graph:
        replay = staticmethod(lambda: None)

    def record(compute, pool, *, loads):
        done.append("recorded at once" if loads else "recorded")
        return Graph(), torch.zeros(1)

    monkeypatch.setattr(train_captured, "recorded", record)
    seen = []
    for size in (1, 1, 2, 2, 0, 1, 2):
        room = captured.enter(Batch(size=size, dense=torch.zeros(size, 1)), [1.0, 1.0, 0.0])
        room.part("step", lambda: done.append("computed"))
        seen.append(" ".join(done))
        done.clear()
    first = ["computed", "recorded"]
    if short:
        assert seen == [*first, "recorded at once", "", "computed", "computed", "recorded at once"]
    else:
        assert seen == [*first, *first, "computed", "computed", "computed"]


def test_what_a_step_needs_is_told_from_what_graphs_hold(monkeypatch):
    captured = Captured(Features(), torch.device("cpu"))
    room = Room(8, {"h": 900}, {"a": 100})
    held, free = [{"total_size": 300}, {"total_size": 200}], [10_000]
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda pool: held)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[0], 0))
    first = captured.enter(Batch(size=2, dense=torch.zeros(2, 1)), [1.0, 1.0, 0.0])
    first.fixed.room = room
    free[0] = 0
    assert not captured._short_of_memory(room), "nothing was recorded"
    first.graphs["step"] = None
    for more, least in ((1, 550), (2, 1100), (0.5, 275)):
        other = Room(8, {"h": int(900 * more)}, {"a": int(100 * more)})
        free[0] = least - 1
        assert captured._short_of_memory(other)
        free[0] = least + 1
        assert not captured._short_of_memory(other)


def test_several_values_an_event_are_refused():
    inner = Jagged.from_lengths(torch.arange(3), torch.tensor([1, 2]))
    batch = Batch(size=1, sequences={"h": SequenceGroup(torch.tensor([0, 2]), {"tags": inner})})
    with pytest.raises(RunError, match="several values an event") as caught:
        Room.of(batch)
    assert "features.sequences.h.fields.tags" in str(caught.value)


def test_runs_that_cannot_be_captured_are_refused(tmp_path):
    config = config_from_dict({
        "run": {"device": "cpu", "dir": str(tmp_path)}, "model": {"name": "sasrec", **RETRIEVAL["sasrec"]}, "features": features(True),
        "train": {"steps": 2, "capture": True},
    })  # fmt: skip
    parts = build_parts(resolve(config), Runtime(torch.device("cpu")))
    cuda = Runtime(torch.device("cuda"))
    check_capture(parts, config, cuda)
    wrong = [
        (parts, config, Runtime(torch.device("cpu")), "on cpu"),
        (dataclasses.replace(parts, module=torch.nn.Identity()), config, dataclasses.replace(cuda, world=2), "parallel.dense"),
        (parts, config, dataclasses.replace(cuda, world=2), "in its forward pass"),
        (parts, config.model_copy(update={"train": config.train.model_copy(update={"accumulate": 2})}), cuda, "accumulate"),
        (parts, config.model_copy(update={"train": config.train.model_copy(update={"compile": True})}), cuda, "compile"),
        (dataclasses.replace(parts, tables=torch.nn.Identity()), config, cuda, "in its forward pass"),
        (dataclasses.replace(parts, guard=object()), config, cuda, "recipe 'fp32'"),
        (dataclasses.replace(parts, model=torch.nn.Identity()), config, cuda, "slack"),
    ]
    for a, b, c, told in wrong:
        with pytest.raises(ConfigError, match=told) as caught:
            check_capture(a, b, c)
        assert "train.capture" in str(caught.value)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("short", [False, True], ids=["computed", "at_once"])
@pytest.mark.parametrize(("name", "retrieval", "tables"), STEPS)
def test_replayed_steps_are_the_steps(name, retrieval, tables, short, monkeypatch):
    """Thirty steps, batches of two sizes, a learning rate that changes: outcomes and parameters agree with
    those of steps computed as usual on the same fixed batches, dropout and negatives drawn from the same random numbers. With memory that
    is short, too, where all but the first room are recorded at once."""
    device = torch.device("cuda")
    monkeypatch.setattr(Captured, "_short_of_memory", lambda _self, _room: short)
    model = (RETRIEVAL if retrieval else RANKING)[name] | {"embedding_dropout": 0.2}
    train = {"steps": 30, "capture": True, "tables": {"kind": tables}, "clip_norm": 1.0}
    config = config_from_dict({"features": features(retrieval), "model": {"name": name, **model}, "train": train})
    batches = [a_batch(i, 96 if i % 3 else 40, retrieval).to(device) for i in range(30)]

    def trained(recorded: bool):
        parts = build_parts(resolve(config), Runtime(device))
        step = TrainStep(parts, config, Runtime(device), Meter(device, peak("", {"fp32"})))
        if not recorded:
            monkeypatch.setattr(step._captured, "_record", lambda found: None)
        parts.module.train()
        before = {n: p.detach().cpu() for n, p in parts.model.named_parameters()}
        torch.manual_seed(3)
        outcomes = []
        for i, batch in enumerate(batches):
            step.set_lr(1.0 / (1 + i))
            weight = float(batch.size) if not retrieval else float(batch.target_mask.sum())
            outcomes.append(step([Fed(batch, batch, weight, 0, None, {})], i == 11))
        assert step._captured is not None
        graphs = [r.graphs for r in step._captured._recorded]
        assert len(graphs) <= 8
        # a room that one batch alone went into has no recording, unless it was made at once
        assert sum(bool(g) for g in graphs) >= (len(graphs) if short else 2) if recorded else not any(graphs)
        after = {n: p.detach().cpu() for n, p in parts.model.named_parameters()}
        assert sum(not torch.equal(after[n], before[n]) for n in before) > 0.9 * len(before)
        return torch.stack(outcomes).cpu(), after

    (usual, expected), (replayed, got) = trained(False), trained(True)
    assert usual[:, 0].isfinite().all()
    torch.testing.assert_close(replayed, usual, rtol=1e-4, atol=1e-5)
    assert usual[11:13, 3].tolist() == [1, 0]
    for parameter, value in expected.items():
        torch.testing.assert_close(got[parameter], value, rtol=1e-3, atol=1e-4, msg=lambda m, name=parameter: f"{name}: {m}")


def test_gradients_of_small_tables_are_dense_where_steps_are_recorded():
    """Adding sparse gradients merges them once they have more entries than the table: tables with fewer rows than are asked for."""
    model, _ = the_model("gem", False)
    batch, found = a_batch(3, 40, False), []
    for small in (False, True):
        torch.manual_seed(1)  # of the next events that are compared
        model.tables.small_dense = small
        model.zero_grad()
        task_loss(model(batch), batch, total=1.0).backward()
        found.append({name: model.tables.weight(name).grad for name in ("item", "sparse.tags", "sparse.weighted")})
    assert all(grad.is_sparse for grad in found[0].values())
    assert not any(grad.is_sparse for grad in found[1].values())
    for name, grad in found[1].items():
        torch.testing.assert_close(grad, found[0][name].to_dense(), rtol=1e-5, atol=1e-7)
    model.tables.zero_grad()
    model(a_batch(3, 2, False)).logits.sum().backward()
    assert model.tables.weight("item").grad.is_sparse


def test_a_shape_too_many_takes_the_place_of_the_one_longest_unused(caplog):
    captured = Captured(Features.model_validate(features(True)), torch.device("cpu"))
    rooms = [captured.enter(a_batch(size, size, True), [1.0, 1.0, 0.0]) for size in range(1, MOST + 1)]
    captured.enter(a_batch(5, 1, True), [1.0, 1.0, 0.0])  # the first room is used again, so the second is the oldest
    kept = weakref.ref(rooms[1])
    assert captured.given_up == 0
    assert not caplog.records
    new = captured.enter(a_batch(1, MOST + 1, True), [1.0, 1.0, 0.0])
    del rooms[1]
    assert new.fixed.batch.size == MOST + 1
    assert len(captured._recorded) == MOST
    assert kept() is None
    assert captured.enter(a_batch(6, 1, True), [1.0, 1.0, 0.0]) is rooms[0]
    assert captured.enter(a_batch(6, 2, True), [1.0, 1.0, 0.0]).fixed.batch.size == 2
    assert captured.given_up == 2
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "data.drop_last" in caplog.text


def trained(batches, monkeypatch, *, cut: bool, name: str = "gem", watched=None, **train):
    """Outcomes, parameters and rooms of steps on ``batches`` with the core's tables: computed as usual, or cut at the look-ups."""
    device = torch.device("cpu")
    config = config_from_dict({
        "features": FEATURES, "model": {"name": name, **RANKING[name]},
        "train": {"steps": len(batches), "clip_norm": 0.5, "nonfinite": "skip", "capture": cut, **train},
    })  # fmt: skip
    monkeypatch.setattr(train_step, "check_capture", lambda *_: None)
    monkeypatch.setattr(train_step, "cuts", lambda *_: True)
    step = TrainStep(build_parts(resolve(config), Runtime(device)), config, Runtime(device), Meter(device, peak("", {"fp32"})))
    step.parts.module.train()
    outcomes = []
    with watched or nullcontext():
        for i, batch in enumerate(batches):
            step.set_lr(1.0 / (1 + i))
            outcomes.append(step([Fed(batch, batch, float(batch.size), 0, None, {})], i == 3))
    return torch.stack(outcomes), dict(step.parts.model.state_dict()), [] if step._captured is None else step._captured._recorded


@pytest.mark.parametrize("ok", [True, False])
def test_gradients_of_look_ups_are_zeros_in_a_step_that_does_not_count(ok):
    rows = {"a": torch.randn(3, 2, requires_grad=True), "b": torch.randn(4, 2).bfloat16().requires_grad_(), "c": torch.randn(1, 2)}
    rows["d"] = torch.randn(4, 3).bfloat16().requires_grad_()
    looked_up = {"a": rows["a"] * 1, **{key: (rows[key] * 1, torch.tensor([0, 4])) for key in "bd"}, "c": rows["c"]}
    odd = torch.tensor([[1.0, -2.0], [float("nan"), 3.0], [float("inf"), -0.0], [9.0, 9.0]])
    beside = torch.arange(25.0).view(5, 5).bfloat16()
    expected = {"a": odd[:3].clone(), "b": beside[:4, :2].clone(), "d": beside[:4, 2:].clone()}
    give_back(looked_up, {("a",): odd, ("b", "d"): beside, ("c",): torch.ones(1, 2)}, torch.tensor(ok))
    for key, grad in expected.items():
        torch.testing.assert_close(rows[key].grad, grad if ok else torch.zeros_like(grad), rtol=0, atol=0, equal_nan=True)
    assert rows["c"].grad is None


def test_fields_of_events_lie_side_by_side():
    """A model that reads them one after another reads one tensor, and its gradient is not cut and copied; one that reads them by
    themselves gets theirs."""
    offsets, room = torch.tensor([0, 2, 3]), Room(2, {"h": 5}, {})
    like = {"sparse.s": torch.ones(2, 4, requires_grad=True)}
    like |= {f"sequences.h.fields.{f}": (torch.full((3, n), float(n), requires_grad=True), offsets) for f, n in (("x", 2), ("y", 3))}
    rows = FixedRows(like, room, {})
    rows.fill(like)
    found = rows.embedded()
    x, y = (found[f"sequences.h.fields.{f}"][0] for f in "xy")
    assert torch.equal(found["sparse.s"], like["sparse.s"])
    assert torch.equal(found["sequences.h.fields.x"][1], offsets)
    joined = side_by_side([x, y])
    assert joined.is_leaf
    assert torch.equal(joined[:3], torch.cat([torch.full((3, 2), 2.0), torch.full((3, 3), 3.0)], 1))
    assert not side_by_side([y, x]).is_leaf
    (joined.sum() + 2 * y.sum()).backward()
    keys = ("sequences.h.fields.x", "sequences.h.fields.y")
    assert torch.equal(rows.take_gradients()[keys], torch.tensor([1.0, 1.0, 3.0, 3.0, 3.0]).expand(5, 5))
    assert not rows.take_gradients()


@pytest.mark.parametrize("name", ["gem", "sasrec", "hstu"])
def test_a_step_cut_at_the_look_ups_is_the_step(name, monkeypatch):
    """Pooled, weighted and per-event look-ups, rooms with slack, clipping, a learning rate that changes, a batch whose loss is not finite
    and that changes nothing."""
    batches = [a_batch(i, 24 if i % 3 else 13, False, 9 - 4 * (i % 2)) for i in range(10)]
    batches[4] = dataclasses.replace(batches[4], weights=torch.full((batches[4].size,), float("inf")))
    batches = [b if b.weights is not None else dataclasses.replace(b, weights=torch.rand(b.size) + 0.5) for b in batches]
    (expected, wanted, _), (got, found, rooms) = (trained(batches, monkeypatch, cut=cut, name=name) for cut in (False, True))
    assert expected[:, 2].tolist() == [float(i == 4) for i in range(10)]
    assert expected[:, 3].tolist() == [float(i == 3) for i in range(10)]
    assert expected[5:, 0].isfinite().all()
    assert (expected[[0, 1, 2, 3], 6] > 0.5).any(), "nothing is clipped"
    torch.testing.assert_close(got, expected, rtol=2e-5, atol=1e-6, equal_nan=True)
    for parameter, value in wanted.items():
        torch.testing.assert_close(found[parameter], value, rtol=1e-4, atol=2e-5, msg=lambda m, name=parameter: f"{name}: {m}")
    assert len(rooms) > 2
    assert all(room.rows.embedded()["sequences.history.fields.item"][0].shape[0] > 13 for room in rooms)


def test_a_cut_step_waits_for_nothing(monkeypatch):
    """From the choice of a room and the copies into it to the update of the tables."""
    watched = Waits()
    batches = [a_batch(i, 24, False, 5 + i % 4) for i in range(5)]
    # on the host, where that waits for nothing, the ends of histories without slack are checked
    unchecked = [dataclasses.replace(b, sequences={"history": dataclasses.replace(b.sequences["history"], slack=True)}) for b in batches]
    trained(unchecked, monkeypatch, cut=True, watched=watched)
    assert watched.found == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_after_a_recording_that_failed_the_process_goes_on():
    """Waiting for the device inside a recording is an error that says so; random numbers, memory and the next recording are as ever."""
    device, pool = torch.device("cuda"), torch.cuda.graph_pool_handle()
    x = torch.ones(1024, device=device)
    stream = torch.cuda.current_stream()
    with pytest.raises(RunError, match="cannot be recorded") as caught:
        recorded(lambda: torch.rand_like(x) * x.sum().item(), pool)
    assert "capturing" in str(caught.value)
    assert torch.cuda.current_stream() == stream
    assert torch.rand(4, device=device).std() > 0
    graph, y = recorded(lambda: torch.rand_like(x) + x, torch.cuda.graph_pool_handle())
    graph.replay()
    first = y.clone()
    graph.replay()
    assert (first >= 1).all()
    assert not torch.equal(first, y)
    del first
    torch.cuda.empty_cache()

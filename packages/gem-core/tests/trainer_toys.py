"""A small model, a small source and a plug-in that offers them: the trainer's tests need neither the real model nor real data."""

from __future__ import annotations

import json
import sys
from importlib.metadata import EntryPoint

import torch
from torch import nn

import gem_core.train
from gem_core import plugins
from gem_core.batch import Batch, SequenceGroup, SparseGroup
from gem_core.config import Features, FrozenConfig, config_from_dict
from gem_core.hookspecs import CallbackSpec, ModelSpec, SourceSpec, StrategySpec, hookimpl
from gem_core.jagged import Jagged, lengths_to_offsets
from gem_core.model.contract import ModelOutput
from gem_core.model.tables import LocalTables, sparse_group, table_set

FEATURES = {
    "tables": {"item": {"rows": 40, "dim": 4}},
    "dense": {"x0": {}, "x1": {}, "x2": {}},
    "sparse": {"item": {"table": "item"}, "tags": {"rows": 12, "dim": 4}},
    "sequences": {"hist": {"fields": {"item": {"table": "item"}}}},
    "labels": {"ctr": {}, "cvr": {"mask": "click", "weight": 0.5}},
}


class ToyConfig(FrozenConfig):
    width: int = 8
    dropout: float = 0.0
    batch_norm: bool = False


class ToyModel(nn.Module):
    """Pooled ids, the mean of the history and the dense features into an MLP. A dense feature above 1e6 makes the logits NaN."""

    def __init__(self, config: ToyConfig, features: Features) -> None:
        super().__init__()
        self.table_set = table_set(features, 4)
        self.tables = LocalTables(self.table_set)
        self.norm = nn.BatchNorm1d(3) if config.batch_norm else nn.Identity()
        self.mlp = nn.Sequential(nn.Linear(15, config.width), nn.ReLU(), nn.Dropout(config.dropout), nn.Linear(config.width, 2))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, batch: Batch) -> ModelOutput:
        looked_up = self.tables(sparse_group(batch, self.table_set.lookups))
        events, offsets = looked_up["sequences.hist.fields.item"]
        sample = torch.repeat_interleave(torch.arange(batch.size), offsets.diff(), output_size=events.shape[0])
        history = events.new_zeros(batch.size, 4).index_add_(0, sample, events) / offsets.diff().clamp(min=1).unsqueeze(1)
        x = torch.cat([looked_up["sparse.item"], looked_up["sparse.tags"], history, self.norm(batch.dense)], 1)
        bad = torch.where(batch.dense[:, :1] > 1e6, float("nan"), 0.0)
        return ModelOutput(self.mlp(x) * self.scale + bad, ("ctr", "cvr"))

    def flops(self, batch: Batch) -> dict[str, float]:
        return {"mlp": 6.0 * batch.size * sum(p.numel() for p in self.mlp.parameters() if p.dim() == 2)}


class FusedTables(LocalTables):
    """Updates its tables inside backward, as FBGEMM's do: row-wise AdaGrad on each weight as soon as its gradient is there."""

    optimizer_in_backward = True

    def configure_optimizer(self, config):
        self.eps, self.lr = config.eps, config.lr
        for name, state in super().table_states().items():
            state.weight.register_post_accumulate_grad_hook(lambda weight, name=name: self._update(name))

    def set_learning_rate(self, lr):
        self.lr = lr

    def table_states(self):
        raise AssertionError("the trainer must not update these tables itself")

    @torch.no_grad()
    def _update(self, name):
        weight, accumulator = self.weight(name), self.accumulator(name)
        gradient = weight.grad.coalesce()
        rows, values = gradient.indices()[0], gradient.values()
        accumulator[rows] += values.square().mean(1)
        weight[rows] -= self.lr * values / (accumulator[rows].sqrt() + self.eps).unsqueeze(1)
        weight.grad = None


class FusedConfig(FrozenConfig):
    pass


class ToySourceConfig(FrozenConfig):
    rows: int = 640
    eval_rows: int = 200
    nan_at: int | None = None
    told_length: bool = True
    grows: int = 0
    """How many rows a later epoch has more than the first, whose length is told of all."""
    weighted: bool = False


class ToySource:
    """Batch k of a shard holds rows ``[(k * world + rank) * batch_size, ...)``; row r is drawn from a generator seeded by r."""

    def __init__(self, config, features, *, split, batch_size, shard, seed, drop_last) -> None:
        self.config, self.split, self.batch_size, self.shard = config, split, batch_size, shard
        self.rows = config.rows if split == "train" else config.eval_rows
        self.drop_last, self.epoch, self.at = drop_last, 0, 0
        if config.told_length:
            self.__class__ = _ToldSource

    def batches(self, more: int = 0) -> int:
        world = self.shard[1] * self.batch_size
        return (self.rows + more) // world if self.drop_last else -(-(self.rows + more) // world)

    def __iter__(self):
        more = self.config.grows if self.epoch else 0
        while self.at < self.batches(more):
            k, self.at = self.at, self.at + 1
            start = (k * self.shard[1] + self.shard[0]) * self.batch_size
            yield make_batch(range(start, min(start + self.batch_size, self.rows + more)), self)
        self.epoch, self.at = self.epoch + 1, 0

    def state_dict(self):
        return {"epoch": self.epoch, "at": self.at}

    def load_state_dict(self, state):
        self.epoch, self.at = state["epoch"], state["at"]


class _ToldSource(ToySource):
    def __len__(self):
        return self.batches()


def make_batch(rows, source) -> Batch:
    items, tags, tag_lengths, events, event_lengths, dense, labels, truth = [], [], [], [], [], [], [], []
    base = 0 if source.split == "train" else 10**6
    for r in rows:
        g = torch.Generator().manual_seed(base + r)
        item = torch.randint(40, (1,), generator=g)
        history = torch.randint(40, (int(torch.randint(6, (1,), generator=g)),), generator=g)
        x = torch.randn(3, generator=g)
        p = torch.sigmoid(x[0] + (item % 4 == 0).float() * 2 - 1 + 0.3 * (history % 4 == 0).sum())
        click = (torch.rand(1, generator=g) < p).float()
        if source.split == "train" and source.config.nan_at == r:
            x[0] = 1e9
        items.append(item)
        tags.append(torch.randint(12, (int(torch.randint(4, (1,), generator=g)),), generator=g))
        tag_lengths.append(len(tags[-1]))
        events.append(history)
        event_lengths.append(len(history))
        dense.append(x)
        truth.append(p)
        labels.append(torch.cat([click, (torch.rand(1, generator=g) < 0.4).float()]))
    b = len(items)
    empty = torch.empty(0, dtype=torch.int64)
    stacked = torch.stack(labels) if b else torch.empty(0, 2)
    lengths = torch.tensor(tag_lengths, dtype=torch.int64)
    sparse = SparseGroup.from_jagged(
        {
            "item": Jagged.from_lengths(torch.cat([empty, *items]), torch.ones(b, dtype=torch.int64)),
            "tags": Jagged.from_lengths(torch.cat([empty, *tags]), lengths),
        }
    )
    offsets = lengths_to_offsets(torch.tensor(event_lengths, dtype=torch.int64))
    return Batch(
        size=b,
        dense=torch.stack(dense) if b else torch.empty(0, 3),
        dense_names=("x0", "x1", "x2"),
        sparse=sparse,
        sequences={"hist": SequenceGroup(offsets, {"item": torch.cat([empty, *events])})},
        labels=stacked,
        label_names=("ctr", "cvr"),
        label_mask=torch.stack([torch.ones(b), stacked[:, 0]], 1).bool(),
        weights=1.0 + torch.arange(b) % 3 if source.config.weighted else None,
        columns={
            "user": torch.tensor([r % 9 for r in rows], dtype=torch.int64),
            "true_probability.ctr": torch.cat([torch.empty(0), *truth]),
        },
    )


class Recorder:
    """A callback that keeps what it was told, and counts its steps across restarts."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.events, self.steps, self.fail_at = [], 0, fail_at

    def on_start(self, run):
        self.events.append("start")

    def on_step(self, run, record):
        self.steps += 1
        if run.step == self.fail_at:
            raise KeyError("broken callback")
        if record is not None:
            self.events.append(("log", run.step))

    def on_eval(self, run, results, record):
        self.events.append(("eval", run.step))

    def on_checkpoint(self, run, path, seconds):
        self.events.append(("checkpoint", run.step))

    def on_error(self, run, error):
        self.events.append(("error", type(error).__name__))

    def on_end(self, run, summary):
        self.events.append("end")

    def state_dict(self):
        return {"steps": self.steps, "tensor": torch.tensor([self.steps])}

    def load_state_dict(self, state):
        assert int(state["tensor"]) == state["steps"]
        self.steps = state["steps"]


class RecorderConfig(FrozenConfig):
    fail_at: int | None = None


class Plugin:
    gem_api = 1

    @hookimpl
    def gem_models(self):
        return [ModelSpec("toy", ToyConfig, ToyModel)]

    @hookimpl
    def gem_sources(self):
        return [SourceSpec("toy", ToySourceConfig, ToySource)]

    @hookimpl
    def gem_sparse_strategies(self):
        return [StrategySpec("fused", FusedConfig, lambda tables, mesh, config: FusedTables(tables))]

    @hookimpl
    def gem_callbacks(self):
        return [CallbackSpec("recorder", RecorderConfig, lambda config: Recorder(config.fail_at))]


plugin = Plugin()


def install() -> None:
    """Make this process's plug-in manager know the toys, beside what is installed."""
    from importlib.metadata import entry_points

    sys.modules["trainer_toys"] = sys.modules[__name__]
    found = [*entry_points(group="gem"), EntryPoint("toys", "trainer_toys:plugin", "gem")]
    plugins._manager = plugins.PluginManager(entry_points=found)


def config(**sections):
    """A configuration with the toys; keyword arguments are sections, merged key by key."""
    data = {
        "run": {"device": "cpu", "seed": 3},
        "data": {"source": "toy", "batch_size": 32, "toy": {}},
        "features": FEATURES,
        "model": {"name": "toy"},
        "train": {"steps": 30, "log_every": 1, "tensorboard": False},
        "eval": {"group": "user"},
    }
    for name, section in sections.items():
        data[name] = {**data.get(name, {}), **section}
    return config_from_dict(data)


def train(path, resume=False, overwrite=False, callbacks=(), **sections):
    return gem_core.train(config(**sections), run_dir=path, resume=resume, overwrite=overwrite, callbacks=callbacks, quiet=True)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def losses(path):
    return [(r["step"], r["loss"], r["samples"], r["grad_norm"]) for r in lines(path / "metrics.jsonl")]


def tensors(run, step):
    store = gem_core.train.runfolder.RunFolder(run).checkpoints.load(step)
    return {f"{part}.{k}": v for part in ("model", "optimizer", "tables") for k, v in store.tensors(part).items()}

"""Conformance kit for models: subclass `ModelConformance` in a test file, and pytest runs what every model must keep.

    from gem_core.testing.models import ModelConformance

    class TestMine(ModelConformance):
        def build(self, features):
            return Mine(MineConfig(), features)

`random_batch` makes a valid batch of any features; `take` picks samples out of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from gem_core.batch import Batch, SequenceGroup, SparseGroup
from gem_core.config.features import EventField, Features
from gem_core.jagged import Jagged, lengths_to_offsets
from gem_core.model.contract import ModelOutput
from gem_core.model.loss import task_loss
from gem_core.testing.rules import Rules
from gem_core.testing.sources import assert_same_batch


def sample_features() -> Features:
    """Features with one of everything: dense, vectors, single and multi-valued ids, a history with fields of every kind, a masked label."""
    return Features.model_validate(
        {
            "timestamp": "time",
            "tables": {"item": {"rows": 50, "dim": 8}, "category": {"rows": 11}},
            "dense": {"price": {}, "age": {}},
            "vectors": {"creative": {"dim": 6}},
            "sparse": {
                "user": {"rows": 40},
                "item": {"table": "item"},
                "category": {"table": "category"},
                "tags": {"rows": 13, "pooling": "mean"},
            },
            "sequences": {
                "history": {
                    "fields": {
                        "item": {"table": "item"},
                        "category": {"table": "category"},
                        "action": {"rows": 3},
                        "dwell": {"kind": "float"},
                        "picture": {"kind": "vector", "dim": 5},
                    },
                    "timestamps": "times",
                    "target": {"item": "item", "category": "category"},
                }
            },
            "labels": {"ctr": {}, "cvr": {"mask": "click"}},
        }
    )


def random_batch(
    features: Features,
    size: int,
    *,
    lengths: Sequence[int] | None = None,
    max_length: int = 12,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Batch:
    """A valid batch of ``size`` samples of ``features``, with random ids, values and labels.

    Histories have ``lengths [size]`` events, or 0 to ``max_length`` at random. Sparse features that are a candidate's side of an event
    field hold one id, others 0 to 3. A masked label counts where the first label is 1.
    """
    g = torch.Generator().manual_seed(seed)

    def integers(high: int, n: int) -> Tensor:
        return torch.randint(high, (n,), generator=g)

    def floats(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g).to(dtype)

    single = {t for s in features.sequences.values() for t in s.target.values()}
    sparse: dict[str, Jagged] = {}
    for name in features.sparse:
        n = torch.ones(size, dtype=torch.int64) if name in single else integers(4, size)
        sparse[name] = Jagged.from_lengths(integers(features.rows_of(f"sparse.{name}"), int(n.sum())), n)
    weights = {n: floats(sparse[n].values.shape[0]).abs() for n, s in features.sparse.items() if s.weights}
    sequences = {}
    for name, sequence in features.sequences.items():
        n = torch.tensor(lengths, dtype=torch.int64) if lengths is not None else integers(max_length + 1, size)
        events = int(n.sum())

        def field(path: str, f: EventField, events: int) -> Tensor:
            if f.kind == "id":
                return integers(features.rows_of(path), events)
            return floats(events) if f.kind == "float" else floats(events, int(f.dim or 0))

        fields = {f: field(f"sequences.{name}.fields.{f}", c, events) for f, c in sequence.fields.items()}
        offsets = lengths_to_offsets(n)
        times = None
        if sequence.timestamps is not None:
            times = torch.cat(
                [torch.empty(0, dtype=torch.int64), *(10_000 - integers(9_999, int(k)).sort(descending=True).values for k in n)]
            )
        sequences[name] = SequenceGroup(offsets, fields, times, int(n.max()) if size else 0)
    labels = (torch.rand(size, len(features.labels), generator=g) < 0.5).to(dtype)
    masks = [labels[:, 0] > 0 if label.mask else torch.ones(size, dtype=torch.bool) for label in features.labels.values()]
    return Batch(
        size=size,
        dense=floats(size, len(features.dense)) if features.dense else None,
        dense_names=tuple(features.dense),
        vectors={n: floats(size, v.dim) for n, v in features.vectors.items()},
        sparse=SparseGroup.from_jagged(sparse, weights or None) if sparse else None,
        sequences=sequences,
        labels=labels,
        label_names=tuple(features.labels),
        label_mask=torch.stack(masks, 1) if masks else None,
        timestamps=torch.full((size,), 20_000) if features.timestamp else None,
    )


def take(batch: Batch, order: Sequence[int]) -> Batch:
    """The samples ``order`` of a batch on the host, in that order; a sample may come twice."""
    return batch.take(torch.tensor(order, dtype=torch.int64))


def fit(model: nn.Module, batch: Batch, steps: int, *, lr: float = 1e-2, until: float = 0.0) -> float:
    """Train on one batch with Adam (sparse gradients made dense), at most ``steps`` steps and until the loss is below ``until``.

    Returns the last loss, without auxiliary losses.
    """
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    loss = float("inf")
    for _ in range(steps):
        optimizer.zero_grad()
        output = model(batch)
        loss = task_loss(output, batch, aux=False).item()
        if loss < until:
            break
        task_loss(output, batch).backward()  # type: ignore[no-untyped-call]
        for p in model.parameters():
            if p.grad is not None and p.grad.is_sparse:
                p.grad = p.grad.to_dense()
        optimizer.step()
    return loss


class ModelConformance(Rules):
    """What every registered model keeps. Override `build`, and `features` where the model asks for others."""

    overfit_steps = 200
    overfit_loss = 0.05

    def features(self) -> Features:
        return sample_features()

    def build(self, features: Features) -> nn.Module:
        raise NotImplementedError

    def _model(self, *, training: bool = False) -> nn.Module:
        torch.manual_seed(0)
        return self.build(self.features()).train(training)

    def _logits(self, model: nn.Module, batch: Batch) -> Tensor:
        with torch.no_grad():
            output: ModelOutput = model(batch)
        return output.logits

    def test_output(self) -> None:
        """Logits are `[B, T]` in the order of the declared labels, float32 and finite."""
        features = self.features()
        batch = random_batch(features, 7)
        output = self._model()(batch)
        assert output.task_names == tuple(features.labels), "task_names must be the declared labels in their order"
        assert output.logits.shape == (7, len(features.labels)), "logits must be [B, T]"
        assert output.logits.dtype == torch.float32, "logits must be float32 whatever the model computes in"
        assert bool(torch.isfinite(output.logits).all()), "logits must be finite at initialisation"

    def test_gradients_reach_every_parameter(self) -> None:
        """Every parameter gets a finite gradient that is not zero everywhere."""
        model = self._model(training=True)
        batch = random_batch(self.features(), 16, lengths=[0, *(3 + i % 5 for i in range(15))])
        task_loss(model(batch), batch).backward()  # type: ignore[no-untyped-call]
        missing = [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]
        assert not missing, f"no gradient reaches {', '.join(missing)}: every parameter must be used, or not be there"
        broken = _not_finite(model)
        assert not broken, f"the gradient of {', '.join(broken)} is not finite"
        still = [n for n, p in model.named_parameters() if p.grad is not None and not bool(_values(p.grad).any())]
        assert not still, f"the gradient of {', '.join(still)} is zero everywhere"

    def test_zero_length_and_single_event_histories(self) -> None:
        """Samples without history, or with one event, score as they do alone."""
        model = self._model()
        batch = random_batch(self.features(), 6, lengths=[0, 1, 5, 0, 2, 1])
        logits = self._logits(model, batch)
        assert bool(torch.isfinite(logits).all()), "a sample without history must have finite logits"
        for i in range(6):
            alone = self._logits(model, take(batch, [i]))
            assert torch.allclose(alone[0], logits[i], atol=1e-5), f"sample {i} scores differently alone than in its batch"
        empty = random_batch(self.features(), 3, lengths=[0, 0, 0])
        assert bool(torch.isfinite(self._logits(model, empty)).all()), "a batch in which no sample has history must have finite logits"

    def test_zero_length_histories_train(self) -> None:
        """A batch in which nobody has a history gives finite gradients."""
        model = self._model(training=True)
        batch = random_batch(self.features(), 4, lengths=[0, 0, 0, 0])
        task_loss(model(batch), batch).backward()  # type: ignore[no-untyped-call]
        broken = _not_finite(model)
        assert not broken, f"without any event the gradient of {', '.join(broken)} is not finite"

    def test_empty_batch(self) -> None:
        """A batch of no samples gives logits `[0, T]` and finite gradients, as on a rank that ran out of data."""
        model = self._model(training=True)
        output = model(random_batch(self.features(), 0, lengths=[]))
        assert output.logits.shape == (0, len(self.features().labels)), "an empty batch must give logits [0, T]"
        (output.logits.sum() + sum(output.aux_losses.values())).backward()
        broken = _not_finite(model)
        assert not broken, f"an empty batch must give zero or no gradients; {', '.join(broken)} is not finite"

    def test_batch_permutation(self) -> None:
        """Permuting the batch permutes the logits."""
        model = self._model()
        batch = random_batch(self.features(), 9)
        order = [4, 0, 8, 2, 7, 1, 3, 6, 5]
        moved = self._logits(model, take(batch, order))
        assert torch.allclose(moved, self._logits(model, batch)[order], atol=1e-5), "permuting the batch must permute the logits"

    def test_samples_do_not_see_each_other(self) -> None:
        """A sample's logits do not depend on who else is in the batch."""
        model = self._model()
        batch = random_batch(self.features(), 5, seed=1)
        without_last = self._logits(model, batch.select_range(0, 4))
        assert torch.allclose(self._logits(model, batch)[:4], without_last, atol=1e-5), "dropping one sample must not change the others"

    def test_forward_reads_nothing_from_the_device(self) -> None:
        """The forward pass never waits for a value of a tensor on the device."""
        with torch.device("meta"):
            model = self._model()
        try:
            output = model(random_batch(self.features(), 5).to("meta"))
        except (RuntimeError, NotImplementedError) as fault:
            raise AssertionError(f"forward needs a tensor's values on the host, which stalls a GPU: {fault}") from fault
        assert output.logits.shape == (5, len(self.features().labels)), "logits must be [B, T]"

    def test_the_batch_is_left_alone(self) -> None:
        """Neither the forward nor the backward pass writes to the batch, which others read after it."""
        model = self._model(training=True)
        batch, before = random_batch(self.features(), 6), random_batch(self.features(), 6)
        task_loss(model(batch), batch).backward()  # type: ignore[no-untyped-call]
        assert_same_batch(batch, before)

    def test_overfit_100_users(self) -> None:
        """Training on the same 100 samples drives the loss towards zero."""
        model = self._model(training=True)
        batch = random_batch(self.features(), 100, max_length=10, seed=3)
        loss = fit(model, batch, self.overfit_steps, until=self.overfit_loss)
        assert loss < self.overfit_loss, (
            f"after {self.overfit_steps} steps on the same 100 samples the loss is {loss:.3f}, not below {self.overfit_loss}: "
            "the model cannot learn what it sees"
        )

    def test_state_round_trip(self) -> None:
        """A state_dict loaded into another instance gives the same logits."""
        model, batch = self._model(), random_batch(self.features(), 5)
        torch.manual_seed(1)
        other = self.build(self.features()).train(False)
        other.load_state_dict(model.state_dict())
        assert torch.equal(self._logits(other, batch), self._logits(model, batch)), "loading a state_dict must reproduce the logits"


def _not_finite(model: nn.Module) -> list[str]:
    """Parameters whose gradients are not finite."""
    return [n for n, p in model.named_parameters() if p.grad is not None and not bool(torch.isfinite(_values(p.grad)).all())]


def _values(gradient: Tensor) -> Tensor:
    return gradient.coalesce().values() if gradient.is_sparse else gradient

"""Checkpoints: files that are read without unpickling, published at once, kept through whatever kills the process."""

from __future__ import annotations

import json
import os
import random
import signal
import struct
import subprocess
import sys
import time
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gem_core.batch import Batch, SparseGroup
from gem_core.errors import CheckpointError
from gem_core.jagged import Jagged
from gem_core.train import tensorfile
from gem_core.train.checkpoint import CheckpointStore, check_fit
from gem_core.train.pack import load_packed, pack, save_packed, unpack
from gem_core.train.runtime import Runtime
from gem_core.train.state import newest, opened
from gem_core.train.tensorfile import crc32_of, read_tensors, write_tensors


def test_tensors_come_back_bit_for_bit_and_any_reader_finds_them(tmp_path):
    torch.manual_seed(0)
    tensors = {
        "f32": torch.randn(3, 5),
        "transposed": torch.randn(4, 6).t(),
        "bf16": torch.randn(7).bfloat16(),
        "nan": torch.tensor([float("nan"), float("inf"), -0.0]),
        "scalar": torch.tensor(5),
        "empty": torch.empty(0, 4),
        "bool": torch.tensor([True, False, True]),
        "u8 then f64": torch.tensor([1, 2, 3], dtype=torch.uint8),
        "f64": torch.randn(2, dtype=torch.float64),
        "fp8": torch.randn(4).to(torch.float8_e4m3fn),
    }
    path = tmp_path / "t.safetensors"
    assert write_tensors(path, tensors) == (path.stat().st_size, zlib.crc32(path.read_bytes()))
    assert crc32_of(path) == zlib.crc32(path.read_bytes())
    found = read_tensors(path)
    assert list(found) == list(tensors)
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        a, b = (t.contiguous().reshape(-1).view(torch.uint8) for t in (found[name], tensor))
        assert torch.equal(a, b), name
    # an independent reading of the layout: length, JSON header, little-endian values at the stated offsets
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    begin, end = header["f32"]["data_offsets"]
    assert header["f32"] == {"dtype": "F32", "shape": [3, 5], "data_offsets": [begin, end]}
    values = np.frombuffer(raw[8 + length + begin : 8 + length + end], dtype="<f4").reshape(3, 5)
    assert np.array_equal(values, tensors["f32"].numpy())


def test_writing_into_a_read_tensor_does_not_change_the_file(tmp_path):
    path = tmp_path / "t.safetensors"
    write_tensors(path, {"x": torch.zeros(4)})
    read_tensors(path)["x"].add_(1)
    assert not read_tensors(path)["x"].any()


def test_safetensors_reads_them_too(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    tensors = {"a": torch.randn(3, 2), "b": torch.arange(5)}
    write_tensors(tmp_path / "t.safetensors", tensors)
    found = safetensors.load_file(tmp_path / "t.safetensors")
    assert all(torch.equal(found[k], v) for k, v in tensors.items())


@pytest.mark.parametrize("damage", ["missing", "empty", "short", "header", "huge", "pickle", "overlap"])
def test_damaged_tensor_files_are_named(tmp_path, damage):
    path = tmp_path / "t.safetensors"
    write_tensors(path, {"x": torch.arange(100)})
    raw = path.read_bytes()
    if damage == "missing":
        path.unlink()
    elif damage == "pickle":
        torch.save({"x": torch.arange(3)}, path)
    else:
        bad_header = json.dumps({"x": {"dtype": "I64", "shape": [200], "data_offsets": [0, 800]}}).encode()
        path.write_bytes(
            {
                "empty": b"",
                "short": raw[:-8],
                "header": raw[:8] + b"x" + raw[9:],
                "huge": struct.pack("<Q", 2**60) + raw[8:],
                "overlap": struct.pack("<Q", len(bad_header)) + bad_header + raw[-800:],
            }[damage]
        )
    with pytest.raises(CheckpointError) as caught:
        read_tensors(path)
    assert str(path) in str(caught.value)


leaves = st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | st.text(max_size=5)
nested = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
        | st.dictionaries(st.integers(0, 9), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(nested)
@settings(max_examples=100, deadline=None)
def test_any_nested_state_survives_json(value):
    described, tensors = pack(value)
    assert unpack(json.loads(json.dumps(described)), tensors) == value


def test_states_with_tensors_generators_and_batches(tmp_path):
    random.seed(1)
    np.random.seed(2)
    batch = Batch(
        size=2,
        sparse=SparseGroup.from_jagged({"tags": Jagged.from_lengths(torch.tensor([1, 2, 3]), torch.tensor([2, 1]))}),
        labels=torch.tensor([[1.0], [0.0]]),
        label_names=("ctr",),
        sample_ids=["a", "b"],
    )
    state = {"python": random.getstate(), "numpy": np.random.get_state(), "batch": [batch], "k": {3: torch.tensor([1.5])}, "n": np.int64(4)}
    save_packed(tmp_path / "sub" / "state", state)
    found = load_packed(tmp_path / "sub" / "state")
    expected = random.random(), np.random.rand()
    random.setstate(found["python"])
    np.random.set_state(found["numpy"])
    assert (random.random(), np.random.rand()) == expected
    assert found["n"] == 4
    assert torch.equal(found["k"][3], torch.tensor([1.5]))
    (again,) = found["batch"]
    assert isinstance(again, Batch)
    assert again.validate().sparse["tags"].lengths.tolist() == [2, 1]
    assert again.sample_ids == ["a", "b"]
    assert again.label_names == ("ctr",)


def test_what_cannot_be_stored_is_said_with_its_place():
    with pytest.raises(CheckpointError, match="a object cannot be stored") as caught:
        pack({"guard": [1, object()]})
    assert caught.value.where == "state.guard.1"


def save(store, step, value=1.0, size=4):
    return store.save(
        step,
        meta={"samples": step * 10},
        parts={"model": {"w": torch.full((size,), value)}, "optimizer": {}, "tables": {}},
        shared={"value": value},
        ranks=[{"position": step}],
    )


def test_retention_keeps_the_newest_and_the_best(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints", keep=2)
    for step in (1, 2, 3, 4, 5):
        save(store, step, float(step))
        if step == 2:
            store.mark_best(2)
    assert store.steps() == [2, 4, 5]
    latest, problems = store.latest()
    assert (latest.step, problems) == (5, [])
    assert latest.meta["samples"] == 50
    assert latest.state("rank-0") == {"position": 5}
    assert torch.equal(store.best().tensors("model")["w"], torch.full((4,), 2.0))
    store.mark_best(5)
    save(store, 6)
    assert store.steps() == [5, 6]


def test_the_same_step_may_be_written_again(tmp_path):
    store = CheckpointStore(tmp_path)
    save(store, 3, 1.0)
    save(store, 3, 2.0)
    assert store.load(3).state("shared") == {"value": 2.0}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-3"]


def test_a_damaged_newest_checkpoint_is_passed_over_and_named(tmp_path):
    store = CheckpointStore(tmp_path)
    save(store, 1)
    save(store, 2)
    file = tmp_path / "step-2" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    latest, problems = store.latest()
    assert latest.step == 1
    assert "step 2" in problems[0]
    assert "model.safetensors" in problems[0]
    (tmp_path / "step-1" / "meta.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"no usable checkpoint.*step 1"):
        store.latest()


def test_a_missing_step_lists_those_there(tmp_path):
    store = CheckpointStore(tmp_path)
    save(store, 7)
    with pytest.raises(CheckpointError, match="no checkpoint of step 8; there are: 7"):
        store.load(8)


def test_a_checkpoint_of_a_newer_format_is_refused(tmp_path):
    store = CheckpointStore(tmp_path)
    save(store, 1)
    meta = tmp_path / "step-1" / "meta.json"
    meta.write_text(meta.read_text().replace('"format": 1', '"format": 3'))
    with pytest.raises(CheckpointError, match="has format 3, this version reads 1 and 2"):
        store.load(1)


def test_no_bit_of_the_record_can_flip_unseen(tmp_path):
    store = CheckpointStore(tmp_path)
    save(store, 1)
    path = tmp_path / "step-1" / "meta.json"
    raw = path.read_bytes()
    unseen = set()
    for at in range(len(raw)):
        for bit in (1, 16, 128):
            path.write_bytes(raw[:at] + bytes([raw[at] ^ bit]) + raw[at + 1 :])
            if store.problem(1) is None:
                unseen.add(at)
    own = raw.index(b"own_crc32")
    assert all(own <= at < own + 9 or raw[at : at + 1].isspace() for at in unseen), [raw[at - 9 : at + 9] for at in unseen]


def test_a_full_disk_keeps_the_previous_checkpoint_and_leaves_no_litter(tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path)
    save(store, 1)
    real = os.fsync
    calls = iter(range(100))

    def full(handle):
        if next(calls) >= 2:
            raise OSError(28, "No space left on device")
        real(handle)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match="No space left on device") as caught:
        save(store, 2)
    assert "previous checkpoint is untouched" in caught.value.fix
    monkeypatch.undo()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-1"]
    assert store.latest()[0].step == 1


def test_a_mismatch_lists_names_and_shapes(tmp_path):
    here = {"a": torch.zeros(2), "b": torch.zeros(3), "new": torch.zeros(1)}
    stored = {"a": torch.ones(2), "b": torch.ones(4), "old": torch.ones(1)}
    with pytest.raises(CheckpointError) as caught:
        check_fit({n: t.shape for n, t in here.items()}, {n: t.shape for n, t in stored.items()}, "model", tmp_path)
    text = str(caught.value)
    assert "not stored: new" in text
    assert "stored but unknown here: old" in text
    assert "b: stored (4,), here (3,)" in text


WRITER = """
import os, sys, torch
from pathlib import Path
from gem_core.train.checkpoint import CheckpointStore
torch.set_num_threads(1)
for line in sys.stdin:
    child = os.fork()
    if child:
        print("pid", child, flush=True)
        os.waitpid(child, 0)
        print("dead", flush=True)
        continue
    store = CheckpointStore(Path(line.strip()), keep=2)
    for step in range(1, 10**6):
        w = torch.full((2**20,), float(step))
        store.save(step, meta={}, parts={"model": {"w": w}, "optimizer": {}, "tables": {"t.weight": w}},
                   shared={"step": step}, ranks=[{"position": step}])
        print(step, flush=True)
"""


def test_sigkill_in_the_middle_of_a_write_leaves_a_usable_checkpoint(tmp_path):
    """The writer saves 8 MiB again and again; it is killed at random moments, and each time the newest published one must be whole."""
    rng = random.Random(5)
    store = CheckpointStore(tmp_path / "checkpoints")
    interrupted = 0
    with subprocess.Popen([sys.executable, "-c", WRITER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        for _ in range(12):
            server.stdin.write(f"{store.directory}\n")
            server.stdin.flush()
            child = int(server.stdout.readline().split()[1])
            said = [server.stdout.readline()]  # a first save succeeded over what the last kill left behind
            time.sleep(rng.uniform(0.0, 0.05))
            os.kill(child, signal.SIGKILL)
            while said[-1] != "dead\n":
                said.append(server.stdout.readline())
            interrupted += any(p.name.startswith(".tmp-step") for p in store.directory.iterdir())
            latest, problems = store.latest()
            assert not problems
            assert latest.step >= int(said[-2])
            assert torch.equal(latest.tensors("model")["w"], torch.full((2**20,), float(latest.step)))
            assert latest.state("rank-0") == {"position": latest.step}
        server.stdin.close()
    assert interrupted, "no kill hit a write: the test must wait differently"


def test_reading_and_writing_a_checkpoint_tell_of_progress(tmp_path, monkeypatch):
    """However large it is: a process that reads or writes for longer than the watchdog's timeout does not stand still."""
    monkeypatch.setattr(tensorfile, "_CHUNK", 1024)
    store, told = CheckpointStore(tmp_path), []
    large = {"w": torch.arange(4096.0)}
    store.save(3, meta={}, parts={"model": large}, shared={}, ranks=[{}], progress=lambda: told.append("written"))
    assert told == ["written"] * 16
    newest(store, Runtime(torch.device("cpu"), progress=lambda: told.append("read")))
    assert told.count("read") == len(store.load(3).meta["files"])
    opened(store, 3, Runtime(torch.device("cpu"), progress=lambda: told.append("read again")))
    assert told.count("read again") == told.count("read") > 3

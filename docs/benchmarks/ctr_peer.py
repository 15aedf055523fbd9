"""A peer on ml-1m-ctr: FuxiCTR's DCNv2 with the mean of the newest 50 events. `quality.py ctr --peer` compares its predictions pairwise.

    pip install --target PEER fuxictr pandas h5py scikit-learn polars
    PYTHONPATH=PEER python docs/benchmarks/ctr_peer.py --data ../shared/data/ml-1m-ctr --out runs/peer

Model, optimizer and stopping are FuxiCTR's own: embeddings of 32, Adam 1e-3, batches of 1,024, at most 15 epochs, AUC of the validation
split after each, a tenth of the learning rate where it falls, stop after two such. What its preprocessing would do is done here: ids that
training did not see share a row. Writes ``dcnv2-<seed>.csv``: probability, label and user of each test sample.
"""

from __future__ import annotations

import argparse
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from fuxictr.features import FeatureMap
from fuxictr.pytorch.torch_utils import seed_everything
from model_zoo.LongCTR.DCNv2.DCNv2 import DCNv2

LENGTH, WIDTH, BATCH = 50, 32, 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    known = {key: np.unique(_columns(args.data, "train")[key]) for key in ("user_id", "item_id")}
    for seed in args.seeds.split(","):
        seed_everything(int(seed))
        model = DCNv2(
            feature_map(known), model_id=f"dcnv2-{seed}", model_structure="parallel", parallel_dnn_hidden_units=[256, 128, 64],
            num_cross_layers=3, learning_rate=1e-3, embedding_dim=WIDTH, optimizer="adam", loss="binary_crossentropy", metrics=["AUC"],
            monitor="AUC", verbose=0, model_root=str(args.out),
        )  # fmt: skip
        (args.out / "ctr").mkdir(exist_ok=True)
        model.fit(Batches(args.data, "train", known, shuffle=True), epochs=15, validation_data=Batches(args.data, "valid", known))
        test = Batches(args.data, "test", known)
        rows = np.stack([model.predict(test), test.columns["label"], test.columns["user_id"]], 1)
        np.savetxt(args.out / f"dcnv2-{seed}.csv", rows, fmt="%.9g", delimiter=",", header="p,label,user", comments="")


def feature_map(known: dict[str, np.ndarray]) -> FeatureMap:
    """Users and items: 0 is the pad, then the ids that training saw, then all others."""
    features = FeatureMap("ctr", ".")
    features.labels, features.default_emb_dim = ["label"], WIDTH
    for key, source in (("user_id", "user"), ("item_id", "item")):
        spec = {"type": "categorical", "source": source, "vocab_size": len(known[key]) + 2, "padding_idx": 0}
        features.features[key] = OrderedDict(spec)
    return features


class Batches:
    """A split as FuxiCTR's long-sequence models take it: (the sample's columns, items of history and candidate, mask of the history)."""

    def __init__(self, data: Path, split: str, known: dict[str, np.ndarray], *, shuffle: bool = False) -> None:
        self.columns, self.shuffle = _columns(data, split), shuffle
        rows, flat = self.columns["offsets"], self.columns["history"]
        items = np.zeros((len(self.columns["label"]), LENGTH + 1), np.int64)
        for i, (start, end) in enumerate(zip(rows[:-1] + 1, rows[1:])):  # the first id of each is a pad
            newest = flat[max(start, end - LENGTH) : end]
            items[i, LENGTH - len(newest) : LENGTH] = _places(newest, known["item_id"])
        items[:, LENGTH] = _places(self.columns["item_id"], known["item_id"])
        self.items = torch.from_numpy(items)
        self.users = torch.from_numpy(_places(self.columns["user_id"], known["user_id"]))
        self.labels = torch.from_numpy(self.columns["label"].astype(np.float32))

    def __len__(self) -> int:
        return -(-len(self.labels) // BATCH)

    def __iter__(self) -> Iterator[tuple[dict[str, Any], dict[str, Any], torch.Tensor]]:
        order = torch.randperm(len(self.labels)) if self.shuffle else torch.arange(len(self.labels))
        for at in order.split(BATCH):
            items = self.items[at]
            yield {"user_id": self.users[at], "label": self.labels[at]}, {"item_id": items.flatten()}, items[:, :LENGTH] > 0


def _columns(data: Path, split: str) -> dict[str, np.ndarray]:
    table = pq.read_table(data / f"{split}.parquet", columns=["user_id", "item_id", "label", "hist_item_ids"])
    history = table["hist_item_ids"].combine_chunks()
    found = {key: table[key].to_numpy() for key in ("user_id", "item_id", "label")}
    return {**found, "offsets": history.offsets.to_numpy(), "history": history.values.to_numpy()}


def _places(ids: np.ndarray, known: np.ndarray) -> np.ndarray:
    at = np.searchsorted(known, ids).clip(max=len(known) - 1)
    return np.where(known[at] == ids, at + 1, len(known) + 1)


if __name__ == "__main__":
    main()

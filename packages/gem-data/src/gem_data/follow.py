"""Following a folder to which partitions are added, hour by hour: each is read once, in the order of the names, and then the next.

A partition is a folder or a Parquet file directly in the followed folder. It is read when it is complete: when its folder holds the marker
file, and when ``lag`` later partitions are there. The watermark is the name of the last partition that was read to its end; one that comes
with a name below it is late: it is not read, and that is said and counted.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs

from gem_core.batch import Batch
from gem_core.config.features import Features
from gem_core.errors import ConfigError, DataError
from gem_core.sources.hashing import key_of, mix64, salt_of
from gem_data.config import FollowConfig
from gem_data.files import filesystem_of
from gem_data.spec import build_parquet

_log = logging.getLogger(__name__)


class Following:
    """The training source of ``parquet-follow``: one iteration goes through the partitions until ``stop`` or ``idle_s`` ends it.

    Batches never mix partitions. A new iteration goes on where the last one was left. The state is the partition's name and the position in
    it, for any other number of ranks and batch size. ``late`` counts partitions that came too late.

    :raises DataError: the folder cannot be read; everything that `ParquetSource` refuses in a partition.
    """

    def __init__(
        self,
        config: FollowConfig,
        features: Features,
        *,
        batch_size: int,
        shard: tuple[int, int] = (0, 1),
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        paths = config.paths("train")
        if len(paths) != 1:
            raise ConfigError("one folder is followed, not several", where="data.parquet-follow.train", fix='set train = "folder"')
        self.config, self.features = config, features
        self._how: dict[str, Any] = {"batch_size": batch_size, "shard": shard, "drop_last": drop_last}
        self._seed = seed
        self.folder = paths[0].rstrip("/")
        self.partition: str | None = None
        """Name of the partition that the last batch is from."""
        self.watermark: str | None = None
        self._inside: dict[str, Any] | None = None
        self._reading: Any = None
        self.late = 0
        self.hashed: dict[str, list[str]] = {}
        self.lists: dict[str, bool] = {}
        self._read = 0
        self._known: set[str] | None = None
        self._blocked: list[str] = []
        self._told: tuple[str, bool] | None = None
        self.progress: Callable[[], bool] = lambda: False
        self.on_main: Callable[[Callable[[], Any]], Any] = lambda action: action()
        """Are called while a partition is waited for; see `gem_core.sources.contract.Source`."""

    def partition_source(self, name: str) -> Any:
        """The rows of one partition in the order of its files, as an evaluation split."""
        where = self.config.model_copy(update={"eval": (f"{self.folder}/{name}",), "eval_filter": self.config.train_filter})
        return build_parquet(where, self.features, split="eval", seed=self._seed, **{**self._how, "drop_last": False})

    def __iter__(self) -> Iterator[Batch]:
        while True:
            inside, self._inside = self.state_dict()["inside"], None
            name = self.partition if inside is not None else self._next()
            if name is None:
                return
            source = self._training_source(name)
            if inside is not None:
                source.load_state_dict(inside)
            self.partition, self._reading = name, source
            yield from source
            self.watermark, self._reading, self._read = name, None, self._read + 1

    def state_dict(self) -> dict[str, Any]:
        inside = self._inside if self._reading is None else self._reading.state_dict()
        position = {"partition": self.partition, "watermark": self.watermark, "inside": inside}
        return {**position, "read": self._read, "late": self.late, "hashed": self.hashed, "lists": self.lists}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.partition, self.watermark, self._inside, self._reading = state["partition"], state["watermark"], state["inside"], None
        self._read, self.late, self._known = state["read"], state["late"], None
        self.hashed, self.lists = state.get("hashed", {}), state.get("lists", {})

    def _training_source(self, name: str) -> Any:
        where = self.config.model_copy(update={"train": (f"{self.folder}/{name}",)})
        seed = mix64(key_of(self._seed) ^ salt_of(name)) >> 1
        source = build_parquet(where, self.features, split="train", seed=seed, **self._how)
        self.lists |= source.lists
        for path, kinds in source.hashed.items():
            if self.hashed.setdefault(path, kinds) != kinds:
                raise DataError(
                    f"the column holds {' and '.join(kinds)}, in partitions before it {' and '.join(self.hashed[path])}: the same id has "
                    "another hash",
                    where=f"{self.folder}/{name}, features.{path}",
                    fix="store it in one type in all partitions",
                )
        return source

    def _next(self) -> str | None:
        """The next partition to read, waited for; None: there is none to come, or the run is to stop."""
        config, since = self.config, time.monotonic()
        pause = config.poll_s if config.idle_s is None else min(config.poll_s, config.idle_s)
        naps = math.ceil(pause)  # all ranks take as many
        while True:
            name: str | None
            name, ends, self.late = self.on_main(lambda: self._look(since))
            if name is not None or ends:
                return name
            for _ in range(naps):
                if self.progress():
                    return None
                time.sleep(pause / naps)

    def _look(self, since: float) -> tuple[str | None, bool, int]:
        """The partition to read now, whether none will come, and how many were late."""
        config = self.config
        names = self._complete()
        after = [n for n in names if (self.watermark is None or n > self.watermark) and (config.start is None or n >= config.start)]
        self._note_late(names)
        if after and (config.stop is None or after[0] <= config.stop):
            return after[0], False, self.late
        if config.stop is not None and (after or (self.watermark is not None and self.watermark >= config.stop)):
            return None, True, self.late
        ends = config.idle_s is not None and time.monotonic() - since >= config.idle_s
        self._note_blocked(ends)
        return None, ends, self.late

    def _note_late(self, names: list[str]) -> None:
        """Say which partitions below the watermark were not there when their turn was."""
        if self.watermark is None:
            return
        below = {n for n in names if n <= self.watermark and (self.config.start is None or n >= self.config.start)}
        fresh = sorted(below - self._known - {self.watermark}) if self._known is not None else []
        missed = len(fresh) if self._known is not None else len(below) - self._read - self.late
        self._known = below | (self._known or set())
        if missed > 0:
            self.late += missed
            which = ", ".join(fresh) or "which of them cannot be told after resuming"
            _log.warning(
                "%d partition(s) of %s came after %s had been read and are left out: %s", missed, self.folder, self.watermark, which
            )

    def _note_blocked(self, ends: bool) -> None:
        """Say which partition lacks its marker, once when it keeps later ones waiting and again when the run ends without it."""
        names = [n for n in self._blocked if self.config.stop is None or n <= self.config.stop]
        if names and (ends or len(names) > 1) and self._told != (names[0], ends):
            self._told = names[0], ends
            _log.warning(
                "%s of %s has no %s: %s; later partitions that wait for it: %s",
                names[0],
                self.folder,
                self.config.marker,
                "the run ends without it" if ends else "it is waited for",
                ", ".join(names[1:]) or "none",
            )

    def _complete(self) -> list[str]:
        """Names of the complete partitions, sorted."""
        filesystem, inner, shown = filesystem_of(self.folder, self.config.root)
        try:
            entries = filesystem.get_file_info(pafs.FileSelector(inner, recursive=False))
        except (OSError, pa.ArrowException) as error:
            raise DataError(
                f"the followed folder cannot be read: {error}",
                where=shown,
                fix="make it before the run starts; check permissions and the connection",
            ) from error
        found = [
            entry
            for entry in sorted(entries, key=lambda e: e.base_name)
            if entry.base_name[:1] not in "._"
            and (entry.type == pafs.FileType.Directory or entry.base_name.endswith((".parquet", ".pq", ".parq")))
        ]
        ready: list[str] = []
        self._blocked = []
        old, start = self.watermark, self.config.start
        for i, entry in enumerate(found[: len(found) - self.config.lag]):
            name = entry.base_name
            if not self._lacks_marker(filesystem, entry):
                ready.append(name)
            elif (old is None or name > old) and (start is None or name >= start):
                # Later partitions wait for one that is not complete: the order is that of the names.
                self._blocked = [e.base_name for e in found[i:]]
                break
        return ready

    def _lacks_marker(self, filesystem: pafs.FileSystem, entry: pafs.FileInfo) -> bool:
        marker = self.config.marker
        if marker is None or entry.type != pafs.FileType.Directory:
            return False
        found = filesystem.get_file_info(f"{entry.path}/{marker}")
        return bool(found.type != pafs.FileType.File)

"""What features take from data before training: vocabularies and bucket edges, in one versioned file that runs keep a copy of."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gem_core.config.features import Features
from gem_core.errors import ConfigError, DataError

FORMAT = 1


@dataclass(frozen=True)
class Fitted:
    """``vocabularies``: table -> values, all integers or all text; the id of a value is 1 + its place (0 is left for what is unknown).
    ``edges``: path of a feature -> ascending edges. ``made_of``: where they come from, for people."""

    vocabularies: Mapping[str, list[Any]] = field(default_factory=dict)
    edges: Mapping[str, list[float]] = field(default_factory=dict)
    made_of: Mapping[str, Any] = field(default_factory=dict)

    def dumps(self) -> str:
        record = {"format": FORMAT, "made_of": self.made_of, "edges": self.edges, "vocabularies": self.vocabularies}
        return json.dumps(record, indent=1, ensure_ascii=False) + "\n"

    def vocabulary(self, table: str, where: str, rows: int) -> list[Any]:
        """:raises ConfigError: there is none for the table, or it does not fit it."""
        found = self.vocabularies.get(table)
        if found is None:
            raise self._missing("vocabulary for the table", table, self.vocabularies, where)
        if len(found) + 1 > rows:
            raise ConfigError(
                f"the vocabulary of table {table!r} has {len(found)} values, the table {rows} rows",
                where=f"features.{where}",
                fix=f"set rows = {len(found) + 1} or more (id 0 is left for unknown values), or make it again with --most {rows - 1}",
            )
        return found

    def edges_of(self, path: str) -> list[float]:
        """:raises ConfigError: there are none for the feature."""
        found = self.edges.get(path)
        if found is None:
            raise self._missing("edges for the feature", path, self.edges, path)
        return found

    @staticmethod
    def _missing(what: str, name: str, have: Mapping[str, Any], where: str) -> ConfigError:
        return ConfigError(
            f"features.fitted has no {what} {name!r} (it has: {', '.join(have) or 'none'})",
            where=f"features.{where}",
            fix="make it again with 'gemrec data vocab CONFIG'",
        )


def needs_fitted(features: Features) -> list[str]:
    """Paths of the features whose ids come from fitted state."""
    return [path for path, ids in features.id_features().items() if ids.vocabulary or ids.buckets is not None]


def load_fitted(features: Features) -> Fitted:
    """The file that ``features.fitted`` names; an empty state where no feature needs one.

    :raises ConfigError: a feature needs one and none is named; DataError: it cannot be read or is of another format.
    """
    needing = needs_fitted(features)
    if features.fitted is None:
        if needing:
            raise ConfigError(
                "vocabularies and buckets come from a file, and none is named",
                where=f"features.{needing[0]}",
                fix="make one with 'gemrec data vocab CONFIG --out FILE' and set features.fitted = FILE",
            )
        return Fitted()
    try:
        record = json.loads(Path(features.fitted).read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(
            f"the fitted state cannot be read: {error.strerror}",
            where=features.fitted,
            fix="make it with 'gemrec data vocab CONFIG --out FILE'",
        ) from error
    except ValueError as error:
        raise DataError(f"the fitted state is damaged: {error}", where=features.fitted, fix="make it again: 'gemrec data vocab'") from error
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        found = record.get("format") if isinstance(record, dict) else None
        raise DataError(
            f"the fitted state has the format {found}, this version reads {FORMAT}",
            where=features.fitted,
            fix="make it again: 'gemrec data vocab'",
        )
    return Fitted(record["vocabularies"], record["edges"], record["made_of"])

"""From row groups to decoded rows: filters, features, quarantine. What a process needs in order to decode, and nothing else."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gem_core.config.features import Features
from gem_data import quarantine
from gem_data.block import Block
from gem_data.columns import Chunk
from gem_data.decode import Decoder
from gem_data.files import DataFile, Reader
from gem_data.filters import Filter
from gem_data.units import Unit, Window

_log = logging.getLogger(__name__)


class RowReader:
    """Reads and decodes row groups. ``refused``: rows that went to the quarantine so far. Can be pickled: reader processes get one."""

    def __init__(self, features: Features, filters: Sequence[str], quarantine: str | None) -> None:
        self.decoder = Decoder(features)
        self.filters = [Filter(text) for text in filters]
        self.filter_columns = tuple(dict.fromkeys(name for f in self.filters for name in f.columns))
        self.quarantine, self.refused = quarantine, 0

    def mask(self, file: DataFile, table: pa.Table, rows: int) -> pa.Array:
        """Which rows pass all filters."""
        chunk = Chunk(file, 0, table, rows)
        view = pa.table({name: chunk.scalar(name) for name in self.filter_columns})
        masks = [f.mask(view, file.path) for f in self.filters]
        mask = masks[0]
        for other in masks[1:]:
            mask = pc.and_(mask, other)
        return mask

    def chunk(self, unit: Unit, reader: Reader, columns: tuple[str, ...] | None = None) -> Chunk:
        """The unit's rows that pass the filters, undecoded, with ``columns`` (None: all that the features read)."""
        file, group = unit.file, unit.row_group
        columns = self.decoder.columns if columns is None else columns
        table = reader.row_group(file, group, self.decoder.leaves(file, columns + self.filter_columns))
        kept = None
        if self.filters:
            mask = self.mask(file, table, file.rows[group])
            kept = np.flatnonzero(mask.to_numpy(zero_copy_only=False))
            table = table.filter(mask)
        return Chunk(file, group, table, unit.rows, kept)

    def window(self, window: Window, reader: Reader) -> list[Block]:
        """The rows of each of the window's units."""
        return [self.unit(unit, reader) for unit in window.units]

    def unit(self, unit: Unit, reader: Reader) -> Block:
        """The rows of a row group that pass the filters; refused ones are marked and written to the quarantine."""
        chunk = self.chunk(unit, reader)
        block = self.decoder.decode(chunk)
        if chunk.reasons:
            assert self.quarantine is not None  # ParquetSource._check_quarantine
            path = quarantine.write(self.quarantine, chunk, reader)
            self.refused += len(chunk.reasons)
            _log.warning("%d rows of %s, row group %d, went to %s", len(chunk.reasons), unit.file.path, unit.row_group, path)
        return block

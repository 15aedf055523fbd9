"""Write a small database in the layout that the source reads: ``python make_log.py log.sqlite``.

A user clicks an item more often if it is among the newest events of the history.
"""

from __future__ import annotations

import random
import sqlite3
import sys
from contextlib import closing
from pathlib import Path


def make(path: Path, samples: int = 3000, seed: int = 0) -> None:
    draw = random.Random(seed)
    with closing(sqlite3.connect(path)) as base:
        base.execute("CREATE TABLE history (sample INTEGER, place INTEGER, item INTEGER, PRIMARY KEY (sample, place))")
        first = 0
        for split, count in (("train", samples), ("eval", samples // 5), ("test", samples // 5)):
            base.execute(f"CREATE TABLE {split} (id INTEGER PRIMARY KEY, item INTEGER, price REAL, click INTEGER)")
            for number in range(first, first + count):
                history = [draw.randrange(50) for _ in range(min(200, int(draw.lognormvariate(2.0, 1.0))))]
                item = draw.choice(history[-5:]) if history and draw.random() < 0.5 else draw.randrange(50)
                click = draw.random() < (0.4 if item in history[-5:] else 0.05)
                base.execute(f"INSERT INTO {split} VALUES (?, ?, ?, ?)", (number, item, draw.gauss(0, 1), int(click)))
                base.executemany("INSERT INTO history VALUES (?, ?, ?)", [(number, at, event) for at, event in enumerate(history)])
            first += count
        base.commit()


if __name__ == "__main__":
    make(Path(sys.argv[1]))

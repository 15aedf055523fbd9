"""The planted ads log: every sample is a pure function of the seed and its number, and its click probability is known.

Nothing is stored but a few small tables: users, events and impressions are computed from counters (`hashing.mix64`), so any sample can be
made at any time, on any rank, in any order.

- A user has a length (from the law), three interests that each drift to another category after a number of events, and background
  curiosity. Event n of a user (time, item, category, action) does not depend on who asks, so histories of one user overlap as in a log.
- An impression shows an item at a position to a user at a time. A share of the items is picked by the user's present interests, a share is
  shown again out of the recent history, the rest is drawn by popularity.
- The click logit is ``bias + context + history``. *Context* reads the item, its category and advertiser, position, device, hour, age band,
  country and the dense features, partly through pairs (age x category group, device x position). *History* reads the newest ``MEMORY``
  events with weights halving every ``HALF_LIFE`` events: the weighted share of events in the candidate's category (or its group), by
  action, raises it; the same item seen without a click lowers it (fatigue), the same item clicked raises it.
- With ``drift`` the effects of category, advertiser, item, age and country on clicks turn towards others, as large and independent of the
  first, by so many radians a day.
- The conversion logit, given a click, reads the recent purchases in the category, price and advertiser.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from gem_core.sources.hashing import GOLDEN, U64, key_of, mix64, mix64_, uniform
from gem_core.sources.laws import Bools, Floats, Ints

if TYPE_CHECKING:
    from gem_core.sources.synthetic import SyntheticConfig

MEMORY, HALF_LIFE = 64, 8.0
VIEW, CLICK, PURCHASE = 0, 1, 2
GROUP = 4
"""Categories in a group of related ones."""
POSITIONS, DEVICES, HOURS, AGES, COUNTRIES = 8, 4, 24, 8, 32
DENSE = ("price", "creative_quality", "session_depth", "tenure", "account_activity")
DAY = 86_400
_DRIFT = (48, 20, 9)
_LUT = 1 << 16


@dataclass(frozen=True)
class Events:
    """Histories of n samples, oldest event first: ``offsets [n+1]``; the rest ``[N]``."""

    offsets: Ints
    item: Ints
    category: Ints
    action: Ints
    time: Ints


@dataclass(frozen=True)
class Samples:
    """n samples ``[n]``: ``sparse`` ids and ``dense`` values by name, the history, labels with their probabilities, and the part of
    the click logit that does not depend on the history."""

    index: Ints
    user: Ints
    time: Ints
    sparse: dict[str, Ints]
    dense: dict[str, Floats]
    events: Events
    click: Bools
    conversion: Bools
    p_click: Floats
    p_conversion: Floats
    context_logit: Floats


def _bits(x: U64, shift: int, width: int) -> Ints:
    return ((x >> np.uint64(shift)) & np.uint64((1 << width) - 1)).astype(np.int64)


def _zipf_lut(n: int, alpha: float) -> NDArray[np.int32]:
    """Inverse distribution of a Zipf law over 0 .. n-1 at 2^16 equal steps."""
    cumulative = np.cumsum(np.arange(1, n + 1, dtype=np.float64) ** -alpha)
    return np.searchsorted(cumulative / cumulative[-1], (np.arange(_LUT) + 0.5) / _LUT).astype(np.int32)


def _sigmoid(x: Floats) -> Floats:
    return 1.0 / (1.0 + np.exp(-x))


class PlantedLog:
    """The log of one world. ``samples(index)`` makes any samples; the numbers are time-ordered."""

    def __init__(self, world: SyntheticConfig) -> None:
        self.world = world
        self.groups = -(-world.categories // GROUP)
        self._category_lut = _zipf_lut(world.categories, 0.6)
        self._rank_lut = _zipf_lut(world.items_per_category, 1.0)
        n_items = world.categories * world.items_per_category
        self._keys = {name: np.uint64(mix64(key_of(world.seed) ^ i)) for i, name in enumerate(_STREAMS)}
        sizes: dict[str, tuple[float, ...]] = {
            "category": (0.35, world.categories),
            "advertiser": (0.40, world.advertisers),
            "item": (0.10, n_items),
            "age": (0.30, AGES),
            "country": (0.20, COUNTRIES),
            "age_group": (0.40, AGES, self.groups),
            "device_position": (0.20, DEVICES, POSITIONS),
            "advertiser_cvr": (0.40, world.advertisers),
            "price": (1.0, n_items),
        }
        self._of = {name: std * self._normals(i, tuple(map(int, shape))) for i, (name, (std, *shape)) in enumerate(sizes.items())}
        # Where the effects turn to: as large as those that they begin with, and independent of them.
        turning = range(len(sizes) + 1, len(sizes) + 1 + len(_TURNING)) if world.drift else ()
        self._later = {name: sizes[name][0] * self._normals(i, self._of[name].shape) for i, name in zip(turning, _TURNING)}
        self._advertiser_of = (uniform(self._hash("tables", np.arange(n_items), 2 * len(sizes))) * world.advertisers).astype(np.int64)
        self._decay = 0.5 ** (np.arange(MEMORY) / HALF_LIFE)
        self._action_weight = np.array([0.7, 1.0, 1.3])
        self.bias_click = self.bias_conversion = 0.0
        self._calibrate()

    def _calibrate(self) -> None:
        """Choose both biases so that the expected rates are the world's; rounded, so that they are the same on every machine."""
        probe = self.samples(np.unique(np.linspace(0, self.world.total - 1, 20_000).astype(np.int64)))
        logit = np.log(probe.p_click / (1 - probe.p_click))
        self.bias_click = _bias_for(self.world.ctr, logit, np.ones_like(logit))
        clicked = _sigmoid(logit + self.bias_click)
        conversion = np.log(probe.p_conversion / (1 - probe.p_conversion))
        self.bias_conversion = _bias_for(self.world.cvr, conversion, clicked)

    def _hash(self, stream: str, counter: Ints, draw: int = 0) -> U64:
        """Draw number ``draw`` of a stream for every counter."""
        x = counter.astype(np.uint64) * GOLDEN
        x += self._keys[stream]
        mix64_(x)
        if draw:
            x ^= np.uint64(draw)
            mix64_(x)
        return x

    def _normals(self, number: int, shape: tuple[int, ...]) -> Floats:
        """Table ``number`` of standard normals, scaled to mean 0 and deviation 1 exactly, so that every seed's log is about as hard.

        From counters, because NumPy's generators may change between versions.
        """
        n = math.prod(shape)
        u, v = (uniform(self._hash("tables", np.arange(n), 2 * number + half)) for half in (0, 1))
        x = np.sqrt(-2 * np.log(u)) * np.cos(2 * np.pi * v)
        table: Floats = ((x - x.mean()) / x.std()).reshape(shape)
        return table

    # --- users ---------------------------------------------------------------------------------------------------------------------

    def _events_before(self, length: Ints, fraction: Floats) -> Ints:
        """How many events a user of that length has had when ``fraction`` of the log's time has gone by: 80 % at its start, 120 % at its
        end."""
        return (length * (0.8 + 0.4 * fraction)).astype(np.int64)

    def _interest(self, user: U64, slot: Ints, n: Ints) -> U64:
        """Hash that stands for the interest of ``user`` in ``slot`` (0..2) at event number ``n``."""
        periods = np.asarray(_DRIFT)[slot]
        phase = _bits(user, 0, 16) + slot * 7
        period = (n + phase) // periods
        x = user + (period.astype(np.uint64) * np.uint64(4) + slot.astype(np.uint64) + np.uint64(1)) * GOLDEN
        return mix64_(x)

    def _categories(self, user: U64, n: Ints, bits: Ints) -> Ints:
        """Category of interest drawn with 24 ``bits``: 44 % / 22 % / 12 % for the three interests, the rest by popularity."""
        share = bits & 0xFF
        slot = (share >= 113).astype(np.int64) + (share >= 169)
        draw = np.where(share < 200, _bits(self._interest(user, slot, n), 48, 16), bits >> 8)
        return self._category_lut[draw].astype(np.int64)

    def _item(self, category: Ints, bits: Ints) -> Ints:
        return category * self.world.items_per_category + self._rank_lut[bits]

    def _event(self, user: U64, length: Ints, n: Ints) -> tuple[Ints, Ints, Ints, Ints]:
        """(item, category, action, time) of event ``n`` of users ``[N]``."""
        x = mix64_(user ^ (n.astype(np.uint64) + np.uint64(1)) * GOLDEN)
        category = self._categories(user, n, _bits(x, 0, 24))
        item = self._item(category, _bits(x, 24, 16))
        kind = _bits(x, 40, 8)
        action = (kind >= 150).astype(np.int64) + (kind >= 232)
        jitter = _bits(x, 48, 16) * 2.0**-16
        fraction = ((n + jitter) / length - 0.8) / 0.4
        time = self.world.start + np.floor(fraction * (self.world.days * DAY)).astype(np.int64)
        return item, category, action, time

    # --- samples -------------------------------------------------------------------------------------------------------------------

    def samples(self, index: Ints) -> Samples:
        """The samples of these numbers (0 <= number < total), in the order asked for."""
        world = self.world
        index = np.asarray(index, dtype=np.int64)
        n = index.size
        draw = [self._hash("sample", index, i) for i in range(1, 7)]
        fraction = (index + uniform(draw[0])) / world.total
        time = world.start + np.floor(fraction * (world.days * DAY)).astype(np.int64)
        user_id = np.minimum((uniform(draw[1]) ** 1.3 * world.users).astype(np.int64), world.users - 1)
        user = self._hash("user", user_id)
        length = world.user_lengths(uniform(self._hash("length", user_id)))
        seen = self._events_before(length, fraction)
        kept = np.minimum(seen, world.max_history)

        offsets = np.zeros(n + 1, dtype=np.int64)
        np.cumsum(kept, out=offsets[1:])
        row = np.repeat(np.arange(n), kept)
        number = np.arange(offsets[-1]) + np.repeat(seen - kept - offsets[:-1], kept)
        events = Events(offsets, *self._event(user[row], length[row], number))

        item = self._candidate(draw[2], user, length, seen)
        category = item // world.items_per_category
        sparse = {
            "item": item,
            "category": category,
            "advertiser": self._advertiser_of[item],
            "position": np.minimum(np.log(uniform(draw[3])) / np.log(0.7), POSITIONS - 1).astype(np.int64),
            "device": _bits(draw[4], 0, 16) * DEVICES >> 16,
            "hour": (time % DAY) // 3600,
            "age": _bits(user, 16, 3),
            "country": (COUNTRIES * (_bits(user, 19, 16) / _LUT) ** 2).astype(np.int64),
        }
        quality, depth, tenure, activity = _normal(draw[5], self._hash("sample", index, 7), self._hash("sample", index, 8))
        dense = {
            "price": self._of["price"][item] + 0.3 * tenure,
            "creative_quality": quality,
            "session_depth": np.exp(0.8 * depth),
            "tenure": tenure,
            "account_activity": np.log1p(length) + 0.5 * activity,
        }
        affinity, purchases, same_viewed, same_clicked = self._read_history(events, item, category)
        context = self._context(sparse, dense, (time - world.start) / DAY)
        history = 7.5 * affinity - 1.2 * np.minimum(same_viewed, 1.5) + 0.9 * np.minimum(same_clicked, 1.5)
        p_click = _sigmoid(self.bias_click + context + history)
        buy = 6.0 * purchases - 0.4 * dense["price"] + self._of["advertiser_cvr"][sparse["advertiser"]]
        p_conversion = _sigmoid(self.bias_conversion + buy)
        click = uniform(self._hash("click", index)) < p_click
        conversion = click & (uniform(self._hash("conversion", index)) < p_conversion)
        return Samples(index, user_id, time, sparse, dense, events, click, conversion, p_click, p_conversion, context)

    def _candidate(self, draw: U64, user: U64, length: Ints, seen: Ints) -> Ints:
        """The item shown: 10 % one of the last 16 events again, 30 % by present interest, the rest by popularity."""
        way = _bits(draw, 0, 8)
        bits = np.where(way < 102, _bits(draw, 8, 24), 0xFF | _bits(draw, 16, 16) << 8)
        item = self._item(self._categories(user, seen, bits), _bits(draw, 40, 16))
        again = np.flatnonzero((way < 26) & (seen > 0))
        back = np.minimum(seen[again] - 1, _bits(draw[again], 56, 4))
        item[again] = self._event(user[again], length[again], seen[again] - 1 - back)[0]
        return item

    def _context(self, sparse: dict[str, Ints], dense: dict[str, Floats], days: Floats) -> Floats:
        effect = self._of
        turned = {name: effect[name][sparse[name]] for name in _TURNING}
        if self._later:
            cos, sin = np.cos(self.world.drift * days), np.sin(self.world.drift * days)
            turned = {name: cos * own + sin * self._later[name][sparse[name]] for name, own in turned.items()}
        logit = sum(turned.values())
        logit = logit + effect["age_group"][sparse["age"], sparse["category"] // GROUP]
        logit += effect["device_position"][sparse["device"], sparse["position"]] - 0.2 * sparse["position"]
        logit += 0.2 * np.sin(sparse["hour"] * (2 * np.pi / 24)) - 0.35 * dense["price"] + 0.65 * dense["creative_quality"]
        return logit - 0.4 * np.log1p(dense["session_depth"])

    def _read_history(self, events: Events, item: Ints, category: Ints) -> tuple[Floats, Floats, Floats, Floats]:
        """What the planted logits read of the newest MEMORY events: affinity and purchases in [0, ~1.4], views and clicks of the item."""
        n = item.size
        stop = events.offsets[1:]
        kept = np.minimum(np.diff(events.offsets), MEMORY)
        row = np.repeat(np.arange(n), kept)
        start = np.cumsum(kept) - kept
        within = np.arange(row.size) - np.repeat(start, kept)
        at = np.repeat(stop - kept, kept) + within
        decay = self._decay[np.repeat(kept, kept) - 1 - within]
        action, event_category = events.action[at], events.category[at]
        same = event_category == category[row]
        match = np.where(same, 1.0, np.where(event_category // GROUP == category[row] // GROUP, 0.25, 0.0))
        mass = np.bincount(row, decay, n) + 1.0
        affinity = np.bincount(row, decay * match * self._action_weight[action], n) / mass
        purchases = np.bincount(row, decay * same * (action == PURCHASE), n) / mass
        hit = np.flatnonzero(events.item[at] == item[row])
        viewed = action[hit] == VIEW
        same_viewed = np.bincount(row[hit], decay[hit] * viewed, n).astype(np.float64)
        same_clicked = np.bincount(row[hit], decay[hit] * ~viewed, n).astype(np.float64)
        return affinity, purchases, same_viewed, same_clicked


_TURNING = ("category", "advertiser", "item", "age", "country")
_STREAMS = ("sample", "user", "length", "click", "conversion", "tables")


def _normal(*bits: U64) -> tuple[Floats, Floats, Floats, Floats]:
    """Four independent standard normals from three hashes (Box-Muller)."""
    u, v, w = (uniform(b) for b in bits)
    radius, angle = np.sqrt(-2 * np.log(u)), 2 * np.pi * v
    radius2, angle2 = np.sqrt(-2 * np.log(w)), 2 * np.pi * uniform(mix64_(bits[0] ^ bits[2]))
    return radius * np.cos(angle), radius * np.sin(angle), radius2 * np.cos(angle2), radius2 * np.sin(angle2)


def _bias_for(rate: float, logit: Floats, weight: Floats) -> float:
    low, high = -40.0, 40.0
    for _ in range(60):
        middle = (low + high) / 2
        if float(np.average(_sigmoid(logit + middle), weights=weight)) < rate:
            low = middle
        else:
            high = middle
    return round(low, 3)

"""Reduce-scatter of a mean by copies into the others' memory; only the sums need SMs, and few of them."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from gem_parallel.collectives.members import Members

STAGING = 256 << 20
"""Bytes that a member receives into: two halves, each with a chunk from every other member."""


class PushedMean:
    """Over the members of one host: each copies the others' parts into their memory, chunk by chunk, and adds up what it has got, while
    the next chunk is under way.

    :param chunk: bytes of a part that a member sends at a time; None: `STAGING` is filled.
    :param sms: most SMs of a sum.
    """

    def __init__(self, members: Members, chunk: int | None = None, sms: int = 16) -> None:
        others = max(1, members.size - 1)
        self.members, self.sms, self.others = members, sms, others
        self.chunk = (STAGING // (2 * others) if chunk is None else chunk) // 16 * 4
        self.window = members.window(2 * others * self.chunk * 4)
        self.pieces = max(1, members.lanes // others)

    def __call__(self, out: Tensor, whole: Tensor) -> None:
        window, rank, n = self.window, self.members.rank, out.numel()
        flat_out, parts = out.view(-1), whole.view(self.members.size, n)
        chunks = [(a, min(n, a + self.chunk)) for a in range(0, n, self.chunk)]
        self.members.fork()
        sent: list[int] = []
        for i, (a, b) in enumerate(chunks):
            window.publish()  # the half of this chunk is free: the sums of the last one in it are behind the caller
            sent.append(window.published)
            for j, peer in enumerate(window.others()):
                self._push(peer, j, i % 2, parts[peer, a:b], window.published)
            if i:
                self._add(flat_out, parts[rank], chunks[i - 1], (i - 1) % 2, sent[i - 1])
        if chunks:
            self._add(flat_out, parts[rank], chunks[-1], (len(chunks) - 1) % 2, sent[-1])
        self.members.join()

    def _slot(self, memory: Tensor, half: int, receiver: int, sender: int) -> Tensor:
        at = (half * self.others + (sender - receiver - 1) % self.members.size) * self.chunk
        return memory.view(torch.float32)[at : at + self.chunk]

    def _push(self, peer: int, place: int, half: int, data: Tensor, count: int) -> None:
        step = -(-data.numel() // self.pieces)
        target = self._slot(self.window.peers[peer], half, peer, self.members.rank)
        for k in range(self.pieces):
            a, b = min(k * step, data.numel()), min((k + 1) * step, data.numel())
            self.members.run((place * self.pieces + k) % self.members.lanes, partial(self._send, peer, k, target[a:b], data[a:b], count))

    def _send(self, peer: int, piece: int, target: Tensor, data: Tensor, count: int) -> None:
        self.window.ready(peer, count)
        if data.numel():
            target.copy_(data, non_blocking=True)
        self.window.arrive(peer, piece, count)

    def _add(self, out: Tensor, own: Tensor, chunk: tuple[int, int], half: int, count: int) -> None:
        window, (a, b) = self.window, chunk
        for peer in window.others():
            for k in range(self.pieces):
                window.arrived(peer, k, count)
        at = half * self.others * self.chunk
        sent = window.memory.view(torch.float32)[at : at + self.others * self.chunk]
        self.members.mean(own[a:b], sent, self.others, self.chunk, out[a:b], self.sms)

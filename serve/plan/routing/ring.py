"""Who gets a check: consistent hashing on its session, or one replica after the other.

The ring is that of Ray Serve's ConsistentHashRouter: virtual nodes for each replica, and where the
session's own replica refuses, the next ones clockwise. Only the hash function differs. Knows
nothing of time.
"""

from __future__ import annotations

import bisect
import hashlib
from typing import Protocol

import numpy as np

VIRTUAL_NODES, FALLBACKS = 100, 2  # Ray's defaults


class Router(Protocol):
    """Names the replicas to try, in order."""

    name: str

    def ranked(self, session: int) -> list[int]:
        """The replicas to try for a session, which is named by its 64-bit hash."""
        ...

    def add(self, replica: int) -> None:
        """Let a replica join."""
        ...

    def remove(self, replica: int) -> None:
        """Let a replica leave."""
        ...


class HashRing:
    """Consistent hashing: a replica that leaves or joins moves only its own sessions."""

    name = "consistent hash"

    def __init__(
        self,
        replicas: list[int],
        virtual_nodes: int = VIRTUAL_NODES,
        fallbacks: int = FALLBACKS,
    ) -> None:
        self._virtual_nodes, self._fallbacks = virtual_nodes, fallbacks
        self._replicas = set(replicas)
        owners = np.repeat(np.asarray(replicas), virtual_nodes)
        hashes = np.concatenate([self._hashes(replica) for replica in replicas])
        order = np.argsort(hashes)
        self._put(hashes[order], owners[order])

    def ranked(self, session: int) -> list[int]:
        """The session's own replica, and the next ones clockwise."""
        wanted = min(1 + self._fallbacks, len(self._replicas))
        position = bisect.bisect_right(self._hash_list, session)
        ranked: list[int] = []
        while len(ranked) < wanted:
            replica = self._owner_list[position % len(self._owner_list)]
            if replica not in ranked:
                ranked.append(replica)
            position += 1
        return ranked

    def add(self, replica: int) -> None:
        """Put the replica's virtual nodes on the ring."""
        hashes = np.sort(self._hashes(replica))
        positions = np.searchsorted(self._ring, hashes)
        self._replicas.add(replica)
        ring = np.insert(self._ring, positions, hashes)
        self._put(ring, np.insert(self._owners, positions, replica))

    def remove(self, replica: int) -> None:
        """Take the replica's virtual nodes off the ring."""
        stays = self._owners != replica
        self._replicas.discard(replica)
        self._put(self._ring[stays], self._owners[stays])

    def _put(self, hashes: np.ndarray, owners: np.ndarray) -> None:
        self._ring, self._owners = hashes, owners
        self._hash_list, self._owner_list = hashes.tolist(), owners.tolist()

    def _hashes(self, replica: int) -> np.ndarray:
        digests = [
            hashlib.blake2b(f"{replica}:{node}".encode(), digest_size=8).digest()
            for node in range(self._virtual_nodes)
        ]
        return np.frombuffer(b"".join(digests), dtype=np.uint64)


class RoundRobin:
    """One replica after the other, whatever the session."""

    name = "round-robin"

    def __init__(self, replicas: list[int], fallbacks: int = FALLBACKS) -> None:
        self._replicas, self._fallbacks, self._next = list(replicas), fallbacks, 0

    def ranked(self, session: int) -> list[int]:
        """The next replicas."""
        self._next += 1
        count = min(1 + self._fallbacks, len(self._replicas))
        places = [(self._next + position) % len(self._replicas) for position in range(count)]
        return [self._replicas[position] for position in places]

    def add(self, replica: int) -> None:
        """Put the replica at the end."""
        self._replicas.append(replica)

    def remove(self, replica: int) -> None:
        """Leave the replica out."""
        self._replicas.remove(replica)


ROUTERS = {HashRing.name: HashRing, RoundRobin.name: RoundRobin}

"""Whose key a request has. Knows keys by their SHA-256 only: they are long and random, so that a
slow hash would add nothing.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from typing import Generic, TypeVar

Owner = TypeVar("Owner")


def key_hash(key: str) -> str:
    """The hash that the tenants' file has instead of the key: `printf %s KEY | sha256sum`."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


class KeyRing(Generic[Owner]):
    """The owners of keys, by the keys' hashes."""

    def __init__(self, owners: Mapping[str, Owner]) -> None:
        self._owners = tuple(owners.items())

    def owner(self, key: str) -> Owner | None:
        """The owner of the key; None if it is nobody's.

        Compares with all keys, each in constant time, so that the time says nothing of them.
        """
        presented = key_hash(key)
        owner = None
        for stored_hash, key_owner in self._owners:
            if hmac.compare_digest(stored_hash, presented):
                owner = key_owner
        return owner

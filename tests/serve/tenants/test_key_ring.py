"""Whose key it is: found by its hash alone, and compared with every hash there is."""

from __future__ import annotations

import hashlib
import hmac

import pytest

from serve.tenants.key_ring import KeyRing, key_hash


def test_an_owner_is_found_by_the_key_and_by_nothing_near_it() -> None:
    ring = KeyRing({key_hash("key one"): "one", key_hash("key two"): "two"})
    assert (ring.owner("key one"), ring.owner("key two")) == ("one", "two")
    for key in ("", "key", "KEY ONE", "key one ", key_hash("key one")):
        assert ring.owner(key) is None


def test_a_key_s_hash_is_its_sha256() -> None:
    assert key_hash("secret") == hashlib.sha256(b"secret").hexdigest()
    assert KeyRing({key_hash("é"): 1}).owner("é") == 1
    assert KeyRing({key_hash("é"): 1}).owner("\udce9") is None  # what is no text at all


def test_every_hash_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []

    def compare(known: str, presented: str) -> bool:
        compared.append(known)
        return hmac_compare(known, presented)

    hmac_compare = hmac.compare_digest
    monkeypatch.setattr("serve.tenants.key_ring.hmac.compare_digest", compare)
    ring = KeyRing({key_hash(str(number)): number for number in range(5)})
    assert ring.owner("0") == 0
    assert compared == [key_hash(str(number)) for number in range(5)]

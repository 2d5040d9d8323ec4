"""Tenants: whose key it is, a salt that is nobody else's, and every mistake in their file named
before a server starts.
"""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guard.errors import GuardError
from serve.tenants.admin import Admin
from serve.tenants.key_ring import KeyRing, key_hash
from serve.tenants.tenant import Tenant, TenantLimits
from serve.tenants.tenant_file import Tenants, load_tenants

KEY = key_hash("shop's key")
FILE = f"""
admins:
  alice: {{keys_sha256: ["{key_hash("alice's key")}"], role: publisher}}
  bob: {{keys_sha256: ["{key_hash("bob's key")}"]}}
tenants:
  shop:
    keys_sha256: ["{KEY}", "{key_hash("shop's next key")}"]
    rule_sets: [support]
    limits: {{concurrent_checks: 8, characters: 50000}}
  bank:
    keys_sha256: ["{key_hash("bank's key")}"]
    rule_sets: [support, strict]
    shares_cache: true
    policies: 20
"""


def load_text(folder: Path, text: str) -> Tenants:
    path = folder / "tenants.yaml"
    path.write_text(text)
    return load_tenants(path, ["support", "strict"])


def test_tenants_are_found_by_any_of_their_keys_and_admins_with_their_roles(tmp_path: Path) -> None:
    tenants = load_text(tmp_path, FILE)
    shop, bank = tenants.all
    assert tenants.keys.owner("shop's key") is tenants.keys.owner("shop's next key") is shop
    assert tenants.keys.owner("bank's key") is bank
    assert tenants.keys.owner("alice's key") == Admin("alice", "publisher")
    assert tenants.keys.owner("bob's key") == Admin("bob", "viewer")
    assert shop.limits == TenantLimits(concurrent_checks=8, characters=50000)
    assert (shop.shares_cache, bank.shares_cache) == (False, True)
    assert bank.rule_sets == ("support", "strict")
    assert (shop.policies, bank.policies) == (0, 20)


def shop(keys: str = f"'{KEY}'", rule_sets: str = "support", more: str = "") -> str:
    return f"tenants: {{a: {{keys_sha256: [{keys}], rule_sets: [{rule_sets}]{more}}}}}"


def admin(role: str = "viewer") -> str:
    return f"admins: {{ann: {{keys_sha256: ['{KEY}'], role: {role}}}}}"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("tenants: {a: {rule_sets: [support]}}", "missing key 'tenants.a.keys_sha256'"),
        (shop().replace("{a:", "{A:"), r"tenants\.A"),
        (shop("secret"), "keys_sha256.0"),
        (shop(rule_sets="suport"), r"a\.rule_sets: .*\(got suport\)\. Did you mean 'support'"),
        (shop(f"'{KEY}', '{KEY}'"), r"tenants\.a\.keys_sha256: a key has two owners"),
        (f"{admin()}\n{shop()}", "a key has two owners"),
        (f"{admin('owner')}\n{shop()}", r"admins\.ann\.role.*'viewer', 'reviewer' or 'publisher'"),
        (shop(f"'{key_hash('')}'"), "this is the SHA-256 of an empty key.*sha256sum"),
        (shop(more=", limits: {concurrent_checks: 0}"), "concurrent_checks.*or equal to 1"),
    ],
)
def test_a_mistake_is_told_with_its_place(tmp_path: Path, text: str, error: str) -> None:
    with pytest.raises(GuardError, match=error) as raised:
        load_text(tmp_path, text)
    assert raised.value.remedy


NAMES = st.from_regex(r"[a-z0-9][a-z0-9_-]{0,8}", fullmatch=True)
SALTS = st.one_of(st.none(), st.text(max_size=12))


@given(NAMES, NAMES, SALTS, SALTS, st.booleans())
def test_no_two_tenants_have_the_same_salt_unless_both_share_their_cache(
    first: str, second: str, salt: str | None, other_salt: str | None, shares: bool
) -> None:
    own = Tenant(first, ()).salted(salt)
    assert own is not None
    if first != second:
        assert own != Tenant(second, ()).salted(other_salt)
    assert own != Tenant(second, (), shares_cache=True).salted(other_salt)


def test_own_salts_part_conversations_and_those_who_share_the_cache_share_them() -> None:
    for shares in (False, True):
        tenant = Tenant("shop", (), shares_cache=shares)
        assert len({tenant.salted(salt) for salt in (None, "a", "b")}) == 3
    first, second = (Tenant(name, (), shares_cache=True) for name in ("a", "b"))
    assert first.salted(None) is None
    assert first.salted("x") == second.salted("x")


def test_an_owner_is_found_by_the_key_and_by_nothing_near_it() -> None:
    ring = KeyRing({key_hash("key one"): "one", key_hash("key two"): "two"})
    assert (ring.owner("key one"), ring.owner("key two")) == ("one", "two")
    for key in ("", "key", "KEY ONE", "key one ", key_hash("key one")):
        assert ring.owner(key) is None
    assert KeyRing({hashlib.sha256("é".encode()).hexdigest(): 1}).owner("é") == 1
    assert ring.owner("\udce9") is None  # what is no text at all


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

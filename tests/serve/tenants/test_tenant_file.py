"""The file of tenants: what it means, and every mistake named before a server starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from guard.errors import GuardError
from serve.tenants.key_ring import key_hash
from serve.tenants.tenant import TenantLimits
from serve.tenants.tenant_file import ADMIN, Tenants, load_tenants

KEY = key_hash("shop's key")
FILE = f"""
admin_keys_sha256: ["{key_hash("admin's key")}"]
tenants:
  shop:
    keys_sha256: ["{KEY}", "{key_hash("shop's next key")}"]
    rule_sets: [support]
    limits: {{concurrent_checks: 8, characters: 50000}}
  bank:
    keys_sha256: ["{key_hash("bank's key")}"]
    rule_sets: [support, strict]
    shares_cache: true
"""


def load_text(folder: Path, text: str) -> Tenants:
    path = folder / "tenants.yaml"
    path.write_text(text)
    return load_tenants(path, ["support", "strict"])


def test_tenants_are_found_by_any_of_their_keys_and_the_admin_by_its_own(tmp_path: Path) -> None:
    tenants = load_text(tmp_path, FILE)
    shop, bank = tenants.all
    assert tenants.keys.owner("shop's key") is tenants.keys.owner("shop's next key") is shop
    assert tenants.keys.owner("bank's key") is bank
    assert tenants.keys.owner("admin's key") is ADMIN
    assert shop.limits == TenantLimits(concurrent_checks=8, characters=50000)
    assert (shop.shares_cache, bank.shares_cache) == (False, True)
    assert bank.rule_sets == ("support", "strict")


def shop(keys: str = f"'{KEY}'", rule_sets: str = "support", more: str = "") -> str:
    return f"tenants: {{a: {{keys_sha256: [{keys}], rule_sets: [{rule_sets}]{more}}}}}"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("tenants: {}", "'tenants'.*at least 1"),
        ("tenants: {a: {rule_sets: [support]}}", "missing key 'tenants.a.keys_sha256'"),
        (shop().replace("{a:", "{A:"), r"tenants\.A"),
        (shop("secret"), "keys_sha256.0"),
        (shop(rule_sets=""), "rule_sets.*at least 1"),
        (
            shop(rule_sets="suport"),
            r"a\.rule_sets: there is no such rule set \(got suport\)\. Did you mean 'support'",
        ),
        (shop(f"'{KEY}', '{KEY}'"), r"tenants\.a\.keys_sha256: a key has two owners"),
        (f"admin_keys_sha256: ['{KEY}']\n{shop()}", "a key has two owners"),
        (shop(f"'{key_hash('')}'"), "this is the SHA-256 of an empty key.*sha256sum"),
        (
            shop(more=", limits: {concurrent_checks: 0}"),
            "concurrent_checks.*greater than or equal to 1",
        ),
        (shop(more=", limits: {x: 1}"), "unknown key"),
    ],
)
def test_a_mistake_is_told_with_its_place(tmp_path: Path, text: str, error: str) -> None:
    with pytest.raises(GuardError, match=error) as raised:
        load_text(tmp_path, text)
    assert raised.value.remedy

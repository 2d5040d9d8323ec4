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


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("tenants: {}", "'tenants'.*at least 1"),
        ("tenants: {a: {rule_sets: [support]}}", "missing key 'tenants.a.keys_sha256'"),
        ("tenants: {a: {keys_sha256: [secret], rule_sets: [support]}}", "keys_sha256.0"),
        (f"tenants: {{A: {{keys_sha256: ['{KEY}'], rule_sets: [support]}}}}", r"tenants\.A"),
        (f"tenants: {{a: {{keys_sha256: ['{KEY}'], rule_sets: []}}}}", "rule_sets.*at least 1"),
        (
            f"tenants: {{a: {{keys_sha256: ['{KEY}'], rule_sets: [suport]}}}}",
            r"tenants\.a\.rule_sets: there is no such rule set \(got suport\)\. "
            "Did you mean 'support'",
        ),
        (
            f"tenants: {{a: {{keys_sha256: ['{KEY}', '{KEY}'], rule_sets: [support]}}}}",
            r"tenants\.a\.keys_sha256: a key has two owners",
        ),
        (
            f"admin_keys_sha256: ['{KEY}']\n"
            f"tenants: {{a: {{keys_sha256: ['{KEY}'], rule_sets: [support]}}}}",
            "a key has two owners",
        ),
        (
            f"tenants: {{a: {{keys_sha256: ['{key_hash('')}'], rule_sets: [support]}}}}",
            "this is the SHA-256 of an empty key.*sha256sum",
        ),
        (
            f"tenants: {{a: {{keys_sha256: ['{KEY}'], rule_sets: [support], "
            "limits: {concurrent_checks: 0}}}",
            "concurrent_checks.*greater than or equal to 1",
        ),
        (
            f"tenants: {{a: {{keys_sha256: ['{KEY}'], rule_sets: [support], limits: {{x: 1}}}}}}",
            "unknown key",
        ),
    ],
)
def test_a_mistake_is_told_with_its_place(tmp_path: Path, text: str, error: str) -> None:
    with pytest.raises(GuardError, match=error) as raised:
        load_text(tmp_path, text)
    assert raised.value.remedy

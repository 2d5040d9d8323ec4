"""Two tenants with limits, and an admin of each role. Tests only."""

from __future__ import annotations

from typing import Any

from serve.policy.rule_set import RuleSet
from serve.tenants.admin import ROLES, Admin
from serve.tenants.key_ring import KeyRing, key_hash
from serve.tenants.tenant import Tenant, TenantLimits
from serve.tenants.tenant_file import Tenants

LOGITS = {"flagged": -1.0, "fine": -2.0, "secret": -1.0}  # the threshold is 0.25
RULE_SETS = {
    "support": RuleSet(("fine",), RuleSet.any_of(["fine"]).violated_if, "support"),
    "strict": RuleSet(("flagged",), RuleSet.any_of(["flagged"]).violated_if, "strict"),
}
SHOP = Tenant("shop", ("support",), TenantLimits(concurrent_checks=1, body_bytes=2000))
BANK = Tenant("bank", ("support", "strict"), TenantLimits(characters=100), policies=2)
HEADERS = {
    "shop": {"authorization": "Bearer shop's key"},
    "bank": {"x-api-key": "bank's key"},
    "viewer": {"authorization": "bearer viewer's key"},
    "reviewer": {"x-api-key": "reviewer's key"},
    "publisher": {"x-api-key": "publisher's key"},
}


def shop_and_bank(*admins: Admin) -> Tenants:
    """Both, an admin of each role, whose key is named after it, and others with keys by name."""
    every = (SHOP, BANK)
    owners: dict[str, Any] = {key_hash(f"{tenant.name}'s key"): tenant for tenant in every}
    owners |= {key_hash(f"{role}'s key"): Admin(f"{role}-1", role) for role in ROLES}
    owners |= {key_hash(f"{admin.name}'s key"): admin for admin in admins}
    return Tenants(every, KeyRing(owners))

"""The file of tenants:

    admins:
      alice: {keys_sha256: [9f86d0...], role: publisher}   # viewer is the default
    tenants:
      shop:
        keys_sha256: [60303a..., fd61a0...]   # several, so that one can be replaced
        rule_sets: [support]
        limits: {concurrent_checks: 8, body_bytes: 262144, characters: 50000}
        shares_cache: false                   # the default
        policies: 20                          # that a request may state; by default none

Every mistake in the file is found when it is read. Knows nothing of what rule sets are.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from guard.errors import GuardError, choose_from
from guard.files.yaml_file import Strict, load
from serve.tenants.admin import Admin, Role
from serve.tenants.key_ring import KeyRing, key_hash
from serve.tenants.tenant import Tenant, TenantLimits

OwnerName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,63}$")]
KeyHash = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class AdminEntry(Strict):
    """An admin as the file has it."""

    keys_sha256: Annotated[list[KeyHash], Field(min_length=1)]
    role: Role = "viewer"


class TenantEntry(Strict):
    """A tenant as the file has it."""

    keys_sha256: Annotated[list[KeyHash], Field(min_length=1)]
    rule_sets: Annotated[list[str], Field(min_length=1)]
    limits: TenantLimits = TenantLimits()
    shares_cache: bool = False
    policies: Annotated[int, Field(ge=0)] = 0


class TenantFile(Strict):
    """The file of tenants."""

    admins: dict[OwnerName, AdminEntry] = Field(default_factory=dict)
    tenants: Annotated[dict[OwnerName, TenantEntry], Field(min_length=1)]


@dataclass(frozen=True)
class Tenants:
    """All tenants, and the owner of each key."""

    all: tuple[Tenant, ...]
    keys: KeyRing[Tenant | Admin]


def load_tenants(path: Path, rule_sets: Collection[str]) -> Tenants:
    """The tenants of a file, on a server with these rule sets.

    Raises GuardError for whatever is wrong with it, also for a rule set that is not served.
    """
    content = load(path, TenantFile)
    owners: dict[str, Tenant | Admin] = {}
    for name, described in content.admins.items():
        admin = Admin(name, described.role)
        for hashed in described.keys_sha256:
            _add_key(owners, hashed, admin, f"{path}: admins.{name}.keys_sha256")
    tenants = []
    for name, entry in content.tenants.items():
        where = f"{path}: tenants.{name}"
        tenants.append(_tenant(name, entry, rule_sets, where))
        for hashed in entry.keys_sha256:
            _add_key(owners, hashed, tenants[-1], f"{where}.keys_sha256")
    return Tenants(tuple(tenants), KeyRing(owners))


def _tenant(name: str, entry: TenantEntry, rule_sets: Collection[str], where: str) -> Tenant:
    for rule_set in entry.rule_sets:
        if rule_set not in rule_sets:
            remedy = f"{choose_from(rule_set, rule_sets)}. `make up RULESETS=` has the others"
            where = f"{where}.rule_sets"
            raise GuardError("there is no such rule set", where=where, got=rule_set, remedy=remedy)
    sets = tuple(entry.rule_sets)
    return Tenant(name, sets, entry.limits, entry.shares_cache, entry.policies)


def _add_key(
    owners: dict[str, Tenant | Admin], hashed: str, owner: Tenant | Admin, where: str
) -> None:
    if hashed == key_hash(""):
        remedy = "Hash the key itself: printf %s KEY | sha256sum"
        raise GuardError(
            "this is the SHA-256 of an empty key", where=where, got=hashed, remedy=remedy
        )
    if hashed in owners:
        remedy = "Give every tenant and every admin keys of their own"
        raise GuardError("a key has two owners", where=where, got=hashed, remedy=remedy)
    owners[hashed] = owner

"""A tenant: its rule sets, its limits, and what of the cache it shares. Values only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field

from guard.files.yaml_file import Strict

Count = Annotated[int, Field(ge=1)]


class TenantLimits(Strict):
    """What a tenant may ask at once; without a number, what the server itself can take, and half of
    the requests that it can take at once.

    `concurrent_checks` are requests under way, and checks of theirs in the engine. `body_bytes` and
    `characters`, of all its texts, are a request's.
    """

    concurrent_checks: Count | None = None
    body_bytes: Count | None = None
    characters: Count | None = None


@dataclass(frozen=True)
class Tenant:
    """Who may ask these rule sets. With `shares_cache` it learns from token counts and times which
    texts others that share theirs have sent, and they of its own. A request of it may state so many
    `policies`.
    """

    name: str
    rule_sets: tuple[str, ...]
    limits: TenantLimits = field(default_factory=TenantLimits)
    shares_cache: bool = False
    policies: int = 0

    def salted(self, cache_salt: str | None) -> str | None:
        """The engine's cache salt for this tenant, from the salt in the request.

        Salts of two tenants are never equal, and never equal to one of those who share the cache.
        """
        if not self.shares_cache:
            return f"{self.name}/{cache_salt or ''}"
        if cache_salt is None:
            return None
        return f"/{cache_salt}"

"""Who may ask: the caller of every request, by its key, before anything of it is read.

With tenants a check needs a tenant's key, `/metrics` and `/admin/` an admin's, as `Authorization:
Bearer KEY` or `x-api-key: KEY`. Without, there is one caller, who may ask everything. Knows nothing
of what is asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext

from fastapi import Request
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from guard.example import Message
from serve.api.calls import MAX_KEPT_CHARACTERS, CallsUnderWay
from serve.api.catalogue import Catalogue
from serve.api.limits import RETRY_AFTER, Refuse
from serve.tenants.tenant import Tenant, TenantLimits
from serve.tenants.tenant_file import Admin, Tenants

PUBLIC = ("/health", "/healthz", "/readyz", "/docs", "/redoc", "/openapi.json")
METRICS, ADMIN = "/metrics", "/admin/rules/"  # for administrators: the one, and what begins so
WITHOUT_KEY = {"www-authenticate": "Bearer"}


class Caller:
    """Who sent a request: what may be asked, and what of it is under way.

    `tenant` is None on a server without tenants.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        tenant: Tenant | None = None,
        kept_characters: int = MAX_KEPT_CHARACTERS,
    ) -> None:
        self.catalogue = catalogue
        self.tenant = tenant
        self.limits = tenant.limits if tenant else TenantLimits()
        self.calls = CallsUnderWay(kept_characters)
        self.requests_under_way = 0
        self._checks: AbstractAsyncContextManager[object] = nullcontext()
        if self.limits.concurrent_checks is not None:
            self._checks = asyncio.Semaphore(self.limits.concurrent_checks)

    @classmethod
    def of(cls, request: Request) -> Caller:
        """The sender of `request`."""
        caller: Caller = request.scope["caller"]
        return caller

    @property
    def has_room(self) -> bool:
        """Whether one more request may come."""
        limit = self.limits.concurrent_checks
        return limit is None or self.requests_under_way < limit

    @property
    def room(self) -> AbstractAsyncContextManager[object]:
        """A place in the engine, waited for until a check of the caller's own leaves one."""
        return self._checks

    def salted(self, cache_salt: str | None) -> str | None:
        """The salt for the engine, of the one that a request has."""
        if self.tenant is None:
            return cache_salt
        return self.tenant.salted(cache_salt)

    def check_size(self, conversations: Sequence[Sequence[Message]]) -> None:
        """Raise HTTPException 413 if a request has more characters than the caller may send."""
        limit = self.limits.characters
        if limit is None:
            return
        characters = 0
        for messages in conversations:
            characters += sum(len(message.content) for message in messages)
        if characters > limit:
            raise HTTPException(413, f"{characters:,} characters; your limit is {limit:,}")


class Access:
    """ASGI middleware that finds out who asks, and refuses who may not, or not so much at once."""

    def __init__(
        self, app: ASGIApp, catalogue: Catalogue, tenants: Tenants | None, refuse: Refuse
    ) -> None:
        self._app = app
        self._refuse = refuse
        self._tenants = tenants
        self._everybody = Caller(catalogue)
        self._callers: dict[str, Caller] = {}
        for tenant in tenants.all if tenants else ():
            limited = catalogue.limited_to(tenant.rule_sets)
            share = MAX_KEPT_CHARACTERS // len(tenants.all) if tenants else 0
            self._callers[tenant.name] = Caller(limited, tenant, share)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on with its caller, if it may come."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            caller = self._caller(scope)
        except HTTPException as error:
            response = self._refuse(scope, error.status_code, error.detail, error.headers)
            await response(scope, receive, send)
            return
        scope["caller"] = caller
        caller.requests_under_way += 1
        try:
            await self._app(scope, receive, send)
        finally:
            caller.requests_under_way -= 1

    def _caller(self, scope: Scope) -> Caller:
        """Raises HTTPException 401, 403 or 429 for who may not ask."""
        path = scope["path"]
        if self._tenants is None or path in PUBLIC:
            return self._everybody
        owner = self._tenants.keys.owner(_key(scope))
        if owner is None:
            raise HTTPException(401, "no key, or an unknown one", WITHOUT_KEY)
        is_for_admins = path == METRICS or path.startswith(ADMIN)
        if isinstance(owner, Admin) != is_for_admins:
            raise HTTPException(403, "not with this key: checks and administration have their own")
        if isinstance(owner, Admin):
            return self._everybody
        caller = self._callers[owner.name]
        if not caller.has_room:
            limit = caller.limits.concurrent_checks
            raise HTTPException(429, f"{limit} requests at once are your limit", RETRY_AFTER)
        return caller


def _key(scope: Scope) -> str:
    """The key that a request presents; empty if it has none."""
    headers = Headers(scope=scope)
    kind, _, key = headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer" and key.strip():
        return key.strip()
    return headers.get("x-api-key", "")

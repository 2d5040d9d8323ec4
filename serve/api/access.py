"""Who may ask: the caller of every request, known by its key before the body is read.

With tenants a check needs a tenant's key, and `/metrics` and `/admin/` need an admin's, whose role
says what else it may (`acting`). A key comes as `Authorization: Bearer KEY` or as `x-api-key: KEY`.
Without tenants there is one caller, who may ask everything, and from this machine administer and
review. Knows nothing of what is asked.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from ipaddress import ip_address

from fastapi import Request
from starlette.datastructures import URL, Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from guard.conversation.example import Message
from serve.api.calls import MAX_KEPT_CHARACTERS, CallsUnderWay
from serve.api.catalogue import Catalogue
from serve.api.input import limits
from serve.registry.registry import user_name
from serve.tenants.admin import Admin, Role
from serve.tenants.tenant import Tenant, TenantLimits
from serve.tenants.tenant_file import Tenants

PUBLIC = ("/healthz", "/readyz", "/docs", "/redoc", "/openapi.json")
METRICS, ADMIN = "/metrics", "/admin/"  # for admins: the path, and a prefix
FEEDBACK = "/v1/feedback"
SHARED = ("/v1/rules", "/v1/rule_sets", FEEDBACK)  # for admins and tenants
MY_NAMES = ("localhost", "127.0.0.1", "::1")
PROXY_HEADERS = ("forwarded", "via", "x-forwarded-for", "x-real-ip")
ADMIN_FROM_HERE = (
    "without tenants rules are changed, and checks reviewed, from the server's own machine alone, "
    "and by no other site's page there; a file of tenants (TENANTS=) has admins' keys"
)
NO_KEY = "no key, or an unknown one: send it as `Authorization: Bearer KEY` or `x-api-key: KEY`"
# Starlette finds a route also by a path that ends with a line break; the rights here are by path.
CONTROL = re.compile(r"[\x00-\x1f\x7f]")


class Caller:
    """The sender of a request: what it may ask, and what it has under way.

    On a server with tenants it is a `tenant` or an `admin`. A tenant without a limit of its own has
    `shares`: so many requests and streams at once, and as many checks in the engine as requests.
    Without tenants a request may state so many `policies`.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        tenant: Tenant | None = None,
        kept_characters: int = MAX_KEPT_CHARACTERS,
        shares: Mapping[limits.RequestKind, int] | None = None,
        admin: Admin | None = None,
        policies: int = 0,
    ) -> None:
        self.catalogue = catalogue
        self.policies = tenant.policies if tenant else policies
        self.tenant = tenant
        self.admin = admin
        self.limits = tenant.limits if tenant else TenantLimits()
        self.calls = CallsUnderWay(kept_characters)
        self.shares = shares or {}
        self.under_way = dict.fromkeys(limits.KINDS, 0)
        # A place in the engine, waited for until a check of the caller's own leaves one. A request
        # may have many checks: bounded as requests alone, they would leave others no room.
        self.room: AbstractAsyncContextManager[object] = nullcontext()
        checks = self.limits.concurrent_checks or self.shares.get("request")
        if checks is not None:
            self.room = asyncio.Semaphore(checks)

    @classmethod
    def of(cls, request: Request) -> Caller:
        caller: Caller = request.scope["caller"]
        return caller

    def reached_limit(self, kind: limits.RequestKind) -> int | None:
        """The limit that one more request would exceed; None if it may come."""
        limit, under_way = self.shares.get(kind), self.under_way[kind]
        if self.limits.concurrent_checks is not None:
            limit, under_way = self.limits.concurrent_checks, sum(self.under_way.values())
        if limit is not None and under_way >= limit:
            return limit
        return None

    def salted(self, cache_salt: str | None) -> str | None:
        if self.tenant:
            return self.tenant.salted(cache_salt)
        return cache_salt

    def check_policies(self, stated: int, rules: int) -> None:
        """Raise HTTPException 422 for more policies than a request may state beside so many rules,
        which count together.
        """
        most = max(0, min(self.policies, limits.MAX_RULES - rules))
        if stated > most:
            may = f"beside {rules:,} rules you may state {most:,} in a request"
            raise HTTPException(422, f"policies: {may}, got {stated:,}")

    def check_size(
        self, conversations: Sequence[Sequence[Message]], policies: Iterable[str] = ()
    ) -> None:
        """Raise HTTPException 413 for more characters than the caller may send. A message that
        stands in several conversations, as one that grows, counts once, and equal ones each. So
        does each of the policies.
        """
        limit = self.limits.characters
        if limit is None:
            return
        messages: dict[int, Message] = {}
        for conversation in conversations:
            messages |= {id(message): message for message in conversation}
        characters = sum(len(message.content) for message in messages.values())
        characters += sum(map(len, policies))
        if characters > limit:
            raise HTTPException(413, f"{characters:,} characters; your limit is {limit:,}")


class Access:
    """ASGI middleware that finds the caller, and refuses one who may not ask, or not so much.

    Of several tenants, one without a limit may have half of `max_requests` and half of MAX_STREAMS.
    Without tenants a request may state so many `policies`.
    """

    def __init__(
        self,
        app: ASGIApp,
        catalogue: Catalogue,
        tenants: Tenants | None,
        refuse: limits.Refuse,
        max_requests: int = limits.MAX_REQUESTS,
        policies: int = 0,
    ) -> None:
        self._app = app
        self._refuse = refuse
        self._tenants = tenants
        self._everybody = Caller(catalogue, policies=policies)
        self._callers: dict[str, Caller] = {}
        if tenants is None:
            return
        kept_characters = MAX_KEPT_CHARACTERS // len(tenants.all)
        divisor = min(2, len(tenants.all))
        shares: dict[limits.RequestKind, int] = {
            "request": max_requests // divisor,
            "stream": limits.MAX_STREAMS // divisor,
        }
        for tenant in tenants.all:
            limited = catalogue.limited_to(tenant.rule_sets)
            self._callers[tenant.name] = Caller(limited, tenant, kept_characters, shares)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            caller = self._caller(scope)
        except HTTPException as error:
            await self._refuse(scope, error)(scope, receive, send)
            return
        scope["caller"] = caller
        kind = limits.kind_of(scope)
        caller.under_way[kind] += 1
        try:
            await self._app(scope, receive, send)
        finally:
            caller.under_way[kind] -= 1

    def _caller(self, scope: Scope) -> Caller:
        """Raises HTTPException 401, 403 or 429 for one who may not ask, 404 for no path."""
        if CONTROL.search(scope["path"]):
            raise HTTPException(404, "no path has control characters")
        path = limits.route_path(scope)
        if self._tenants is None:
            is_for_here = path.startswith((ADMIN, limits.CONSOLE_PATH)) or path == FEEDBACK
            if is_for_here and not _is_from_here(scope):
                raise HTTPException(403, ADMIN_FROM_HERE)
            return self._everybody
        if path in PUBLIC or path.startswith(limits.CONSOLE_PATH):  # which has sessions
            return self._everybody
        owner = self._tenants.keys.owner(_key(scope))
        if owner is None:
            raise HTTPException(401, NO_KEY, {"www-authenticate": "Bearer"})
        is_for_admins = path == METRICS or path.startswith(ADMIN)
        if isinstance(owner, Admin) and (is_for_admins or path in SHARED):
            return Caller(self._everybody.catalogue, admin=owner)
        if isinstance(owner, Admin) or is_for_admins:
            raise HTTPException(403, "not with this key: checks and administration have their own")
        caller = self._callers[owner.name]
        limit = caller.reached_limit(limits.kind_of(scope))
        if limit is not None:
            raise HTTPException(429, f"your limit is {limit} requests at once", limits.RETRY_AFTER)
        return caller


def acting(request: Request, role: Role) -> str:
    """The name of who asks for what needs this role. Without tenants whoever is on this machine has
    every role. Raises HTTPException 403 for one without the role.
    """
    caller = Caller.of(request)
    admin = caller.admin
    if admin is None and caller.tenant is None:
        if not _is_from_here(request.scope):
            raise HTTPException(403, ADMIN_FROM_HERE)
        admin = Admin(user_name(), "publisher")
    if admin is None:
        raise HTTPException(403, f"this needs an admin's key with the role {role}")
    if not admin.may_act_as(role):
        why = f"this needs the role {role}; the key of {admin.name} has the role {admin.role}"
        raise HTTPException(403, why)
    return admin.name


def _is_from_here(scope: Scope) -> bool:
    """Whether this machine sent the request, to a name of its own: no proxy, no page of another
    site, and none of a name that somebody had lead here.
    """
    headers = Headers(scope=scope)
    if URL(scope=scope).hostname not in MY_NAMES:
        return False
    if any(name in headers for name in PROXY_HEADERS) or _is_of_another_site(headers):
        return False
    if scope.get("client") is None:
        return False
    try:
        address = ip_address(scope["client"][0])
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def _is_of_another_site(headers: Headers) -> bool:
    """Whether a browser sent the request for a page that is not the server's own, `/docs`.

    A browser on this machine sends requests for pages of any site, and says in a header for which.
    """
    site = headers.get("sec-fetch-site")
    if site is None:
        return "origin" in headers
    return site not in ("same-origin", "none")


def _key(scope: Scope) -> str:
    """The key that a request presents; empty if it has none."""
    headers = Headers(scope=scope)
    kind, _, key = headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer" and key.strip():
        return key.strip()
    return headers.get("x-api-key", "")

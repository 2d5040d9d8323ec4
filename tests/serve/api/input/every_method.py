"""What every method gets of every kind of path, of one server and of a cluster. Tests only."""

from __future__ import annotations

import httpx

READ, ASKED, CHANGED = "GET, HEAD, OPTIONS", "OPTIONS, POST", "DELETE, OPTIONS, POST"
# What each path allows, and the key of an error body there.
PATHS = {
    "/healthz": (READ, "error"),
    "/readyz": (READ, "error"),
    "/health": (READ, "error"),
    "/metrics": (READ, "error"),
    "/docs": (READ, "error"),
    "/openapi.json": (READ, "error"),
    "/v1/rules": (READ, "error"),
    "/v1/rule_sets": (READ, "error"),
    "/v1/models": (READ, "error"),
    "/v1/check": (ASKED, "verdict"),
    "/v1/check/turns": (ASKED, "verdict"),
    "/v1/check/stream": (ASKED, "verdict"),
    "/v1/chat/completions": (ASKED, "error"),
    "/v1/moderations": (ASKED, "error"),
    "/api/v1/text/contents": (ASKED, "code"),
    "/fine/api/v1/text/chat": (ASKED, "code"),
    "/beta/litellm_basic_guardrail_api": (ASKED, "error"),
    "/request": (ASKED, "error"),
    "/response": (ASKED, "error"),
    "/admin/rules/fine": (CHANGED, "verdict"),
}
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")
VARYING = ("date", "x-request-id", "content-length", "x-guard-replica")


def check_path(client: httpx.Client, path: str, rule: str = "fine") -> None:
    """Ask the path by every method; `rule` is one that is served."""
    allowed, key = PATHS[path]
    path = path.replace("fine", rule)
    for method in METHODS:
        response = client.request(method, path)
        said = f"{method} {path}: {response.status_code} {dict(response.headers)}"
        assert not any(name.startswith("access-control") for name in response.headers), said
        if method == "OPTIONS":
            assert (response.status_code, response.content) == (204, b""), said
            assert response.headers["allow"] == allowed, said
        elif method == "HEAD":
            _check_head(client, path, response)
        elif method not in allowed:
            assert (response.status_code, response.headers["allow"]) == (405, allowed), said
            assert key in response.json(), said


def _check_head(client: httpx.Client, path: str, head: httpx.Response) -> None:
    """Raise AssertionError where HEAD is answered in another way than GET."""
    got = client.get(path)
    assert (head.status_code, head.content) == (got.status_code, b""), path
    for name in set(got.headers) - set(VARYING):
        assert head.headers[name] == got.headers[name], f"{path}: {name}"
    if path != "/metrics":  # which counts this too
        assert head.headers["content-length"] == got.headers["content-length"], path

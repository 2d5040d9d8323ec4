"""What every method gets of every kind of path, of one server and of a cluster. Tests only."""

from __future__ import annotations

import httpx
from httpx import Client

from serve.api.formats.check import error_body
from serve.api.wire_format import RULE
from tests.serve.wire_requests import CASES

READ, ASKED, CHANGED = "GET, HEAD, OPTIONS", "OPTIONS, POST", "DELETE, GET, HEAD, OPTIONS, POST"
OURS = error_body(405, "", "request_refused").keys()
# What each path allows, and the keys of an error body there.
PROBES = ("/healthz", "/readyz", "/metrics", "/docs", "/openapi.json")
PATHS = dict.fromkeys((*PROBES, "/v1/rules", "/v1/rule_sets"), (READ, OURS))
PATHS |= {"/v1/models": (READ, {"error"}), f"/admin/rules/{RULE}": (CHANGED, OURS)}
for case in CASES:
    keys = case.wire_format.error_body(405, "", "request_refused").keys()
    PATHS[case.example.path] = (ASKED, keys)
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")
VARYING = ("date", "x-request-id", "content-length", "x-guard-replica")


def check_path(client: Client, path: str, rule: str) -> None:
    """Ask the path by every method; `rule` is one that is served."""
    allowed, keys = PATHS[path]
    path = path.replace(RULE, rule)
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
            assert response.json().keys() == keys, said


def _check_head(client: Client, path: str, head: httpx.Response) -> None:
    """Raise AssertionError where HEAD is answered in another way than GET."""
    got = client.get(path)
    assert (head.status_code, head.content) == (got.status_code, b""), path
    for name in set(got.headers) - set(VARYING):
        assert head.headers[name] == got.headers[name], f"{path}: {name}"
    if path != "/metrics":  # which counts this too
        assert head.headers["content-length"] == got.headers["content-length"], path

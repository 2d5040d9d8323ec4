"""Kong's Lua of deploy/kong, in LuaJIT: run by test_kong.py in `.venv-clients`.

Reads {"access": source, "guardrail": source, "bodies": [...], "answers": [...]} from stdin, and
writes what `access` did with each request's body (null: it was passed on) and `guardrail` with each
answer of the server (or the error that it raised). What Kong brings along is played here: four
functions of its API, cjson, and resty.http, which really asks the server.
"""

from __future__ import annotations

import contextlib
import json
import sys
import urllib.error
import urllib.request
from typing import Any

import lupa.luajit21 as lupa

LISTS = "a list of JSON"  # the key that marks a table as one, as cjson's metatable does


class Exit(Exception):
    """Kong ends a request here."""


lua = lupa.LuaRuntime(unpack_returned_tuples=True)
exits: list[dict[str, Any]] = []


def to_lua(value: Any) -> Any:
    if isinstance(value, dict):
        return lua.table_from({key: to_lua(inner) for key, inner in value.items()})
    if isinstance(value, list):
        table = lua.table_from([to_lua(inner) for inner in value])
        table[LISTS] = True
        return table
    return value


def from_lua(value: Any) -> Any:
    if lupa.lua_type(value) != "table":
        return value
    items = dict(value.items())
    is_list = bool(items.pop(LISTS, False)) or (bool(items) and set(map(type, items)) == {int})
    if is_list:
        return [from_lua(items[index]) for index in sorted(items)]
    return {key: from_lua(inner) for key, inner in items.items()}


def decode(text: str) -> Any:
    try:
        return to_lua(json.loads(text))
    except ValueError:
        return None


def leave(status: int, body: Any) -> None:
    exits.append({"status": status, "body": from_lua(body)})
    raise Exit


def request_uri(client: Any, url: str, options: Any) -> Any:
    asked = from_lua(options)
    request = urllib.request.Request(url, asked["body"].encode(), asked["headers"])
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return to_lua({"status": answer.status, "body": answer.read().decode()})
    except urllib.error.HTTPError as answer:
        return to_lua({"status": answer.code, "body": answer.read().decode()})
    except OSError:
        return None


def accessed(source: str, body: str | None) -> dict[str, Any] | None:
    lua.globals().kong = to_lua({"request": {}, "response": {}})
    lua.globals().kong.request.get_raw_body = lambda: body
    lua.globals().kong.response.exit = leave
    exits.clear()
    with contextlib.suppress(Exit):
        lua.execute(source)()
    return exits[0] if exits else None


def guarded(source: str, answer: Any) -> Any:
    try:
        return from_lua(lua.execute(source)(to_lua(answer)))
    except lupa.LuaError as error:
        return f"raised {error}"


MODULES = {
    "cjson.safe": {
        "decode": decode,
        "encode": lambda value: json.dumps(from_lua(value)),
        "decode_array_with_array_mt": lambda is_on: None,
    },
    "resty.http": {
        "new": lambda: to_lua({"set_timeout": lambda client, ms: None, "request_uri": request_uri})
    },
}
lua.globals().require = lambda name: to_lua(MODULES[name])
given = json.load(sys.stdin)
result = {
    "access": [accessed(given["access"], body) for body in given["bodies"]],
    "guardrail": [guarded(given["guardrail"], answer) for answer in given["answers"]],
}
json.dump(result, sys.stdout)

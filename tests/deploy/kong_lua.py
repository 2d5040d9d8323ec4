"""Kong's Lua of deploy/kong, in LuaJIT: run by test_kong.py in `.venv-clients`.

Reads {"access": source, "bodies": [...]} from stdin, and writes what `access` did with each
request's body: {"passed_on": body}, or how the request ended. What Kong brings along is played
here: functions of its API, cjson, and resty.http, which really asks the server.
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
NULL = object()  # no value of Lua's, as cjson.null
DIGITS = 14  # of a number, that cjson writes by default


class Exit(Exception):
    """Kong ends a request here."""


lua = lupa.LuaRuntime(unpack_returned_tuples=True)
exits: list[dict[str, Any]] = []


def to_lua(value: Any, *, marks_lists: bool = True) -> Any:
    if isinstance(value, dict):
        items = {key: to_lua(inner, marks_lists=marks_lists) for key, inner in value.items()}
        return lua.table_from(items)
    if isinstance(value, list):
        table = lua.table_from([to_lua(inner, marks_lists=marks_lists) for inner in value])
        if marks_lists:
            table[LISTS] = True
        return table
    return NULL if value is None else value


def from_lua(value: Any) -> Any:
    if value is NULL:
        return None
    if lupa.lua_type(value) != "table":
        return value
    items = dict(value.items())
    is_list = bool(items.pop(LISTS, False)) or (bool(items) and set(map(type, items)) == {int})
    if is_list:
        return [from_lua(items[index]) for index in sorted(items)]
    return {key: from_lua(inner) for key, inner in items.items()}


class Cjson:
    """As much of cjson.safe as is used: it reads doubled keys, and lists as objects until told not
    to, and rounds numbers.
    """

    def __init__(self) -> None:
        self._marks_lists = False
        self._digits = DIGITS

    def module(self) -> Any:
        return to_lua(
            {
                "new": lambda: Cjson().module(),
                "decode": self.decode,
                "encode": self.encode,
                "decode_array_with_array_mt": self.mark_lists,
                "encode_number_precision": self.write_digits,
            }
        )

    def mark_lists(self, is_on: bool) -> None:
        self._marks_lists = is_on

    def write_digits(self, digits: int) -> None:
        assert 1 <= digits <= 16
        self._digits = digits

    def decode(self, text: str) -> Any:
        try:
            return to_lua(json.loads(text), marks_lists=self._marks_lists)
        except ValueError:
            return None

    def encode(self, value: Any) -> str | None:
        try:
            return json.dumps(self._written(from_lua(value)))
        except ValueError:  # not a number
            return None

    def _written(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: self._written(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [self._written(inner) for inner in value]
        if isinstance(value, int | float) and not isinstance(value, bool):
            return json.loads(f"{value:.{self._digits}g}")
        return value


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


def accessed(source: str, body: str | None) -> dict[str, Any]:
    bodies = [body]  # the last one is passed on
    kong = {
        "request": {"get_raw_body": lambda: body},
        "service": {"request": {"set_raw_body": bodies.append}},
        "response": {"exit": leave},
    }
    lua.globals().kong = to_lua(kong)
    exits.clear()
    with contextlib.suppress(Exit):
        lua.execute(source)()
    return exits[0] if exits else {"passed_on": bodies[-1]}


CLIENT = {"set_timeout": lambda client, ms: None, "request_uri": request_uri}
MODULES = {"cjson.safe": Cjson().module(), "resty.http": to_lua({"new": lambda: to_lua(CLIENT)})}
lua.globals().require = MODULES.__getitem__
given = json.load(sys.stdin)
json.dump([accessed(given["access"], body) for body in given["bodies"]], sys.stdout)

"""What every answer of a server on `NeverAllows` is held to, and what it is asked of its rules.

Loaded by schemathesis, by the name of this module in SCHEMATHESIS_HOOKS.
"""

from __future__ import annotations

import zlib
from typing import Any

import schemathesis
from schemathesis.core.failures import Failure

from tests.serve.wire_requests import readings

RULES = ("always", "refused")  # of NeverAllows


@schemathesis.check
def nothing_is_allowed(ctx: Any, response: Any, case: Any) -> None:
    """No answer reads as an allow: the server's one rule is always violated, or refuses."""
    if case.method != "POST":  # a list of rules or models, which judges nothing
        return
    if "allow" in readings(case.path, response.status_code, response.text):
        raise Failure(
            operation=case.operation.label, title="A false allow", message=response.text[:500]
        )


def chosen(value: Any) -> str | None:
    """A rule in place of every other value, which alone would hardly ever name one."""
    drawn = zlib.crc32(repr(value).encode())
    return RULES[drawn % len(RULES)] if drawn & 8 else None


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    """Bodies that name a rule where the format has it in the body."""
    rule = chosen(body)
    if isinstance(body, dict) and rule is not None:
        for key, named in (("model", rule), ("rules", [rule])):
            if key in body:
                return body | {key: named}
    return body


@schemathesis.hook
def map_path_parameters(context: Any, parameters: Any) -> Any:
    rule = chosen(parameters)
    if rule is None or not parameters:
        return parameters
    return dict.fromkeys(parameters, rule)

"""The endpoint that the environment describes: the key must not be in a file or on a command line.

For the role JUDGE:

    JUDGE_BASE_URL     for example https://api.openai.com/v1
    JUDGE_MODEL        the model's name there
    JUDGE_API_KEY      sent as bearer token; not needed for a local server
    JUDGE_OPTIONS      JSON merged into every request, instead of the role's own
    JUDGE_CONCURRENCY  requests in flight (8)
    JUDGE_TIMEOUT_S    per request (60; GENERATOR 600)
    JUDGE_PRICE_IN, JUDGE_PRICE_OUT   USD per million tokens, for the cost
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from guard.errors import GuardError


def endpoint_settings(
    environment: Mapping[str, str], role: str, otherwise: str
) -> dict[str, Any] | None:
    """The arguments of an Endpoint from the variables that begin with `role` in capitals.

    None without any. `otherwise` says in an error what happens without.
    """
    prefix = role.upper()
    base_url = environment.get(f"{prefix}_BASE_URL", "").rstrip("/")
    model = environment.get(f"{prefix}_MODEL", "")
    if not base_url and not model:
        return None
    for name, value in ((f"{prefix}_BASE_URL", base_url), (f"{prefix}_MODEL", model)):
        if not value:
            raise GuardError(
                f"{name} is not set",
                remedy=f"Set {prefix}_BASE_URL and {prefix}_MODEL, or neither {otherwise}",
            )
    _check_address(base_url, prefix)
    settings: dict[str, Any] = {"base_url": base_url, "model": model, "role": role}
    for variable, (convert, remedy) in OPTIONAL.items():
        text = environment.get(f"{prefix}_{variable}", "")
        try:
            if text:
                settings[variable.lower()] = convert(text)
        except ValueError as error:
            problem = f"{prefix}_{variable} has a bad value: {error}"
            raise GuardError(problem, got=text, remedy=remedy) from error
    key_name = f"{prefix}_API_KEY"
    return settings | {"api_key": _api_key(environment.get(key_name, ""), key_name)}


def _check_address(base_url: str, prefix: str) -> None:
    if "@" in base_url:  # the address is printed, and kept in reports
        raise GuardError(
            f"{prefix}_BASE_URL holds a user name or a password",
            remedy=f"Give the key as {prefix}_API_KEY",
        )
    if not base_url.startswith(("http://", "https://")):
        raise GuardError(
            f"{prefix}_BASE_URL must be an http(s) address",
            got=base_url,
            remedy="For example https://api.openai.com/v1",
        )


def _api_key(text: str, name: str) -> str:
    """The key without the line end that a file adds; one that no header can carry is not shown."""
    key = text.strip()
    if not (key.isascii() and key.isprintable()):
        raise GuardError(
            f"{name} holds a character that no key has (a line break, or one beyond ASCII)",
            remedy="Copy the key again, on one line",
        )
    return key


def _json_object(text: str) -> dict[str, Any]:
    value = json.loads(text, parse_constant=_no_constant)
    if not isinstance(value, dict):
        raise ValueError("must be a JSON object")
    return value


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _requests(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError("must be at least 1")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise ValueError("must be more than 0, and finite")
    return value


def price(text: str) -> float:
    """Not negative, and finite. Raises ValueError."""
    value = float(text)
    if not 0 <= value < math.inf:
        raise ValueError("must be 0 or more, and finite")
    return value


# The variables that may be left out, without the role: how each is read, and a remedy.
# The Endpoint's arguments are called after them.
OPTIONAL: dict[str, tuple[Callable[[str], Any], str]] = {
    "OPTIONS": (_json_object, 'For example {"temperature": 0, "max_tokens": 512}'),
    "CONCURRENCY": (_requests, "A whole number of requests in flight, for example 8"),
    "TIMEOUT_S": (_seconds, "Seconds, for example 60"),
    "PRICE_IN": (price, "USD per million tokens, for example 0.4"),
    "PRICE_OUT": (price, "USD per million tokens, for example 1.6"),
}

"""The endpoint that the environment describes. Knows nothing of what it is asked.

Settings come from the environment, because the key must not be in a file or on a command line.
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
from dataclasses import dataclass
from typing import Any

from guard.errors import GuardError


def endpoint_settings(
    environment: Mapping[str, str], role: str, otherwise: str
) -> dict[str, Any] | None:
    """The arguments of an Endpoint from the variables that begin with `role` in capitals.

    None without any. Raises GuardError on half a description, whose remedy says what happens
    `otherwise`, or on a bad value.
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
    for option in OPTIONAL:
        if text := environment.get(f"{prefix}_{option.variable}", ""):
            settings[option.argument] = option.value(text, prefix)
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
    """The key without the line end that a file or a secret store adds.

    Raises GuardError, which does not show the key, where no header can carry it.
    """
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


@dataclass(frozen=True)
class _Option:
    """A variable that may be left out, and the Endpoint's argument that it sets."""

    variable: str  # without the role
    argument: str
    convert: Callable[[str], Any]
    remedy: str

    def value(self, text: str, prefix: str) -> Any:
        """The argument's value. Raises GuardError on a bad one."""
        try:
            return self.convert(text)
        except ValueError as error:
            raise GuardError(
                f"{prefix}_{self.variable} has a bad value: {error}", got=text, remedy=self.remedy
            ) from error


OPTIONAL = (
    _Option(
        "OPTIONS", "options", _json_object, 'For example {"temperature": 0, "max_tokens": 512}'
    ),
    _Option(
        "CONCURRENCY",
        "concurrency",
        _requests,
        "A whole number of requests in flight, for example 8",
    ),
    _Option("TIMEOUT_S", "timeout_s", _seconds, "Seconds, for example 60"),
    _Option("PRICE_IN", "price_in", price, "USD per million tokens, for example 0.4"),
    _Option("PRICE_OUT", "price_out", price, "USD per million tokens, for example 1.6"),
)

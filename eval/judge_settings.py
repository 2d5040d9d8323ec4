"""The LLM judge that the environment describes. Knows nothing of what it is asked.

Settings come from the environment, because the key must not be in a file or on a command line:

    JUDGE_BASE_URL     for example https://api.openai.com/v1
    JUDGE_MODEL        the model's name there
    JUDGE_API_KEY      sent as bearer token; not needed for a local server
    JUDGE_OPTIONS      JSON merged into every request, instead of {"temperature": 0, "max_tokens": 512}
    JUDGE_CONCURRENCY  requests in flight (8)          JUDGE_TIMEOUT_S  per request (60)
    JUDGE_PRICE_IN, JUDGE_PRICE_OUT   USD per million tokens, for the cost in the report
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from eval.judge import EndpointJudge
from guard.errors import GuardError


def judge_from(environment: Mapping[str, str]) -> EndpointJudge | None:
    """The endpoint that the JUDGE_… variables describe; None without any. Raises GuardError on half a description or a bad value."""
    base_url, model = environment.get("JUDGE_BASE_URL", ""), environment.get("JUDGE_MODEL", "")
    if not base_url and not model:
        return None
    for name, value in (("JUDGE_BASE_URL", base_url), ("JUDGE_MODEL", model)):
        if not value:
            raise GuardError(f"{name} is not set", remedy="Set JUDGE_BASE_URL and JUDGE_MODEL, or neither to judge with the base model")
    if not base_url.startswith(("http://", "https://")):
        raise GuardError("JUDGE_BASE_URL must be an http(s) address", got=base_url, remedy="For example https://api.openai.com/v1")
    given: dict[str, Any] = {}
    for name, argument, convert, remedy in (
        ("JUDGE_OPTIONS", "options", _json_object, 'For example {"temperature": 0, "max_tokens": 512}'),
        ("JUDGE_CONCURRENCY", "concurrency", _requests, "A whole number of requests in flight, for example 8"),
        ("JUDGE_TIMEOUT_S", "timeout_s", _seconds, "Seconds, for example 60"),
        ("JUDGE_PRICE_IN", "price_in", _price, "USD per million tokens, for example 0.4"),
        ("JUDGE_PRICE_OUT", "price_out", _price, "USD per million tokens, for example 1.6"),
    ):
        if text := environment.get(name, ""):
            try:
                given[argument] = convert(text)
            except ValueError as error:
                raise GuardError(f"{name} has a bad value: {error}", got=text, remedy=remedy) from error
    return EndpointJudge(base_url, model, _api_key(environment.get("JUDGE_API_KEY", "")), **given)


def _api_key(text: str) -> str:
    """The key without the line end that a file or a secret store adds. What no header can carry is refused, and not shown."""
    key = text.strip()
    if not (key.isascii() and key.isprintable()):
        raise GuardError(
            "JUDGE_API_KEY holds a character that no key has (a line break, or one beyond ASCII)", remedy="Copy the key again, on one line"
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


def _price(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise ValueError("must be 0 or more, and finite")
    return value

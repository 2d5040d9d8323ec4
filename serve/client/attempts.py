"""One check as HTTP: what is sent, what a response means, and when to try again. Knows nothing of
connections.

Only a 503 with Retry-After is tried again, after what that says: the server had no room. Whatever
else goes wrong would go wrong again, and a conversation that has just ended an engine would end the
next one: it is raised. Nothing that failed reads as "allow".
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from .answers import CheckAnswer, CheckFailed

PATH = "/v1/check"
NO_ROOM = 503
DEADLINE_S = 10.0
SHORTEST_WAIT_S = 0.3  # whatever the server says
UNREADABLE_WAIT_S = 1.0  # for a Retry-After that is not a number of seconds
LONGEST_MESSAGE = 500  # characters of a server's error that are shown
TIMEOUT_HEADER = "guard-timeout-ms"
RETRY_AFTER = "retry-after"


@dataclass(frozen=True)
class Asked:
    """What is put to a conversation: rules or a rule set; all rules where neither is named.

    `tools` are what the assistant may call, as OpenAI's requests have them; `policies` sentences
    that are judged beside the rules.
    """

    rules: Sequence[str] | None = None
    rule_set: str | None = None
    metadata: Mapping[str, str] | None = None
    cache_salt: str | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    explain: bool = False
    policies: Sequence[str] | None = None

    def body(self, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The request's body for these messages. Raises TypeError as `_listed` does."""
        body: dict[str, Any] = {"messages": _listed("messages", messages)}
        for key in ("rules", "tools", "policies"):
            if getattr(self, key) is not None:
                body[key] = _listed(key, getattr(self, key))
        for key in ("rule_set", "metadata", "cache_salt"):
            if getattr(self, key) is not None:
                body[key] = getattr(self, key)
        if self.explain:
            body["explain"] = True
        return body

    def content(self, messages: Sequence[Mapping[str, Any]]) -> bytes:
        """The body as it is sent. Raises CheckFailed for what no JSON in Unicode says."""
        body = self.body(messages)
        try:
            return json.dumps(body, ensure_ascii=False, allow_nan=False).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise CheckFailed(f"the check cannot be sent: {error!r}") from error


class Attempts:
    """The attempts at one check, which has `seconds` in all."""

    def __init__(self, seconds: float) -> None:
        self._until = time.monotonic() + seconds

    @property
    def seconds_left(self) -> float:
        """The seconds until the deadline. Raises CheckFailed once it has passed."""
        self.check_time()
        return self._until - time.monotonic()

    def check_time(self) -> None:
        """Raise CheckFailed if the deadline has passed."""
        if time.monotonic() >= self._until:
            raise CheckFailed("no verdict before the deadline", code="too_late")

    def headers(self, api_key: str | None) -> dict[str, str]:
        """The headers of the next attempt: the server too gives up at the deadline."""
        headers = {"content-type": "application/json"}
        headers[TIMEOUT_HEADER] = str(max(1, round(self.seconds_left * 1000)))
        if api_key is not None:
            headers["authorization"] = f"Bearer {api_key}"
        return headers

    def received(self, receiving: httpx.Response) -> httpx.Response:
        """The whole of a response that is still coming in. Raises CheckFailed at the deadline."""
        content = b""
        for piece in receiving.iter_bytes():  # decompressed, so without the headers that say how
            content += piece
            self.check_time()
        retry_after = receiving.headers.get(RETRY_AFTER, "")
        headers = {RETRY_AFTER: retry_after}
        return httpx.Response(receiving.status_code, headers=headers, content=content)

    def answer(self, response: httpx.Response) -> CheckAnswer | float:
        """The answer, or the seconds after which to try again. Raises CheckFailed for any other
        response.
        """
        if response.status_code == NO_ROOM:
            return self._wait(response)
        return CheckAnswer.of(_decoded(response))

    def _wait(self, response: httpx.Response) -> float:
        stated = response.headers.get(RETRY_AFTER, "")
        seconds = UNREADABLE_WAIT_S
        if stated.isdecimal():
            seconds = max(SHORTEST_WAIT_S, float(stated))
        if not stated or seconds >= self.seconds_left:
            raise _failure(response)
        return seconds


def _listed(name: str, values: Sequence[Any]) -> list[Any]:
    """The values as a list. Raises TypeError for a single one, whose letters or keys Python would
    take for several.
    """
    if isinstance(values, str | bytes | Mapping):
        shown = repr(values)[:60]
        raise TypeError(f"{name} must be a list, got {shown}; write [{shown}] for a single one")
    return list(values)


def unreachable(url: str, error: httpx.HTTPError | TimeoutError) -> CheckFailed:
    """The error for a connection to `url` that failed."""
    return CheckFailed(f"no response from {url}: {error!r}")


def _decoded(response: httpx.Response) -> Any:
    """The JSON of an answer. Raises CheckFailed for any other response."""
    if response.status_code != httpx.codes.OK:
        raise _failure(response)
    try:
        return response.json()
    except (ValueError, RecursionError) as error:
        raise CheckFailed("the response is not JSON", response.status_code) from error


def _failure(response: httpx.Response) -> CheckFailed:
    """The error that a response without verdicts means."""
    message = f"HTTP {response.status_code}: {response.text[:LONGEST_MESSAGE]}"
    code = ""
    with contextlib.suppress(ValueError, RecursionError, AttributeError):  # no JSON object
        code = str(response.json().get("code", ""))
    return CheckFailed(message, response.status_code, code)

"""Any OpenAI-compatible chat endpoint: one question, tried again until there is an answer.

An endpoint that is too slow is asked MAX_TIMEOUTS times, since it may charge for each; the package
openai would ask again and again. The environment describes an endpoint, as the key must not be in a
file or on a command line. For the role JUDGE:

    JUDGE_BASE_URL     for example https://api.openai.com/v1
    JUDGE_MODEL        the model's name there
    JUDGE_API_KEY      sent as bearer token; not needed for a local server
    JUDGE_OPTIONS      JSON merged into every request, instead of the role's own
    JUDGE_CONCURRENCY  requests in flight (8)
    JUDGE_TIMEOUT_S    per request (60; GENERATOR 600)
    JUDGE_PRICE_IN, JUDGE_PRICE_OUT   USD per million tokens, for the cost
"""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import json
import math
import random
import time
from argparse import ArgumentTypeError
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx

from guard.arguments import count, seconds
from guard.errors import GuardError

ATTEMPTS = 8
# Attempts without an answer in time: the endpoint may have written one, and may charge for it.
MAX_TIMEOUTS = 2
MAX_WAIT_S = 300.0
TRANSIENT = (408, 409, 429)  # these and all from 500 are worth another attempt
# Errors of key, credit, address or model: every text would be refused. A 403 may be of one text.
MISCONFIGURED = (401, 402, 404)
# OpenAI's codes, with status 429 and 400: waiting does not help.
UNPAID = ("insufficient_quota", "billing_hard_limit_reached")
KEPT = "all answers so far are kept, run the same command again to go on"
SHOWN = 400  # characters of what went wrong, the endpoint's own message included

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Completion:
    """The endpoint's answer, as it came. Token counts and finish reason are None if not reported.

    `refused`: it will not take this text (too long, flagged), and `text` is its message, shortened.
    """

    text: str
    prompt_tokens: int | None
    completion_tokens: int | None
    latency_ms: float  # of the attempt that succeeded
    finish_reason: str | None = None
    refused: bool = False


@dataclass(frozen=True)
class FailedAttempt:
    """An attempt without an answer after which another one is worth while."""

    problem: str
    is_timeout: bool = False
    retry_after_s: float | None = None  # how long the endpoint asks to wait, if it says so


@dataclass(frozen=True)
class Endpoint:
    """Where to ask, and how. `backoff_s` is the first wait and doubles. `role` names the endpoint
    in errors, and in capitals in its settings.
    """

    base_url: str
    model: str
    api_key: str = field(default="", repr=False)
    options: Mapping[str, Any] = field(
        default_factory=lambda: {"temperature": 0, "max_tokens": 512}
    )
    concurrency: int = 8
    timeout_s: float = 60.0
    price_in: float | None = None
    price_out: float | None = None
    backoff_s: float = 0.5
    role: str = "judge"

    @property
    def identity(self) -> list[Any]:
        """All that its answers depend on besides the question, and its prices."""
        return [self.base_url, self.model, dict(self.options), self.price_in, self.price_out]

    @property
    def url(self) -> str:
        return f"{self.base_url.rstrip('/')}/chat/completions"

    def body(self, messages: Sequence[Mapping[str, str]]) -> dict[str, Any]:
        return {"model": self.model, "messages": list(messages), **self.options}

    def cost_usd(self, prompt_tokens: int, completion_tokens: int) -> float | None:
        if self.price_in is None or self.price_out is None:
            return None
        return (prompt_tokens * self.price_in + completion_tokens * self.price_out) / 1e6

    def client(self) -> httpx.AsyncClient:
        headers = {}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        limits = httpx.Limits(max_connections=self.concurrency)
        return httpx.AsyncClient(headers=headers, timeout=self.timeout_s, limits=limits)

    async def complete(
        self, client: httpx.AsyncClient, messages: Sequence[Mapping[str, str]], about: str
    ) -> Completion:
        """The answer to one question, or its refusal; `about` names its subject in errors. Raises
        GuardError when the endpoint refuses key or model, or keeps failing.
        """
        request = self.body(messages)
        name = self.role.upper()
        attempt, timeouts = 0, 0
        while True:
            attempt += 1
            outcome = await self._attempt(client, request, about)
            if isinstance(outcome, Completion):
                return outcome
            timeouts += outcome.is_timeout
            if timeouts == MAX_TIMEOUTS:
                problem = f"gave no answer about {about} in {self.timeout_s:g} s, {timeouts} times"
                raise self._error(problem, f"Raise {name}_TIMEOUT_S; {KEPT}")
            if attempt == ATTEMPTS:
                remedy = f"Lower {name}_CONCURRENCY; {KEPT}"
                raise self._error(f"failed {attempt} times on {about}", remedy, outcome.problem)
            backoff_s = self.backoff_s * 2 ** (attempt - 1) * random.uniform(0.75, 1.25)
            await asyncio.sleep(min(outcome.retry_after_s or backoff_s, MAX_WAIT_S))

    def shown(self, text: str) -> str:
        """One line of `text`, shortened, without the key in any notation, the longest first."""
        key = self.api_key
        notations = {key, repr(key)[1:-1], json.dumps(key)[1:-1], key.strip()} - {""}
        for notation in sorted(notations, key=len, reverse=True):
            text = text.replace(notation, "[key]")
        return " ".join(text.split())[:SHOWN]

    async def _attempt(
        self, client: httpx.AsyncClient, request: Mapping[str, Any], about: str
    ) -> Completion | FailedAttempt:
        """Send the request once. Raises GuardError where another attempt would change nothing."""
        began = time.perf_counter()
        try:
            response = await client.post(self.url, json=request)
        except (httpx.LocalProtocolError, httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
            # Nothing was sent, nor ever will be.
            raise self._cannot_ask(about, f"{type(error).__name__} {error}") from None
        except httpx.RequestError as error:  # timeouts, lost connections, undecodable answers
            problem = f"{type(error).__name__} {error}".strip()
            return FailedAttempt(problem, is_timeout=isinstance(error, httpx.ReadTimeout))
        return self._outcome(response, (time.perf_counter() - began) * 1000, about)

    def _outcome(
        self, response: httpx.Response, latency_ms: float, about: str
    ) -> Completion | FailedAttempt:
        """What a response means. Raises GuardError if it is about key, credit, address or model."""
        status = response.status_code
        message = f"HTTP {status}: {response.text}"
        if status == 200:
            try:
                return read_completion(response.json(), latency_ms)
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
                return FailedAttempt(f"not a chat completion: {error!r}: {response.text}")
        if status < 400 or status in MISCONFIGURED or any(code in message for code in UNPAID):
            raise self._cannot_ask(about, message)
        if status in TRANSIENT or status >= 500:
            return FailedAttempt(message, retry_after_s=_retry_after_s(response))
        return Completion(self.shown(message), None, None, latency_ms, refused=True)

    def _cannot_ask(self, about: str, message: str) -> GuardError:
        name = self.role.upper()
        variables = f"{name}_BASE_URL, {name}_MODEL, {name}_API_KEY"
        remedy = f"Check {variables} and the account's credit; {KEPT}"
        return self._error(f"cannot be asked about {about}", remedy, message)

    def _error(self, problem: str, remedy: str, message: str = "") -> GuardError:
        problem = f"the {self.role}'s endpoint {problem}"
        got = self.shown(message) or None
        return GuardError(problem, where=self.url, got=got, remedy=remedy)


def read_completion(completion: Any, latency_ms: float) -> Completion:
    """A chat completion's answer; LookupError, TypeError or AttributeError where it is none."""
    choice = completion["choices"][0]
    text = choice["message"].get("content")
    if not isinstance(text, str | None):
        raise TypeError(f"the content is {type(text).__name__}, not text")
    finish_reason = choice.get("finish_reason")
    usage = completion.get("usage")
    return Completion(
        # No content is an answer too: the model refused, or spent all its tokens on reasoning.
        text=text or "",
        prompt_tokens=_count(usage, "prompt_tokens"),
        completion_tokens=_count(usage, "completion_tokens"),
        latency_ms=latency_ms,
        finish_reason=finish_reason if isinstance(finish_reason, str) else None,
    )


def _count(usage: Any, name: str) -> int | None:
    if not isinstance(usage, dict):
        return None
    tokens = usage.get(name)
    if type(tokens) is not int or tokens < 0:
        return None
    return tokens


def _retry_after_s(response: httpx.Response) -> float | None:
    """The Retry-After header in seconds; it may also be a date (RFC 9110)."""
    value = response.headers.get("retry-after", "")
    with contextlib.suppress(ValueError, OverflowError):  # neither, or of a year that is none
        if "GMT" not in value:
            return max(0.0, float(value))
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    return None


async def finished(paying: asyncio.Task[Answer], timeout_s: float) -> Answer:
    """The answer that is being paid for. Where whoever waits is cancelled, it is waited for first,
    for `timeout_s` at most: it costs the same either way.
    """
    try:
        return await asyncio.shield(paying)
    except asyncio.CancelledError:
        done, _ = await asyncio.wait([paying], timeout=timeout_s)
        if not done:
            paying.cancel()
        elif not paying.cancelled():
            paying.exception()
        raise


def endpoint_settings(
    environment: Mapping[str, str], role: str, otherwise: str
) -> dict[str, Any] | None:
    """The arguments of an Endpoint by the variables of `role`, or None, and then `otherwise`."""
    prefix = role.upper()
    base_url = environment.get(f"{prefix}_BASE_URL", "").rstrip("/")
    model = environment.get(f"{prefix}_MODEL", "")
    if not base_url and not model:
        return None
    if not base_url or not model:
        missing = "BASE_URL" if model else "MODEL"
        remedy = f"Set {prefix}_BASE_URL and {prefix}_MODEL, or neither {otherwise}"
        raise GuardError(f"{prefix}_{missing} is not set", remedy=remedy)
    _check_address(base_url, prefix)
    settings: dict[str, Any] = {"base_url": base_url, "model": model, "role": role}
    settings["api_key"] = _api_key(environment, f"{prefix}_API_KEY")
    for name, (convert, remedy) in OPTIONAL.items():
        value = setting(environment, f"{prefix}_{name}", convert, remedy)
        if value is not None:
            settings[name.lower()] = value
    return settings


def setting(
    environment: Mapping[str, str], name: str, convert: Callable[[str], Answer], remedy: str
) -> Answer | None:
    text = environment.get(name)
    if not text:
        return None
    try:
        return convert(text.strip())
    except (ValueError, ArgumentTypeError) as error:
        raise GuardError(f"{name} has a bad value: {error}", got=text, remedy=remedy) from error


def _check_address(base_url: str, prefix: str) -> None:
    if "@" in base_url:  # the address is printed, and kept in reports
        problem = f"{prefix}_BASE_URL holds a user name or a password"
        raise GuardError(problem, remedy=f"Give the key as {prefix}_API_KEY")
    if not base_url.startswith(("http://", "https://")):
        problem = f"{prefix}_BASE_URL must be an http(s) address"
        raise GuardError(problem, got=base_url, remedy="For example https://api.openai.com/v1")


def _api_key(environment: Mapping[str, str], name: str) -> str:
    """The key without the line end that a file adds; one that no header can carry is not shown."""
    key = environment.get(name, "").strip()
    if not (key.isascii() and key.isprintable()):
        problem = f"{name} holds a character that no key has (a line break, or one beyond ASCII)"
        raise GuardError(problem, remedy="Copy the key again, on one line")
    return key


def _json_object(text: str) -> dict[str, Any]:
    value = json.loads(text, parse_constant=_no_constant)
    if not isinstance(value, dict):
        raise ValueError("must be a JSON object")
    return value


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def price(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise ValueError("must be 0 or more, and finite")
    return value


# The variables that may be left out, without the role: how each is read, and a remedy.
# The Endpoint's arguments are called after them.
OPTIONAL: dict[str, tuple[Callable[[str], Any], str]] = {
    "OPTIONS": (_json_object, 'For example {"temperature": 0, "max_tokens": 512}'),
    "CONCURRENCY": (count, "A whole number of requests in flight, for example 8"),
    "TIMEOUT_S": (seconds, "Seconds, for example 60"),
    "PRICE_IN": (price, "USD per million tokens, for example 0.4"),
    "PRICE_OUT": (price, "USD per million tokens, for example 1.6"),
}

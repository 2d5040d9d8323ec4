"""Any OpenAI-compatible chat endpoint: one question, retried until there is an answer. Knows nothing of what is asked."""

from __future__ import annotations

import asyncio
import email.utils
import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from guard.errors import GuardError

ATTEMPTS = 8
SLOW_ATTEMPTS = (
    2  # that got no answer in time: the endpoint may have written one, and may want to be paid
)
MAX_WAIT_S = 300.0
PASSING = (408, 409, 429)  # and all from 500: worth another attempt
OURS = (
    401,
    402,
    404,
)  # key, credit, address or model: nothing else would be taken either; 403 may be one flagged text
UNPAID = (
    "insufficient_quota",
    "billing_hard_limit_reached",
)  # OpenAI's codes, with status 429 and 400: waiting does not help
SHOWN = 400  # characters of what went wrong, what the endpoint said included


@dataclass(frozen=True)
class Completion:
    """What the endpoint said, as it came. Token counts and the finish reason are None where it reports none.

    `refused`: it will not take this text (too long, flagged), and `text` is what it said, shortened.
    """

    text: str
    prompt_tokens: int | None
    completion_tokens: int | None
    latency_ms: float  # of the attempt that succeeded
    finish_reason: str | None = None
    refused: bool = False


@dataclass(frozen=True)
class Endpoint:
    """Where to ask, and how. `backoff_s` is the first wait and doubles. `role` names it in errors, in capitals in its settings."""

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
        """What its answers depend on besides the question, and what is derived from its prices."""
        return [self.base_url, self.model, dict(self.options), self.price_in, self.price_out]

    @property
    def url(self) -> str:
        """Where chat completions are."""
        return f"{self.base_url.rstrip('/')}/chat/completions"

    def body(self, messages: Sequence[Mapping[str, str]]) -> dict[str, Any]:
        """The request that asks `messages`."""
        return {"model": self.model, "messages": list(messages), **self.options}

    def cost_usd(self, prompt_tokens: int, completion_tokens: int) -> float | None:
        """What these tokens cost; None without prices."""
        if self.price_in is None or self.price_out is None:
            return None
        return (prompt_tokens * self.price_in + completion_tokens * self.price_out) / 1e6

    def client(self) -> httpx.AsyncClient:
        """The connections that questions go through."""
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return httpx.AsyncClient(
            headers=headers,
            timeout=self.timeout_s,
            limits=httpx.Limits(max_connections=self.concurrency),
        )

    async def complete(
        self, client: httpx.AsyncClient, messages: Sequence[Mapping[str, str]], about: str
    ) -> Completion:
        """The answer to one question `about` something. What the endpoint will not take comes back as refused.

        Raises GuardError when it refuses key or model, or keeps failing.
        """
        body = self.body(messages)
        problem, slow = "", 0
        for attempt in range(ATTEMPTS):
            wait_s = self.backoff_s * 2**attempt * random.uniform(0.75, 1.25)
            began = time.perf_counter()
            try:
                response = await client.post(self.url, json=body)
            except (
                httpx.LocalProtocolError,
                httpx.UnsupportedProtocol,
                httpx.InvalidURL,
            ) as error:  # nothing was sent, nor ever will be
                raise self._cannot_ask(about, f"{type(error).__name__} {error}") from None
            except (
                httpx.RequestError
            ) as error:  # timeouts, lost connections, answers that cannot be decoded
                problem = f"{type(error).__name__} {error}".strip()
                slow += isinstance(error, httpx.ReadTimeout)
                if slow == SLOW_ATTEMPTS:
                    raise GuardError(
                        f"the {self.role}'s endpoint gave no answer about {about} in {self.timeout_s:g} s, {slow} times",
                        where=self.url,
                        remedy=f"Raise {self.role.upper()}_TIMEOUT_S; all answers so far are kept, run the same command again to go on",
                    ) from None
            else:
                latency_ms = (time.perf_counter() - began) * 1000
                status, said = response.status_code, f"HTTP {response.status_code}: {response.text}"
                if status == 200:
                    try:
                        return read_completion(response.json(), latency_ms)
                    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
                        problem = f"not a chat completion: {error!r}: {response.text}"
                elif status < 400 or status in OURS or any(code in said for code in UNPAID):
                    raise self._cannot_ask(about, said)
                elif status in PASSING or status >= 500:
                    problem = said
                    wait_s = _retry_after_s(response) or wait_s
                else:
                    return Completion(self.shown(said), None, None, latency_ms, refused=True)
            if attempt + 1 < ATTEMPTS:
                await asyncio.sleep(min(wait_s, MAX_WAIT_S))
        raise GuardError(
            f"the {self.role}'s endpoint failed {ATTEMPTS} times on {about}",
            where=self.url,
            got=self.shown(problem),
            remedy=f"All answers so far are kept; run the same command again to go on, or lower {self.role.upper()}_CONCURRENCY",
        )

    def _cannot_ask(self, about: str, said: str) -> GuardError:
        name = self.role.upper()
        return GuardError(
            f"the {self.role}'s endpoint cannot be asked about {about}",
            where=self.url,
            got=self.shown(said),
            remedy=f"Check {name}_BASE_URL, {name}_MODEL, {name}_API_KEY and the account's credit; all answers so far are kept",
        )

    def shown(self, text: str) -> str:
        """One line of `text`, shortened, without the key in whatever notation."""
        if self.api_key:
            notations = {
                self.api_key,
                repr(self.api_key)[1:-1],
                json.dumps(self.api_key)[1:-1],
                self.api_key.strip(),
            } - {""}
            for notation in sorted(notations, key=len, reverse=True):
                text = text.replace(notation, "[key]")
        return " ".join(text.split())[:SHOWN]


def read_completion(completion: Any, latency_ms: float) -> Completion:
    """What a chat completion says. Raises KeyError, IndexError or TypeError where it is none."""
    choice = completion["choices"][0]
    text, finish_reason = choice["message"]["content"], choice.get("finish_reason")
    if not isinstance(text, str | None):
        raise TypeError(f"the content is {type(text).__name__}, not text")
    usage = completion.get("usage")
    prompt_tokens, completion_tokens = (
        _count(usage, "prompt_tokens"),
        _count(usage, "completion_tokens"),
    )
    # a null content is an answer too: the model refused, or spent all its tokens on reasoning
    finish_reason = finish_reason if isinstance(finish_reason, str) else None
    return Completion(text or "", prompt_tokens, completion_tokens, latency_ms, finish_reason)


def _count(usage: Any, name: str) -> int | None:
    """A token count, None where there is none or it is not one."""
    value = usage.get(name) if isinstance(usage, dict) else None
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _retry_after_s(response: httpx.Response) -> float | None:
    """The Retry-After header in seconds; it may also be a date (RFC 9110, section 10.2.3)."""
    value = response.headers.get("retry-after", "")
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return None

"""An endpoint whose answers are paid for: kept as they come, counted, within a budget."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx

from data.debate.prompts import Chat
from data.llm_reply import Filled, filled, words
from guard.endpoint import Completion, Endpoint, finished
from guard.errors import GuardError
from guard.files.answer_file import AnswerFile
from guard.layout import fingerprint

Read = TypeVar("Read")

TRIES = 3  # for an answer in the form that was asked for
REFUSALS = 8  # in a row: then the cause is not in the texts


@dataclass(frozen=True, kw_only=True)
class PaidAnswer(Completion):
    """One answer, and what it was for."""

    key: str
    about: str


@dataclass
class Statistics:
    """The outcomes of the cases, and their cost."""

    outcomes: Counter[str] = field(default_factory=Counter)  # accepted, or why dropped
    votes_against: Counter[str] = field(default_factory=Counter)  # by judge
    malformed: int = 0
    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost_usd: float | None = None

    def as_json(self) -> dict[str, Any]:
        return {
            **vars(self),
            "outcomes": dict(sorted(self.outcomes.items())),
            "votes_against": dict(self.votes_against),
        }

    def in_words(self) -> str:
        if self.cost_usd is None:
            return f"{self.calls} answers"
        return f"{self.calls} answers, {self.cost_usd:.2f} USD"


class Refused(Exception):
    """The endpoint will not take a text; it says why."""


class PaidEndpoint:
    """The endpoint with its memory: what was answered once is never asked again.

    A refusal is remembered once something else has been answered: else it was the key or the
    account that was refused.
    """

    def __init__(self, endpoint: Endpoint, answers_file: Path, budget_usd: float | None) -> None:
        if budget_usd is not None and endpoint.cost_usd(0, 0) is None:
            remedy = "Set GENERATOR_PRICE_IN and GENERATOR_PRICE_OUT too, USD per million tokens"
            raise GuardError(
                "a budget needs prices", got=f"GENERATOR_BUDGET_USD={budget_usd:g}", remedy=remedy
            )
        self.endpoint, self.answers_file, self.budget_usd = endpoint, answers_file, budget_usd
        self.statistics = Statistics(cost_usd=endpoint.cost_usd(0, 0))
        self._file = AnswerFile(answers_file, PaidAnswer)
        self._open = contextlib.ExitStack()
        self._spent_usd = 0.0
        self._in_flight = asyncio.Semaphore(endpoint.concurrency)
        self._refused: list[PaidAnswer] = []  # in a row
        self._counted: set[str] = set()

    async def __aenter__(self) -> PaidEndpoint:
        """Open the connections. Raises GuardError if another command is paying for the same."""
        self._open.enter_context(self._file.held())
        self._spent_usd = sum(self._cost(answer) for answer in self._file.rows())
        self._client: httpx.AsyncClient = self.endpoint.client()
        return self

    async def __aexit__(self, *_: object) -> None:
        with self._open:
            await self._client.aclose()

    async def answer(self, form: type[Filled], messages: Chat, about: str) -> Filled | None:
        """The answer in its form; None where none of TRIES keeps to it. Raises Refused."""
        return await self._in_form(lambda reply: filled(reply, form, about), messages, about)

    async def text(self, messages: Chat, about: str) -> str | None:
        """The answer as free text; None where none of TRIES comes to an end. Raises Refused."""
        return await self._in_form(words, messages, about)

    async def _in_form(
        self, read: Callable[[Completion], Read], messages: Chat, about: str
    ) -> Read | None:
        for attempt in range(TRIES):
            completion = await self._completion(messages, f"{about}/{attempt}")
            try:
                return read(completion)
            except (ValueError, RecursionError, GuardError):
                self.statistics.malformed += 1
        return None

    async def _completion(self, messages: Chat, about: str) -> PaidAnswer:
        """The answer from memory, else from the endpoint. Raises Refused."""
        key = fingerprint(self.endpoint.base_url, self.endpoint.body(messages), about)
        answer = self._file.get(key)
        if answer is None:
            async with self._in_flight:
                self._stay_within_budget()
                paying = asyncio.create_task(self._pay(messages, about, key))
                answer = await finished(paying, self.endpoint.timeout_s)
        self._count(answer)
        if answer.refused:
            raise Refused(answer.text)
        return answer

    async def _pay(self, messages: Chat, about: str, key: str) -> PaidAnswer:
        completion = await self.endpoint.complete(self._client, messages, about)
        answer = PaidAnswer(key=key, about=about, **vars(completion))
        self._refused.append(answer)
        if not answer.refused:
            self._file.add(self._refused)  # the refusals before it were of texts
            self._refused.clear()
            self._require_usage(answer)
        elif len(self._refused) >= REFUSALS:
            raise GuardError(
                f"the generator's endpoint refused {REFUSALS} requests in a row",
                where=self.endpoint.url,
                got=answer.text,
                remedy="Check GENERATOR_BASE_URL, GENERATOR_MODEL, GENERATOR_API_KEY and "
                "GENERATOR_OPTIONS; all answers so far are kept",
            )
        self._spent_usd += self._cost(answer)
        return answer

    def _require_usage(self, answer: PaidAnswer) -> None:
        """Raise GuardError if a budget has to be kept and an answer does not say what it took."""
        if self.budget_usd is None:
            return
        if answer.prompt_tokens is None or answer.completion_tokens is None:
            raise GuardError(
                "a budget needs the token counts that this endpoint does not report",
                where=self.endpoint.url,
                remedy="Unset GENERATOR_BUDGET_USD, or take an endpoint that reports its usage",
            )

    def _cost(self, answer: PaidAnswer) -> float:
        """0.0 without prices."""
        cost = self.endpoint.cost_usd(answer.prompt_tokens or 0, answer.completion_tokens or 0)
        return cost or 0.0

    def _count(self, answer: PaidAnswer) -> None:
        """Add an answer to the statistics, once."""
        if answer.key in self._counted:
            return
        self._counted.add(answer.key)
        statistics = self.statistics
        statistics.calls += 1
        statistics.prompt_tokens += answer.prompt_tokens or 0
        statistics.completion_tokens += answer.completion_tokens or 0
        statistics.cost_usd = self.endpoint.cost_usd(
            statistics.prompt_tokens, statistics.completion_tokens
        )

    def _stay_within_budget(self) -> None:
        if self.budget_usd is not None and self._spent_usd >= self.budget_usd:
            raise GuardError(
                "the budget is spent; everything so far is kept",
                got=f"{self._spent_usd:.2f} of {self.budget_usd:g} USD",
                remedy="Raise GENERATOR_BUDGET_USD and run the same command again, or ask for "
                "fewer examples",
            )

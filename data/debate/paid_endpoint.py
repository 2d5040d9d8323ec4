"""Who writes and debates a rule's data, from the environment: an endpoint whose answers are paid
for. They are kept as they come, counted, and stay within a budget.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from data.debate.prompts import Chat
from data.debate.reply import WRITING, Filled, filled, words
from data.ingest import conversation
from data.rows import BadRow, read_rows
from guard.conversation.example import Message
from guard.endpoint import Completion, Endpoint, endpoint_settings, finished, price, setting
from guard.errors import GuardError
from guard.files.answer_file import AnswerFile
from guard.home import own_or_shipped
from guard.layout import fingerprint
from guard.rule import EDIT, RULES, Rule, in_words

Read = TypeVar("Read")

UNLABELLED = 30  # conversations from which the policy's dimensions are found (BARRED: 10 to 30)
FEWEST_EXAMPLES = 40  # a tenth are for validation, and training needs two of either label there
EXAMPLES = 1000
TRIES = 3  # for an answer in the form that was asked for
REFUSALS = 8  # in a row: then the cause is not in the texts
NOT_JUDGED = "not judged in form"  # an outcome of a case


@dataclass(frozen=True)
class Writers:
    """The endpoint, how many rows it writes, and the unlabelled conversations it sees."""

    endpoint: Endpoint
    wanted: int
    unlabelled: str = ""
    seeds: tuple[tuple[Message, ...], ...] = ()
    budget_usd: float | None = None

    def inputs(self) -> list[Any]:
        """All that the data depend on besides the rule, but not what they may cost."""
        seeds = []
        for messages in self.seeds:
            seeds.append([[message.role, message.content] for message in messages])
        return [self.endpoint.identity[:3], self.wanted, seeds]


def writers_for(
    rule: Rule, earlier: Mapping[str, Any], examples: int | None, unlabelled: str | None
) -> Writers:
    """The writers as named, else as in the `earlier` manifest. Raises GuardError."""
    settings = endpoint_settings(os.environ, "generator", "for data of another source")
    if settings is None:
        remedy = "Set GENERATOR_BASE_URL, GENERATOR_MODEL and, if it needs one, GENERATOR_API_KEY: "
        remedy += "any OpenAI-compatible endpoint"
        raise GuardError("no endpoint is described that could write examples", remedy=remedy)
    if EDIT in in_words(rule):
        problem = f"the rule still says {EDIT}"
        remedy = "Write there what violates it and what it allows"
        raise GuardError(problem, where=own_or_shipped(RULES / f"{rule.id}.yaml"), remedy=remedy)
    file = unlabelled or earlier.get("unlabelled", "")
    return Writers(
        endpoint=Endpoint(**WRITING | settings),
        wanted=examples or max(FEWEST_EXAMPLES, earlier.get("examples", EXAMPLES)),
        unlabelled=file,
        seeds=tuple(_conversations(file, rule)) if file else (),
        budget_usd=setting(os.environ, "GENERATOR_BUDGET_USD", price, "USD, for example 5"),
    )


def _conversations(unlabelled: str, rule: Rule) -> Iterator[tuple[Message, ...]]:
    remedy = "One conversation a row, as for DATA="
    where = ""
    for row in itertools.islice(read_rows(unlabelled), UNLABELLED):
        where = row.where
        try:
            if row.problem:
                raise BadRow(row.problem)
            yield conversation(row.fields, rule)
        except GuardError as error:
            raise GuardError(f"no conversation: {error}", where=where, remedy=remedy) from error
    if not where:
        raise GuardError("no conversations", where=unlabelled, remedy=remedy)


@dataclass(frozen=True, kw_only=True)
class PaidAnswer(Completion):
    """One answer, and what it was for."""

    key: str
    about: str


@dataclass
class Statistics:
    """The outcomes of the cases, and their cost."""

    outcomes: Counter[str] = field(default_factory=Counter)  # accepted, or why dropped
    malformed: int = 0
    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost_usd: float | None = None

    def as_json(self) -> dict[str, Any]:
        return vars(self) | {"outcomes": dict(sorted(self.outcomes.items()))}


class Refused(Exception):
    """The endpoint will not take a text; it says why."""


class OutOfForm(Exception):
    """An answer that is needed never came in its form."""


class PaidEndpoint:
    """The endpoint with its memory: what was answered once is never asked again.

    A refusal is remembered once something else has been answered: else it was the key or the
    account that was refused.
    """

    def __init__(self, writers: Writers, answers_file: Path) -> None:
        endpoint, budget_usd = writers.endpoint, writers.budget_usd
        if budget_usd is not None and endpoint.cost_usd(0, 0) is None:
            got = f"GENERATOR_BUDGET_USD={budget_usd:g}"
            remedy = "Set GENERATOR_PRICE_IN and GENERATOR_PRICE_OUT too, USD per million tokens"
            raise GuardError("a budget needs prices", got=got, remedy=remedy)
        self.endpoint, self.answers_file, self.budget_usd = endpoint, answers_file, budget_usd
        self.statistics = Statistics(cost_usd=endpoint.cost_usd(0, 0))
        self._file = AnswerFile(answers_file, PaidAnswer)
        self._spent_usd = 0.0
        self._in_flight = asyncio.Semaphore(endpoint.concurrency)
        self._refused: list[PaidAnswer] = []  # in a row
        self._counted: set[str] = set()

    @contextlib.asynccontextmanager
    async def connected(self) -> AsyncIterator[None]:
        """Raises GuardError if another command is paying for the same."""
        with self._file.held():
            self._spent_usd = sum(self._cost(answer) for answer in self._file.rows())
            async with self.endpoint.client() as self._client:
                yield

    async def answer(
        self, form: type[Filled], messages: Chat, about: str, out_of_form: str = NOT_JUDGED
    ) -> Filled:
        """The answer in its form. Raises Refused, and OutOfForm where none of TRIES keeps to it."""
        read = functools.partial(filled, form=form, where=about)
        return await self._in_form(read, messages, about, out_of_form)

    async def text(self, messages: Chat, about: str) -> str:
        """The answer as free text. Raises as `answer`, where none of TRIES comes to an end."""
        return await self._in_form(words, messages, about, NOT_JUDGED)

    async def _in_form(
        self, read: Callable[[Completion], Read], messages: Chat, about: str, out_of_form: str
    ) -> Read:
        for attempt in range(TRIES):
            completion = await self._completion(messages, f"{about}/{attempt}")
            try:
                return read(completion)
            except (ValueError, RecursionError, GuardError):
                self.statistics.malformed += 1
        raise OutOfForm(out_of_form)

    async def _completion(self, messages: Chat, about: str) -> PaidAnswer:
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
            problem = f"the generator's endpoint refused {REFUSALS} requests in a row"
            remedy = "Check GENERATOR_BASE_URL, GENERATOR_MODEL, GENERATOR_API_KEY and "
            remedy += "GENERATOR_OPTIONS; all answers so far are kept"
            raise GuardError(problem, where=self.endpoint.url, got=answer.text, remedy=remedy)
        self._spent_usd += self._cost(answer)
        return answer

    def _require_usage(self, answer: PaidAnswer) -> None:
        """Raise GuardError if a budget has to be kept and an answer does not say what it took."""
        if self.budget_usd is not None and None in (answer.prompt_tokens, answer.completion_tokens):
            problem = "a budget needs the token counts that this endpoint does not report"
            remedy = "Unset GENERATOR_BUDGET_USD, or take an endpoint that reports its usage"
            raise GuardError(problem, where=self.endpoint.url, remedy=remedy)

    def _cost(self, answer: PaidAnswer) -> float:
        """0.0 without prices."""
        cost = self.endpoint.cost_usd(answer.prompt_tokens or 0, answer.completion_tokens or 0)
        return cost or 0.0

    def _count(self, answer: PaidAnswer) -> None:
        if answer.key in self._counted:
            return
        self._counted.add(answer.key)
        statistics = self.statistics
        statistics.calls += 1
        statistics.prompt_tokens += answer.prompt_tokens or 0
        statistics.completion_tokens += answer.completion_tokens or 0
        tokens = (statistics.prompt_tokens, statistics.completion_tokens)
        statistics.cost_usd = self.endpoint.cost_usd(*tokens)

    def _stay_within_budget(self) -> None:
        if self.budget_usd is not None and self._spent_usd >= self.budget_usd:
            problem = "the budget is spent; everything so far is kept"
            got = f"{self._spent_usd:.2f} of {self.budget_usd:g} USD"
            remedy = "Raise GENERATOR_BUDGET_USD and run the same command again, or ask for fewer "
            remedy += "examples"
            raise GuardError(problem, got=got, remedy=remedy)

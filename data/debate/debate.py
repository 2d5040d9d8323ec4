"""Labelled conversations from a policy by an LLM that argues with itself (BARRED, arXiv 2604.25203). Knows nothing of files' formats.

The policy is decomposed into dimensions, with the help of some unlabelled conversations. For a sampled dimension, value and label a
boundary case is written with its reasoning; an advocate who does not give way defends the label before two judges, one who would rather
flag too much and one who would rather flag too little. If both agree with the label in one of ROUNDS rounds the case is kept, else it
is written again with their dissent, at most REFINEMENTS times, then dropped.

Everything follows from answers that are kept as they come, keyed by what was asked and for which case. So a run that was killed goes on
without asking anything again, and ends with what it would have ended with.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import httpx
from pydantic import Field
from tqdm import tqdm

from data.debate import prompts as prompts
from data.llm_reply import Filled, Form, filled, words
from data.splits import assign, labels_missing
from guard.endpoint.client import Completion, Endpoint
from guard.errors import GuardError
from guard.example import Example, Message
from guard.files.answer_file import AnswerFile
from guard.layout import fingerprint
from guard.rule import Rule

ROUNDS = 2
REFINEMENTS = 2
TRIES = 3  # for an answer in the form that was asked for
SAMPLED = 3  # cases that are tried at most for each one wanted
REFUSALS = 8  # in a row: then it is not the texts that are refused
JUDGES: tuple[prompts.Leaning, ...] = ("recall", "precision")


class Dimension(Form):
    """A way in which cases of the policy differ, and what it may be."""

    name: str = Field(min_length=1)
    values: tuple[str, ...] = Field(min_length=2)


class Dimensions(Form):
    """The answer to the decomposition."""

    dimensions: tuple[Dimension, ...] = Field(min_length=2)


class Turn(Form):
    """One message of a draft."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str = Field(min_length=1)


class Draft(Form):
    """A case as its writer gives it."""

    messages: tuple[Turn, ...] = Field(min_length=1)
    reasoning: str


class Vote(Form):
    """What one judge says."""

    violates: bool
    reason: str


@dataclass(frozen=True, kw_only=True)
class Kept(Completion):
    """One paid answer and what it was for."""

    key: str
    about: str


@dataclass
class Statistics:
    """What became of the cases, and what it took."""

    outcomes: Counter[str] = field(
        default_factory=Counter
    )  # accepted in round n after m rewritings; or why dropped
    votes_against: Counter[str] = field(default_factory=Counter)  # by judge
    malformed: int = 0
    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost_usd: float | None = None

    def as_json(self) -> dict[str, Any]:
        """For the manifest."""
        return {
            **vars(self),
            "outcomes": dict(sorted(self.outcomes.items())),
            "votes_against": dict(self.votes_against),
        }


class Refused(Exception):
    """The endpoint will not take a text."""


class Asked:
    """The endpoint with its memory: what was answered once is never asked again.

    A refusal is remembered once something else has been answered: else it was the key or the account that was refused.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        kept: Path,
        budget_usd: float | None,
        told: Callable[[Statistics], None],
    ) -> None:
        if budget_usd is not None and endpoint.cost_usd(0, 0) is None:
            remedy = "Set GENERATOR_PRICE_IN and GENERATOR_PRICE_OUT too, USD per million tokens"
            raise GuardError(
                "a budget needs prices", got=f"GENERATOR_BUDGET_USD={budget_usd:g}", remedy=remedy
            )
        self.endpoint, self.budget_usd, self._told = endpoint, budget_usd, told
        self.statistics = Statistics(cost_usd=endpoint.cost_usd(0, 0))
        self._file = AnswerFile(kept, Kept)
        self._spent_usd = sum(self._cost(row) for row in self._file.rows())
        self._in_flight = asyncio.Semaphore(endpoint.concurrency)
        self._refused: list[Kept] = []  # in a row
        self._counted: set[str] = set()

    async def __aenter__(self) -> Asked:
        """Open the connections."""
        self._client: httpx.AsyncClient = self.endpoint.client()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close them."""
        await self._client.aclose()

    async def answer(
        self, form: type[Filled], messages: Sequence[Mapping[str, str]], about: str
    ) -> Filled | None:
        """The answer in its form; None where none of TRIES keeps to it. Raises Refused."""
        for attempt in range(TRIES):
            said = await self._said(messages, f"{about}/{attempt}")
            try:
                return filled(said, form, about)
            except (ValueError, RecursionError, GuardError):
                self.statistics.malformed += 1
        return None

    async def text(self, messages: Sequence[Mapping[str, str]], about: str) -> str | None:
        """The answer in whatever words; None where none of TRIES comes to an end. Raises Refused."""
        for attempt in range(TRIES):
            try:
                return words(await self._said(messages, f"{about}/{attempt}"))
            except ValueError:
                self.statistics.malformed += 1
        return None

    async def _said(self, messages: Sequence[Mapping[str, str]], about: str) -> Kept:
        key = fingerprint(self.endpoint.base_url.rstrip("/"), self.endpoint.body(messages), about)
        row = self._file.get(key)
        if row is None:
            async with self._in_flight:
                self._stay_within_budget()
                paid = asyncio.create_task(self._pay(messages, about, key))
                try:
                    row = await asyncio.shield(paid)
                except asyncio.CancelledError:  # another case has failed: what is being paid for is kept first, if it comes soon
                    done, _ = await asyncio.wait([paid], timeout=self.endpoint.timeout_s)
                    if not done:
                        paid.cancel()
                    elif not paid.cancelled():
                        paid.exception()
                    raise
        self._count(row)
        if row.refused:
            raise Refused
        return row

    async def _pay(self, messages: Sequence[Mapping[str, str]], about: str, key: str) -> Kept:
        said = await self.endpoint.complete(self._client, messages, about)
        row = Kept(key=key, about=about, **vars(said))
        self._refused.append(row)
        if not row.refused:
            self._file.add(self._refused)  # the refusals before it were of texts
            self._refused.clear()
        elif len(self._refused) >= REFUSALS:
            remedy = "Check GENERATOR_BASE_URL, GENERATOR_MODEL, GENERATOR_API_KEY and GENERATOR_OPTIONS; all answers so far are kept"
            what = f"the generator's endpoint refused {REFUSALS} requests in a row"
            raise GuardError(what, where=self.endpoint.url, got=row.text, remedy=remedy)
        if (
            self.budget_usd is not None
            and not row.refused
            and (row.prompt_tokens is None or row.completion_tokens is None)
        ):
            remedy = "Go without GENERATOR_BUDGET_USD, or take an endpoint that reports its usage"
            raise GuardError(
                "a budget needs the token counts that this endpoint does not report",
                where=self.endpoint.url,
                remedy=remedy,
            )
        self._spent_usd += self._cost(row)
        return row

    @property
    def last_refusal(self) -> str:
        """What the endpoint said when it last refused."""
        return self._refused[-1].text if self._refused else ""

    def _cost(self, row: Kept) -> float:
        return self.endpoint.cost_usd(row.prompt_tokens or 0, row.completion_tokens or 0) or 0.0

    def _count(self, row: Kept) -> None:
        if row.key in self._counted:
            return
        self._counted.add(row.key)
        statistics = self.statistics
        statistics.calls += 1
        statistics.prompt_tokens += row.prompt_tokens or 0
        statistics.completion_tokens += row.completion_tokens or 0
        statistics.cost_usd = self.endpoint.cost_usd(
            statistics.prompt_tokens, statistics.completion_tokens
        )
        self._told(statistics)

    def _stay_within_budget(self) -> None:
        if self.budget_usd is not None and self._spent_usd >= self.budget_usd:
            raise GuardError(
                "the budget is spent; everything so far is kept",
                got=f"{self._spent_usd:.2f} of {self.budget_usd:g} USD",
                remedy="Raise GENERATOR_BUDGET_USD and run the same command again, or ask for fewer examples",
            )


def generate(
    rule: Rule,
    wanted: int,
    seed: int,
    endpoint: Endpoint,
    seeds: Sequence[Sequence[Message]],
    kept: Path,
    budget_usd: float | None = None,
) -> tuple[list[Example], dict[str, Any]]:
    """Up to `wanted` examples of `rule`, about half of them violating, in splits, and what it took. `seeds`: unlabelled conversations.

    Answers are kept in the file `kept`. At most as many questions as are in flight are asked beyond the budget. Raises GuardError where
    the endpoint cannot be asked, the budget is spent, or too few cases are agreed upon; whatever was answered is kept.
    """
    try:
        return asyncio.run(_generate(rule, wanted, seed, endpoint, seeds, kept, budget_usd))
    except (
        BaseExceptionGroup
    ) as group:  # not `except*`: up to Python 3.11.3 it raises a group again
        errors, others = group.split(GuardError)
        if errors is None or others is not None:
            raise
        raise _first(errors) from None


async def _generate(
    rule: Rule,
    wanted: int,
    seed: int,
    endpoint: Endpoint,
    seeds: Sequence[Sequence[Message]],
    kept: Path,
    budget_usd: float | None,
) -> tuple[list[Example], dict[str, Any]]:
    half = wanted // 2
    with tqdm(total=2 * half, unit=" examples", desc=f"debating {rule.id}") as bar:

        def told(statistics: Statistics) -> None:
            cost = f", {statistics.cost_usd:.2f} USD" if statistics.cost_usd is not None else ""
            bar.set_postfix_str(f"{statistics.calls} answers{cost}")

        async with Asked(endpoint, kept, budget_usd, told) as asked:
            dimensions = await _dimensions(asked, rule, seeds, kept)
            at_once = asyncio.Semaphore(
                endpoint.concurrency
            )  # cases are finished before others begin: a budget then buys examples

            async def settle(case: Case) -> Example | None:
                async with at_once:
                    example = await case.settle()
                bar.update(example is not None)
                return example

            accepted: dict[int, list[Example]] = {0: [], 1: []}
            tried = {0: 0, 1: 0}
            while wave := _wave(accepted, tried, half):
                async with asyncio.TaskGroup() as tasks:
                    settled = [
                        tasks.create_task(settle(Case(rule, dimensions, number, seed, asked)))
                        for number in wave
                    ]
                for number, task in zip(wave, settled, strict=True):
                    accepted[number % 2] += [example for example in [task.result()] if example]
            statistics = asked.statistics.as_json() | {
                "dimensions": [dimension.model_dump(mode="json") for dimension in dimensions]
            }
    examples = assign([*accepted[0], *accepted[1]], seed)
    if min(map(len, accepted.values())) < half / 2 or labels_missing(examples):
        got = ", ".join(f"{count} {what}" for what, count in statistics["outcomes"].items())
        what = f"only {len(accepted[1])} violating and {len(accepted[0])} allowed of {half} cases each were agreed upon"
        raise GuardError(
            what,
            where=kept,
            got=got,
            remedy="State the policy more clearly, or take a stronger model",
        )
    return examples, statistics


async def _dimensions(
    asked: Asked, rule: Rule, seeds: Sequence[Sequence[Message]], kept: Path
) -> tuple[Dimension, ...]:
    try:
        found = await asked.answer(
            Dimensions, prompts.decompose(rule, seeds), f"{rule.id}/dimensions"
        )
    except Refused:
        what, remedy = (
            "the generator's endpoint refused the policy",
            "Check GENERATOR_API_KEY, GENERATOR_MODEL and GENERATOR_OPTIONS",
        )
        raise GuardError(
            what, where=asked.endpoint.url, got=asked.last_refusal, remedy=remedy
        ) from None
    if found is None:
        remedy = "Look at what it answered in the file, delete the file, or take another model"
        raise GuardError("the endpoint gave no dimensions of the policy", where=kept, remedy=remedy)
    return found.dimensions


def _wave(accepted: Mapping[int, Sequence[Example]], tried: dict[int, int], half: int) -> list[int]:
    """The next cases: of each label as many as are missing, so that what is tried follows from the answers, not from who came first."""
    wave = []
    for label in (0, 1):
        more = min(half - len(accepted[label]), SAMPLED * half - tried[label])
        wave += [2 * index + label for index in range(tried[label], tried[label] + more)]
        tried[label] += more
    return sorted(wave)


@dataclass(frozen=True)
class Case:
    """One sampled case on its way through the debate."""

    rule: Rule
    dimensions: tuple[Dimension, ...]
    number: int
    seed: int
    asked: Asked

    async def settle(self) -> Example | None:
        """The example, once both judges agree; None if they never do."""
        try:
            return await self._settled()
        except* Refused:
            self._outcome("refused by the endpoint")
        return None

    async def _settled(self) -> Example | None:
        rng = random.Random(f"{self.rule.id}/{self.seed}/{self.number}")
        dimension = rng.choice(self.dimensions)
        value, label = rng.choice(dimension.values), self.number % 2
        draft: Draft | None = None
        dissent: list[str] = []
        for rewriting in range(1 + REFINEMENTS):
            about = f"{self.rule.id}/{self.seed}/{self.number}/{rewriting}"
            write = prompts.write(
                self.rule,
                self.number,
                dimension.name,
                value,
                label,
                draft.model_dump() if draft else None,
                dissent,
            )
            draft = await self.asked.answer(Draft, write, f"{about}/write")
            if draft is None:
                self._outcome("not written in form")
                return None
            votes, rounds = await self._debate(draft, label, about)
            if votes is None:
                self._outcome("not judged in form")
                return None
            dissent = [vote.reason for vote in votes.values() if vote.violates != bool(label)]
            if not dissent:
                self._outcome(f"accepted in round {rounds} after {rewriting} rewritings")
                return self._example(draft, dimension.name, value, label, rewriting, rounds)
        self._outcome("no consensus")
        return None

    async def _debate(
        self, draft: Draft, label: int, about: str
    ) -> tuple[dict[str, Vote] | None, int]:
        """The judges' last votes, None where one keeps to no form, and in which round they were cast."""
        said: list[str] = []
        votes: dict[str, Vote] = {}
        for number in range(1, ROUNDS + 1):
            argument = await self.asked.text(
                prompts.advocate(self.rule, draft.model_dump(), label, said),
                f"{about}/{number}/advocate",
            )
            if argument is None:
                return None, number
            said.append(f"Advocate: {argument}")
            async with asyncio.TaskGroup() as tasks:
                asked = [
                    tasks.create_task(
                        self.asked.answer(
                            Vote,
                            prompts.judge(self.rule, draft.model_dump(), leaning, said),
                            f"{about}/{number}/{leaning}",
                        )
                    )
                    for leaning in JUDGES
                ]
            found = [task.result() for task in asked]
            if any(vote is None for vote in found):
                return None, number
            votes = {leaning: vote for leaning, vote in zip(JUDGES, found, strict=True) if vote}
            against = {
                leaning: vote for leaning, vote in votes.items() if vote.violates != bool(label)
            }
            self.asked.statistics.votes_against.update(against.keys())
            if not against:
                break
            said += [f"Judge ({leaning}): {vote.reason}" for leaning, vote in votes.items()]
        return votes, number

    def _outcome(self, what: str) -> None:
        self.asked.statistics.outcomes[what] += 1

    def _example(
        self, draft: Draft, dimension: str, value: str, label: int, rewritings: int, rounds: int
    ) -> Example:
        return Example(
            id=f"{self.rule.id}/llm/{self.seed}/{self.number}",
            rule=self.rule.id,
            messages=tuple(Message(turn.role, turn.content) for turn in draft.messages),
            label=label,
            split="train",  # until they are dealt out
            source=f"BARRED by {self.asked.endpoint.model}",
            group=f"{self.rule.id}/llm/{self.seed}/{self.number}",
            meta={
                "stratum": "debated", "difficulty": "boundary", "dimension": dimension, "value": value, "reasoning": draft.reasoning,
                "rewritings": rewritings, "rounds": rounds,
            },
        )  # fmt: skip


def _first(group: BaseExceptionGroup[GuardError]) -> GuardError:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, GuardError)
    return error

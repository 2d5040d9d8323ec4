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
import json
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx
from pydantic import Field
from tqdm import tqdm

from data import barred_prompts as prompts
from data.splits import assign
from guard.answer_file import AnswerFile
from guard.endpoint import Completion, Endpoint
from guard.errors import GuardError
from guard.example import Example, Message, as_messages
from guard.layout import fingerprint
from guard.rule import Rule
from guard.yaml_file import Strict, validate

ROUNDS = 2
REFINEMENTS = 2
TRIES = 3  # for an answer in the form that was asked for
SAMPLED = 3  # cases that are tried at most for each one wanted
REFUSALS = 8  # without one answer: then it is our way of asking
JUDGES: tuple[prompts.Leaning, ...] = ("recall", "precision")


class Dimension(Strict):
    """A way in which cases of the policy differ, and what it may be."""

    name: str = Field(min_length=1)
    values: tuple[str, ...] = Field(min_length=2)


class Dimensions(Strict):
    """The answer to the decomposition."""

    dimensions: tuple[Dimension, ...] = Field(min_length=2)


class Draft(Strict):
    """A case as its writer gives it."""

    messages: tuple[dict[str, str], ...] = Field(min_length=1)
    reasoning: str


class Vote(Strict):
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

    outcomes: Counter[str] = field(default_factory=Counter)  # accepted in round n after m rewritings; or why dropped
    votes_against: Counter[str] = field(default_factory=Counter)  # by judge
    malformed: int = 0
    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost_usd: float | None = None

    def as_json(self) -> dict[str, Any]:
        """For the manifest."""
        return {**vars(self), "outcomes": dict(sorted(self.outcomes.items())), "votes_against": dict(self.votes_against)}


Answer = TypeVar("Answer", bound=Strict)


class Asked:
    """The endpoint with its memory: what was answered once is never asked again."""

    def __init__(self, endpoint: Endpoint, kept: Path, budget_usd: float | None) -> None:
        if budget_usd is not None and endpoint.cost_usd(0, 0) is None:
            remedy = "Set GENERATOR_PRICE_IN and GENERATOR_PRICE_OUT too, USD per million tokens"
            raise GuardError("a budget needs prices", got=f"GENERATOR_BUDGET_USD={budget_usd:g}", remedy=remedy)
        self.endpoint, self.budget_usd = endpoint, budget_usd
        self.statistics = Statistics(cost_usd=endpoint.cost_usd(0, 0))
        self._file = AnswerFile(kept, Kept)
        self._in_flight = asyncio.Semaphore(endpoint.concurrency)
        self._refused = 0
        self._answered = False
        self._counted: set[str] = set()

    async def __aenter__(self) -> Asked:
        """Open the connections."""
        self._client: httpx.AsyncClient = self.endpoint.client()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close them."""
        await self._client.aclose()

    async def answer(self, form: type[Answer], messages: Sequence[Mapping[str, str]], about: str) -> Answer | None:
        """The answer in its form; None where the endpoint will not take the question or never keeps to the form."""
        for attempt in range(TRIES):
            said = await self._said(messages, f"{about}/{attempt}")
            if said.refused:
                return None
            try:
                return validate(json_of(said.text), form, where=about)
            except (ValueError, GuardError):
                self.statistics.malformed += 1
        return None

    async def text(self, messages: Sequence[Mapping[str, str]], about: str) -> str | None:
        """The answer in whatever words; None where the endpoint will not take the question."""
        said = await self._said(messages, about)
        return None if said.refused else _without_thoughts(said.text)

    async def _said(self, messages: Sequence[Mapping[str, str]], about: str) -> Kept:
        key = fingerprint(self.endpoint.base_url, self.endpoint.body(messages), about)
        row = self._file.get(key)
        if row is None:
            async with self._in_flight:
                self._stay_within_budget()
                paid = asyncio.create_task(self._pay(messages, about, key))
                try:
                    row = await asyncio.shield(paid)
                except asyncio.CancelledError:  # another case has failed: what is being paid for is kept first
                    await asyncio.wait([paid])
                    raise
        self._count(row)
        return row

    async def _pay(self, messages: Sequence[Mapping[str, str]], about: str, key: str) -> Kept:
        said = await self.endpoint.complete(self._client, messages, about)
        row = Kept(key=key, about=about, **vars(said))
        self._file.add([row])
        return row

    def _count(self, row: Kept) -> None:
        self._refused += row.refused
        self._answered = self._answered or not row.refused
        if self._refused >= REFUSALS and not self._answered:
            remedy = "Check GENERATOR_BASE_URL, GENERATOR_MODEL and GENERATOR_OPTIONS"
            raise GuardError("the generator's endpoint refused every request", where=self.endpoint.url, got=row.text, remedy=remedy)
        if row.key in self._counted:
            return
        self._counted.add(row.key)
        statistics = self.statistics
        statistics.calls += 1
        statistics.prompt_tokens += row.prompt_tokens or 0
        statistics.completion_tokens += row.completion_tokens or 0
        statistics.cost_usd = self.endpoint.cost_usd(statistics.prompt_tokens, statistics.completion_tokens)

    def _stay_within_budget(self) -> None:
        spent = self.statistics.cost_usd
        if self.budget_usd is not None and spent is not None and spent >= self.budget_usd:
            raise GuardError(
                "the budget is spent; everything so far is kept",
                got=f"{spent:.2f} of {self.budget_usd:g} USD",
                remedy="Raise GENERATOR_BUDGET_USD and run the same command again, or ask for fewer examples",
            )


def generate(
    rule: Rule, wanted: int, seed: int, endpoint: Endpoint, seeds: Sequence[Sequence[Message]], kept: Path, budget_usd: float | None = None
) -> tuple[list[Example], dict[str, Any]]:
    """About `wanted` examples of `rule`, half of them violating, in splits, and what it took. `seeds`: unlabelled conversations.

    Answers are kept in the file `kept`. At most as many questions as are in flight are asked beyond the budget. Raises GuardError where
    the endpoint cannot be asked, the budget is spent, or too few cases are agreed upon; whatever was answered is kept.
    """
    try:
        return asyncio.run(_generate(rule, wanted, seed, endpoint, seeds, kept, budget_usd))
    except* GuardError as group:
        raise _first(group) from None


async def _generate(
    rule: Rule, wanted: int, seed: int, endpoint: Endpoint, seeds: Sequence[Sequence[Message]], kept: Path, budget_usd: float | None
) -> tuple[list[Example], dict[str, Any]]:
    async with Asked(endpoint, kept, budget_usd) as asked:
        found = await asked.answer(Dimensions, prompts.decompose(rule, seeds), f"{rule.id}/dimensions")
        if found is None:
            remedy = "Look at what it answered in the file, or take another model"
            raise GuardError("the endpoint gave no dimensions of the policy", where=kept, remedy=remedy)
        accepted: list[Example] = []
        tried = 0
        with tqdm(total=wanted, unit=" examples", desc=f"debating {rule.id}") as bar:
            while len(accepted) < wanted and tried < SAMPLED * wanted:
                # A wave of as many as are missing: which cases are tried follows from the answers, not from who answered first.
                wave = range(tried, min(tried + wanted - len(accepted), SAMPLED * wanted))
                tried = wave.stop
                cases = [Case(rule, found.dimensions, number, seed, asked) for number in wave]

                async def settle(case: Case) -> Example | None:
                    example = await case.settle()
                    bar.update(example is not None)
                    cost = asked.statistics.cost_usd
                    bar.set_postfix_str(f"{asked.statistics.calls} calls" + (f", {cost:.2f} USD" if cost is not None else ""))
                    return example

                async with asyncio.TaskGroup() as tasks:
                    settled = [tasks.create_task(settle(case)) for case in cases]
                accepted += [example for task in settled if (example := task.result())]
        statistics = asked.statistics.as_json() | {"dimensions": [dimension.model_dump(mode="json") for dimension in found.dimensions]}
    if len(accepted) < wanted / 2:
        got = ", ".join(f"{count} {what}" for what, count in statistics["outcomes"].items())
        remedy = "State the policy more clearly, or take a stronger model"
        raise GuardError(f"only {len(accepted)} of {wanted} cases were agreed upon", where=kept, got=got, remedy=remedy)
    return assign(accepted, seed), statistics


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
        rng = random.Random(f"{self.rule.id}/{self.seed}/{self.number}")
        dimension = rng.choice(self.dimensions)
        value, label = rng.choice(dimension.values), self.number % 2
        draft: Draft | None = None
        dissent: list[str] = []
        for rewriting in range(1 + REFINEMENTS):
            about = f"{self.rule.id}/{self.seed}/{self.number}/{rewriting}"
            write = prompts.write(self.rule, self.number, dimension.name, value, label, draft.model_dump() if draft else None, dissent)
            draft = await self.asked.answer(Draft, write, f"{about}/write")
            messages = _messages(draft)
            if draft is None or messages is None:
                self._outcome("not written in form")
                return None
            votes, rounds = await self._debate(draft, label, about)
            if votes is None:
                self._outcome("not judged in form")
                return None
            dissent = [vote.reason for vote in votes.values() if vote.violates != bool(label)]
            if not dissent:
                self._outcome(f"accepted in round {rounds} after {rewriting} rewritings")
                return self._example(messages, draft, dimension.name, value, label, rewriting, rounds)
        self._outcome("no consensus")
        return None

    async def _debate(self, draft: Draft, label: int, about: str) -> tuple[dict[str, Vote] | None, int]:
        """The judges' last votes, None where one keeps to no form, and in which round they were cast."""
        said: list[str] = []
        votes: dict[str, Vote] = {}
        for number in range(1, ROUNDS + 1):
            argument = await self.asked.text(prompts.advocate(self.rule, draft.model_dump(), label, said), f"{about}/{number}/advocate")
            if argument is None:
                return None, number
            said.append(f"Advocate: {argument}")
            found = await asyncio.gather(
                *(
                    self.asked.answer(Vote, prompts.judge(self.rule, draft.model_dump(), leaning, said), f"{about}/{number}/{leaning}")
                    for leaning in JUDGES
                )
            )
            if any(vote is None for vote in found):
                return None, number
            votes = {leaning: vote for leaning, vote in zip(JUDGES, found, strict=True) if vote}
            against = {leaning: vote for leaning, vote in votes.items() if vote.violates != bool(label)}
            self.asked.statistics.votes_against.update(against.keys())
            if not against:
                break
            said += [f"Judge ({leaning}): {vote.reason}" for leaning, vote in votes.items()]
        return votes, number

    def _outcome(self, what: str) -> None:
        self.asked.statistics.outcomes[what] += 1

    def _example(
        self, messages: tuple[Message, ...], draft: Draft, dimension: str, value: str, label: int, rewritings: int, rounds: int
    ) -> Example:
        return Example(
            id=f"{self.rule.id}/llm/{self.seed}/{self.number}",
            rule=self.rule.id,
            messages=messages,
            label=label,
            split="train",  # until they are dealt out
            source=f"BARRED by {self.asked.endpoint.model}",
            group=f"{self.rule.id}/llm/{self.seed}/{self.number}",
            meta={
                "stratum": "debated", "difficulty": "boundary", "dimension": dimension, "value": value, "reasoning": draft.reasoning,
                "rewritings": rewritings, "rounds": rounds,
            },
        )  # fmt: skip


def _messages(draft: Draft | None) -> tuple[Message, ...] | None:
    try:
        return as_messages(list(draft.messages), where="draft") if draft else None
    except GuardError:
        return None


def _without_thoughts(text: str) -> str:
    return text.rpartition("</think>")[2].strip()


def json_of(text: str) -> Any:
    """The JSON object in an answer, whatever stands around it. Raises ValueError where there is none."""
    text = _without_thoughts(text)
    start = text.find("{")
    if start < 0:
        raise ValueError("no JSON object")
    return json.JSONDecoder().raw_decode(text[start:])[0]


def _first(group: BaseExceptionGroup[GuardError]) -> GuardError:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, GuardError)
    return error

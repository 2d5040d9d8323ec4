"""Labelled conversations by an LLM that argues with itself (BARRED, arXiv 2604.25203).

The policy is decomposed into dimensions, with the help of some unlabelled conversations. For a
sampled dimension, value and label a boundary case is written with its reasoning; an advocate who
does not give way defends the label before two judges, one who would rather flag too much and one
who would rather flag too little. If both agree with the label in one of ROUNDS rounds the case is
kept, else it is written again with their dissent, at most REFINEMENTS times, then dropped.

Everything follows from answers that are kept as they come, keyed by what was asked and for which
case. So a run that was killed goes on without asking anything again, and ends with what it would
have ended with. Knows nothing of files' formats.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from data.debate import prompts
from data.debate.forms import ConversationDraft, Decomposition, Dimension, Vote
from data.debate.paid_endpoint import PaidEndpoint, Refused, Statistics
from data.splits import assign, labels_scarce
from guard.conversation.example import FEWEST_ROWS, Example, Message
from guard.endpoint.client import Endpoint
from guard.errors import GuardError
from guard.rule import Rule

ROUNDS = 2
REFINEMENTS = 2
SAMPLED = 3  # the most cases that are tried for each one wanted
LEANINGS: tuple[prompts.Leaning, ...] = ("recall", "precision")


def generate(
    rule: Rule,
    wanted: int,
    seed: int,
    endpoint: Endpoint,
    seeds: Sequence[Sequence[Message]],
    answers_file: Path,
    budget_usd: float | None = None,
) -> tuple[list[Example], dict[str, Any]]:
    """Up to `wanted` examples of `rule`, about half of them violating, in splits, and the
    statistics.

    `seeds` are unlabelled conversations. Answers are kept in `answers_file`. At most as many
    questions as are in flight are asked beyond the budget. Raises GuardError where the endpoint
    cannot be asked, the budget is spent, or too few cases are agreed upon; whatever was answered is
    kept.
    """
    refuse_last_turn(rule)
    half = wanted // 2
    with tqdm(total=2 * half, unit=" examples", desc=f"debating {rule.id}") as bar:

        def show(statistics: Statistics) -> None:
            cost = ""
            if statistics.cost_usd is not None:
                cost = f", {statistics.cost_usd:.2f} USD"
            bar.set_postfix_str(f"{statistics.calls} answers{cost}")

        paid = PaidEndpoint(endpoint, answers_file, budget_usd, show)
        debates = Debates(rule, seed, paid, bar)
        try:
            asyncio.run(debates.run(half, seeds, answers_file))
        # Not `except*`: up to Python 3.11.3 it raises a group again.
        except BaseExceptionGroup as group:
            errors, remaining = group.split(GuardError)
            if errors is None or remaining is not None:
                raise
            raise _first(errors) from None
    return debates.examples(half, answers_file)


def refuse_last_turn(rule: Rule) -> None:
    """Raise GuardError for a rule on the last turn alone: what an LLM writes may violate in any."""
    if rule.turns == "last":
        raise GuardError(
            "a debate writes violations into any turn, but this rule is about the last turn alone",
            where=f"rule {rule.id}: turns",
            got=rule.turns,
            remedy="Give labelled rows (DATA=FILE), or take the generator (DATA=generator) where "
            "the rule has phrases, or leave `turns` out",
        )


class Debates:
    """The debated cases of one rule: how many were tried, and which were accepted."""

    def __init__(self, rule: Rule, seed: int, endpoint: PaidEndpoint, bar: tqdm[Any]) -> None:
        self.rule, self.seed, self.endpoint = rule, seed, endpoint
        self.dimensions: tuple[Dimension, ...] = ()
        self._bar = bar
        self._accepted: dict[int, list[Example]] = {0: [], 1: []}
        self._tried = {0: 0, 1: 0}

    async def run(self, half: int, seeds: Sequence[Sequence[Message]], answers_file: Path) -> None:
        """Debate cases in waves until `half` of each label are accepted, or too many were tried."""
        # Cases are finished before others begin: a budget then buys examples.
        at_once = asyncio.Semaphore(self.endpoint.endpoint.concurrency)
        async with self.endpoint:
            self.dimensions = await self._decompose(seeds, answers_file)
            wave = self._next_wave(half)
            while wave:
                async with asyncio.TaskGroup() as tasks:
                    settled = [tasks.create_task(self._settle(number, at_once)) for number in wave]
                for number, task in zip(wave, settled, strict=True):
                    example = task.result()
                    if example is not None:
                        self._accepted[number % 2].append(example)
                wave = self._next_wave(half)

    async def _settle(self, number: int, at_once: asyncio.Semaphore) -> Example | None:
        async with at_once:
            case = Case(self.rule, self.dimensions, number, self.seed, self.endpoint)
            example = await case.settle()
        self._bar.update(example is not None)
        return example

    def _next_wave(self, half: int) -> list[int]:
        """The numbers of the next cases: as many of each label as are missing.

        So what is tried follows from the answers, not from who came first. A case's label is its
        number modulo 2.
        """
        wave: list[int] = []
        for label, tried in self._tried.items():
            wave_size = min(half - len(self._accepted[label]), SAMPLED * half - tried)
            wave += [2 * index + label for index in range(tried, tried + wave_size)]
            self._tried[label] += wave_size
        return sorted(wave)

    async def _decompose(
        self, seeds: Sequence[Sequence[Message]], answers_file: Path
    ) -> tuple[Dimension, ...]:
        chat = prompts.decompose(self.rule, seeds)
        try:
            answer = await self.endpoint.answer(Decomposition, chat, f"{self.rule.id}/dimensions")
        except Refused:
            raise GuardError(
                "the generator's endpoint refused the policy",
                where=self.endpoint.endpoint.url,
                got=self.endpoint.last_refusal,
                remedy="Check GENERATOR_API_KEY, GENERATOR_MODEL and GENERATOR_OPTIONS",
            ) from None
        if answer is None:
            raise GuardError(
                "the endpoint gave no dimensions of the policy",
                where=answers_file,
                remedy="Look at what it answered in the file, delete the file, or take another "
                "model",
            )
        return answer.dimensions

    def examples(self, half: int, answers_file: Path) -> tuple[list[Example], dict[str, Any]]:
        """The accepted cases in splits, and what they took.

        Raises GuardError where they are too few.
        """
        allowed, violating = self._accepted[0], self._accepted[1]
        statistics = self.endpoint.statistics.as_json()
        examples = assign([*allowed, *violating], self.seed)
        if min(len(allowed), len(violating)) < half / 2:
            outcomes = statistics["outcomes"].items()
            raise GuardError(
                f"only {len(violating)} violating and {len(allowed)} allowed of {half} cases each "
                "were agreed upon",
                where=answers_file,
                got=", ".join(f"{count} {outcome}" for outcome, count in outcomes),
                remedy="State the policy more clearly, or take a stronger model",
            )
        if scarce := labels_scarce(examples, FEWEST_ROWS):
            raise GuardError(
                f"{len(examples)} agreed cases are too few to train on: {'; '.join(scarce)}",
                where=answers_file,
                remedy="Ask for more --examples: what was answered is kept",
            )
        dimensions = [dimension.model_dump(mode="json") for dimension in self.dimensions]
        return examples, statistics | {"dimensions": dimensions}


@dataclass(frozen=True)
class Case:
    """One sampled case on its way through the debate."""

    rule: Rule
    dimensions: tuple[Dimension, ...]
    number: int
    seed: int
    endpoint: PaidEndpoint

    @property
    def label(self) -> int:
        """The label that the case should have: 1 violates."""
        return self.number % 2

    @property
    def identity(self) -> str:
        """The rule, the seed and the number, by which its answers are kept."""
        return f"{self.rule.id}/{self.seed}/{self.number}"

    async def settle(self) -> Example | None:
        """The example, once both judges agree; None if they never do."""
        try:
            return await self._settled()
        except* Refused:
            self._outcome("refused by the endpoint")
        return None

    async def _settled(self) -> Example | None:
        rng = random.Random(self.identity)
        dimension = rng.choice(self.dimensions)
        topic = prompts.Topic(self.number, dimension.name, rng.choice(dimension.values), self.label)
        draft: ConversationDraft | None = None
        dissent: list[str] = []
        for rewriting in range(1 + REFINEMENTS):
            about = f"{self.identity}/{rewriting}"
            chat = prompts.write(self.rule, topic, _dumped(draft), dissent)
            draft = await self.endpoint.answer(ConversationDraft, chat, f"{about}/write")
            if draft is None:
                self._outcome("not written in form")
                return None
            votes, rounds = await self._debate(draft, about)
            if votes is None:
                self._outcome("not judged in form")
                return None
            dissent = [vote.reason for vote in self._against(votes).values()]
            if not dissent:
                self._outcome(f"accepted in round {rounds} after {rewriting} rewritings")
                return self._example(draft, topic, {"rewritings": rewriting, "rounds": rounds})
        self._outcome("no consensus")
        return None

    async def _debate(
        self, draft: ConversationDraft, about: str
    ) -> tuple[dict[str, Vote] | None, int]:
        """The judges' last votes, None where one keeps to no form, and their round."""
        transcript: list[str] = []
        votes: dict[str, Vote] | None = {}
        for number in range(1, ROUNDS + 1):
            chat = prompts.advocate(self.rule, draft.model_dump(), self.label, transcript)
            argument = await self.endpoint.text(chat, f"{about}/{number}/advocate")
            if argument is None:
                return None, number
            transcript.append(f"Advocate: {argument}")
            votes = await self._votes(draft, transcript, f"{about}/{number}")
            if votes is None:
                return None, number
            against = self._against(votes)
            self.endpoint.statistics.votes_against.update(against.keys())
            if not against:
                break
            transcript += [f"Judge ({leaning}): {vote.reason}" for leaning, vote in votes.items()]
        return votes, number

    async def _votes(
        self, draft: ConversationDraft, transcript: Sequence[str], about: str
    ) -> dict[str, Vote] | None:
        """The judges' votes by their leaning; None where one keeps to no form."""
        tasks: dict[str, asyncio.Task[Vote | None]] = {}
        async with asyncio.TaskGroup() as group:
            for leaning in LEANINGS:
                chat = prompts.judge(self.rule, draft.model_dump(), leaning, transcript)
                answer = self.endpoint.answer(Vote, chat, f"{about}/{leaning}")
                tasks[leaning] = group.create_task(answer)
        votes = {}
        for judge, task in tasks.items():
            vote = task.result()
            if vote is None:
                return None
            votes[judge] = vote
        return votes

    def _against(self, votes: Mapping[str, Vote]) -> dict[str, Vote]:
        """The votes for the other label."""
        return {name: vote for name, vote in votes.items() if vote.violates != bool(self.label)}

    def _outcome(self, outcome: str) -> None:
        self.endpoint.statistics.outcomes[outcome] += 1

    def _example(
        self, draft: ConversationDraft, topic: prompts.Topic, effort: Mapping[str, int]
    ) -> Example:
        identity = f"{self.rule.id}/llm/{self.seed}/{self.number}"
        return Example(
            id=identity,
            rule=self.rule.id,
            messages=tuple(Message(turn.role, turn.content) for turn in draft.messages),
            label=self.label,
            split="train",  # until it is assigned to a split
            source=f"BARRED by {self.endpoint.endpoint.model}",
            group=identity,
            meta={
                "stratum": "debated",
                "difficulty": "boundary",
                "dimension": topic.dimension,
                "value": topic.value,
                "reasoning": draft.reasoning,
                **effort,
            },
        )


def _dumped(draft: ConversationDraft | None) -> dict[str, Any] | None:
    if draft is None:
        return None
    return draft.model_dump()


def _first(group: BaseExceptionGroup[GuardError]) -> GuardError:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, GuardError)
    return error

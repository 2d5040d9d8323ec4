"""Labelled conversations by an LLM that argues with itself (BARRED, arXiv 2604.25203).

The policy is decomposed into dimensions, with the help of some unlabelled conversations. For a
sampled dimension, value and label a boundary case is written with its reasoning; an advocate who
does not give way defends the label before two judges, one who would rather flag too much and one
who would rather flag too little. If both agree with the label in one of ROUNDS rounds the case is
kept, else it is written again with their dissent, at most REFINEMENTS times, then dropped.

Everything follows from answers that are kept as they come, keyed by what was asked and for which
case. So a run that was killed goes on without asking anything again, and ends with what it would
have ended with.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from data.debate import prompts
from data.debate.paid_endpoint import OutOfForm, PaidEndpoint, Refused, Writers
from data.debate.prompts import ConversationDraft, Decomposition, Dimension, Leaning, Topic, Vote
from data.splits import assign, labels_scarce
from guard.conversation.example import FEWEST_ROWS, Example
from guard.errors import GuardError
from guard.rule import Rule

ROUNDS = 2
REFINEMENTS = 2
SAMPLED = 3  # the most cases that are tried for each one wanted


def generate(
    rule: Rule, seed: int, writers: Writers, answers_file: Path
) -> tuple[list[Example], dict[str, Any]]:
    """As many examples of `rule` as are wanted, half of them violating, in splits; and statistics.

    Answers are kept in `answers_file`. Raises GuardError where the endpoint cannot be asked, the
    budget is spent, or too few cases are agreed upon.
    """
    refuse_last_turn(rule)
    half = writers.wanted // 2
    with tqdm(total=2 * half, unit=" examples", desc=f"debating {rule.id}") as bar:
        paid = PaidEndpoint(writers, answers_file)
        debates = Debates(rule, seed, paid, bar)
        try:
            asyncio.run(debates.run(half, writers))
        # Not `except*`: up to Python 3.11.3 it raises a group again.
        except BaseExceptionGroup as group:
            errors, remaining = group.split(GuardError)
            if errors is None or remaining is not None:
                raise
            raise errors.exceptions[0] from None
    return debates.examples(half), debates.statistics()


def refuse_last_turn(rule: Rule) -> None:
    """Raise GuardError for a rule on the last turn alone: what an LLM writes may violate in any."""
    if rule.turns == "last":
        problem = "a debate writes violations into any turn, but this rule is about the last turn "
        problem += "alone"
        remedy = "Give labelled rows (DATA=FILE), or take the generator (DATA=generator) where the "
        remedy += "rule has phrases, or leave `turns` out"
        raise GuardError(problem, where=f"rule {rule.id}: turns", got=rule.turns, remedy=remedy)


class Debates:
    """The debated cases of one rule, each by its number; its label is its number modulo 2."""

    def __init__(self, rule: Rule, seed: int, paid: PaidEndpoint, bar: tqdm[Any]) -> None:
        self.rule, self.seed, self.paid = rule, seed, paid
        self.dimensions: tuple[Dimension, ...] = ()
        self._bar = bar
        self._accepted: dict[int, list[Example]] = {0: [], 1: []}
        self._tried = {0: 0, 1: 0}

    async def run(self, half: int, writers: Writers) -> None:
        # Cases are finished before others begin: a budget then buys examples.
        at_once = asyncio.Semaphore(writers.endpoint.concurrency)
        async with self.paid.connected():
            self.dimensions = await self._decompose(writers)
            while wave := self._next_wave(half):
                async with asyncio.TaskGroup() as tasks:
                    settled = [tasks.create_task(self._case(number, at_once)) for number in wave]
                for number, task in zip(wave, settled, strict=True):
                    example = task.result()
                    if example is not None:
                        self._accepted[number % 2].append(example)

    def _next_wave(self, half: int) -> list[int]:
        """As many cases of each label as are missing, whoever came first."""
        wave: list[int] = []
        for label, tried in self._tried.items():
            wave_size = min(half - len(self._accepted[label]), SAMPLED * half - tried)
            wave += [2 * index + label for index in range(tried, tried + wave_size)]
            self._tried[label] += wave_size
        return sorted(wave)

    async def _decompose(self, writers: Writers) -> tuple[Dimension, ...]:
        chat = prompts.decompose(self.rule, writers.seeds)
        about, out_of_form = f"{self.rule.id}/dimensions", f"see {self.paid.answers_file}"
        try:
            answer = await self.paid.answer(Decomposition, chat, about, out_of_form)
        except (Refused, OutOfForm) as error:
            problem = "the generator's endpoint refused the policy, or gave no dimensions of it"
            got = str(error)
            remedy = "Check GENERATOR_API_KEY, GENERATOR_MODEL and GENERATOR_OPTIONS, take another "
            remedy += "model, or delete the file of answers"
            raise GuardError(problem, where=writers.endpoint.url, got=got, remedy=remedy) from None
        return answer.dimensions

    def statistics(self) -> dict[str, Any]:
        dimensions = [dimension.model_dump(mode="json") for dimension in self.dimensions]
        return self.paid.statistics.as_json() | {"dimensions": dimensions}

    def examples(self, half: int) -> list[Example]:
        allowed, violating = self._accepted[0], self._accepted[1]
        examples = assign([*allowed, *violating], self.seed)
        if min(len(allowed), len(violating)) < half / 2:
            outcomes = sorted(self.paid.statistics.outcomes.items())
            problem = f"only {len(violating)} violating and {len(allowed)} allowed of {half} cases "
            problem += "each were agreed upon"
            got = ", ".join(f"{count} {outcome}" for outcome, count in outcomes)
            remedy = "State the policy more clearly, or take a stronger model"
            raise GuardError(problem, where=self.paid.answers_file, got=got, remedy=remedy)
        if scarce := labels_scarce(examples, FEWEST_ROWS):
            problem = f"{len(examples)} agreed cases are too few to train on: {'; '.join(scarce)}"
            remedy = "Ask for more --examples: what was answered is kept"
            raise GuardError(problem, where=self.paid.answers_file, remedy=remedy)
        return examples

    async def _case(self, number: int, at_once: asyncio.Semaphore) -> Example | None:
        """One sampled case: the example, once both judges agree; None if they never do."""
        identity = f"{self.rule.id}/{self.seed}/{number}"  # its answers are kept by it
        rng = random.Random(identity)
        dimension = rng.choice(self.dimensions)
        topic = Topic(number, dimension.name, rng.choice(dimension.values), label=number % 2)
        example: Example | None = None
        try:
            async with at_once:
                example = await self._settled(topic, identity)
            outcome = "no consensus"
        except Refused:
            outcome = "refused by the endpoint"
        except OutOfForm as error:
            outcome = str(error)
        if example is not None:
            rounds, rewritings = example.meta["rounds"], example.meta["rewritings"]
            outcome = f"accepted in round {rounds} after {rewritings} rewritings"
        statistics = self.paid.statistics
        statistics.outcomes[outcome] += 1
        self._bar.set_postfix(answers=statistics.calls, usd=statistics.cost_usd)
        self._bar.update(example is not None)
        return example

    async def _settled(self, topic: Topic, identity: str) -> Example | None:
        draft: ConversationDraft | None = None
        dissent: list[str] = []
        for rewritings in range(1 + REFINEMENTS):
            about = f"{identity}/{rewritings}"
            chat = prompts.write(self.rule, topic, draft, dissent)
            draft = await self.paid.answer(
                ConversationDraft, chat, f"{about}/write", out_of_form="not written in form"
            )
            dissent, rounds = await self._debate(draft, topic.label, about)
            if not dissent:
                return self._example(draft, topic, {"rewritings": rewritings, "rounds": rounds})
        return None

    async def _debate(
        self, draft: ConversationDraft, label: int, about: str
    ) -> tuple[list[str], int]:
        """The reasons of the judges who are against the label in the last round, and its number."""
        transcript: list[str] = []
        for number in range(1, ROUNDS + 1):
            chat = prompts.advocate(self.rule, draft, label, transcript)
            argument = await self.paid.text(chat, f"{about}/{number}/advocate")
            transcript.append(f"Advocate: {argument}")
            votes = await self._votes(draft, transcript, f"{about}/{number}")
            dissent = [vote.reason for vote in votes.values() if vote.violates != bool(label)]
            if not dissent:
                break
            transcript += [f"Judge ({leaning}): {vote.reason}" for leaning, vote in votes.items()]
        return dissent, number

    async def _votes(
        self, draft: ConversationDraft, transcript: Sequence[str], about: str
    ) -> dict[Leaning, Vote]:
        questions = []
        for leaning in prompts.PROMPTS.leanings:
            chat = prompts.judge(self.rule, draft, leaning, transcript)
            questions.append(self.paid.answer(Vote, chat, f"{about}/{leaning}"))
        # Both are waited for: an answer costs the same either way.
        answers = await asyncio.gather(*questions, return_exceptions=True)
        votes: dict[Leaning, Vote] = {}
        for leaning, answer in zip(prompts.PROMPTS.leanings, answers, strict=True):
            if isinstance(answer, BaseException):
                raise answer
            votes[leaning] = answer
        return votes

    def _example(
        self, draft: ConversationDraft, topic: Topic, effort: Mapping[str, int]
    ) -> Example:
        identity = f"{self.rule.id}/llm/{self.seed}/{topic.number}"
        return Example(
            id=identity,
            rule=self.rule.id,
            messages=draft.as_messages,
            label=topic.label,
            split="train",  # until it is assigned to a split
            source=f"BARRED by {self.paid.endpoint.model}",
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

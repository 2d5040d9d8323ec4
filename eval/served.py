"""What the served engine answers on a trial: every method, and the bare base when it is the judge.

Requests go conversation by conversation, the base and the methods that share its prefill side by
side. Answers are kept as they come; a second run asks only for what is missing, and starts no
engine when nothing is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from tqdm import tqdm

from eval.answers import Answer
from eval.trial import Contestant, Trial
from guard.conversation.example import Example
from guard.coverage import ConversationForm
from guard.files.answer_file import AnswerFile
from guard.layout import fingerprint
from guard.machine.provenance import versions
from guard.method import METHODS
from guard.recipe import Recipe
from guard.verdict import Calibration
from serve.engine import CODE, GuardEngine, Refusal, Score, ScoreRequest

CHUNK = 512  # requests between two writes to disk: what a kill can cost
ZERO_SHOT = Calibration()  # the base as a judge is not calibrated: yes where P(yes) >= 0.5
BASE = "base"  # the bare base's name in kept rows


class Predictor(Protocol):
    """What evaluation needs of an engine."""

    def score(self, requests: Sequence[ScoreRequest]) -> Sequence[Score | Refusal]: ...


OpenPredictor = Callable[[Recipe, Mapping[str, Path]], AbstractContextManager[Predictor]]


def open_engine(recipe: Recipe, adapters: Mapping[str, Path]) -> AbstractContextManager[Predictor]:
    return GuardEngine(recipe, adapters)


@dataclass(frozen=True)
class ServedRow:
    """One kept outcome: a logit in nats, or why the engine refused."""

    key: str
    id: str
    by: str
    logit: float | None
    refusal: str | None


@dataclass(frozen=True)
class EngineQuery:
    """One example put to one contestant; to the bare base where `contestant` is None."""

    trial: Trial
    example: Example
    contestant: Contestant | None

    @property
    def key(self) -> str:
        """Hash of everything the logit depends on."""
        recipe = self.trial.recipe
        weights: list[Any] | None = None
        if self.contestant is not None:
            card = self.contestant.card
            weights = [self.contestant.method, card.files, card.reads]
        of_recipe: list[Any] = [recipe.base, self.trial.base_revision, recipe.serving_dtype]
        of_recipe += [recipe.context_tokens, recipe.window_tokens]
        of_recipe += [recipe.answer_prefix, recipe.engine]
        return fingerprint(
            of_recipe,
            answering_code(),
            weights,
            self._rule_text,
            [[message.role, message.content] for message in self.example.messages],
        )

    @property
    def request(self) -> ScoreRequest:
        name = None
        if self.contestant is not None:
            name = self.contestant.name
        return ScoreRequest(self.example.messages, self._rule_text, name)

    @property
    def _rule_text(self) -> str:
        """The text that a contestant was trained with; the bare base has to be told the rule."""
        if self.contestant is None:
            return self.trial.rule.text()
        return self.contestant.card.rule_text

    def row(self, outcome: Score | Refusal) -> ServedRow:
        by = self.request.adapter or BASE
        if isinstance(outcome, Refusal):
            return ServedRow(self.key, self.example.id, by, None, str(outcome))
        return ServedRow(self.key, self.example.id, by, outcome.logit, None)


class Served:
    """The engine's kept answers on one trial."""

    def __init__(self, trial: Trial, *, with_base: bool) -> None:
        self.trial = trial
        self._order = _contestants_in_order(trial, with_base)
        self._file = AnswerFile(trial.folder / "served.jsonl", ServedRow)

    def forget(self) -> None:
        self._file.forget()

    def missing(self) -> list[EngineQuery]:
        """What is still to be asked, in an order that shares prefills; what was refused is, too."""
        missing = []
        for example in self.trial.examples:
            for contestant in self._order:
                query = EngineQuery(self.trial, example, contestant)
                row = self._file.get(query.key)
                if row is None or row.refusal is not None:
                    missing.append(query)
        return missing

    def keep(self, rows: list[ServedRow]) -> None:
        self._file.add(rows)

    def rows(self, contestant: Contestant | None) -> list[ServedRow]:
        """One outcome per test example, in order. Raises KeyError if one was never asked."""
        rows = []
        for example in self.trial.examples:
            query = EngineQuery(self.trial, example, contestant)
            row = self._file.get(query.key)
            if row is None:
                raise KeyError(f"{example.id} was never put to {query.request.adapter or BASE}")
            # the same conversation may have been kept under another id
            rows.append(replace(row, id=example.id))
        return rows

    def answers(self, contestant: Contestant | None) -> list[Answer]:
        """One calibrated answer per test example, in order; a refusal is no answer."""
        calibration = ZERO_SHOT
        if contestant is not None:
            calibration = contestant.card.calibration
        answers: list[Answer] = []
        for example, row in zip(self.trial.examples, self.rows(contestant), strict=True):
            if row.logit is None:
                answers.append(Answer(None))
                continue
            form = ConversationForm(example.messages)
            it = calibration.verdict(self.trial.rule.id, row.logit, form)
            answers.append(Answer(it.violates, row.logit, it.p_violation, it.confident))
        return answers

    def answers_by_seed(self, method: str) -> dict[int, list[Answer]]:
        by_seed = self.trial.by_seed(method)
        return {seed: self.answers(contestant) for seed, contestant in by_seed.items()}


def score_missing(
    served: Iterable[Served], recipe: Recipe, open_predictor: OpenPredictor = open_engine
) -> None:
    """Ask one engine everything that is missing on any trial; none starts for nothing."""
    pending = [(kept, kept.missing()) for kept in served]
    folders: dict[str, Path] = {}
    for _, queries in pending:
        for query in queries:
            if query.contestant is not None:
                folders[query.contestant.name] = query.contestant.folder
    total = sum(len(queries) for _, queries in pending)
    if not total:
        return
    with (
        open_predictor(recipe, folders) as predictor,
        tqdm(total=total, unit="prompt", desc="served engine") as bar,
    ):
        for kept, queries in pending:
            for start in range(0, len(queries), CHUNK):
                chunk = queries[start : start + CHUNK]
                outcomes = predictor.score([query.request for query in chunk])
                answered = zip(chunk, outcomes, strict=True)
                kept.keep([query.row(outcome) for query, outcome in answered])
                bar.update(len(chunk))


def _contestants_in_order(trial: Trial, with_base: bool) -> list[Contestant | None]:
    """The contestants, None for the base. The base and the methods that share the conversation's
    prefill come first: the blocks of the others would push it out of the cache.
    """
    order: list[Contestant | None] = []
    if with_base:
        order.append(None)
    for method in sorted(trial.methods, key=lambda name: not METHODS[name].shares_conversation):
        order += trial.by_seed(method).values()
    return order


@cache
def answering_code() -> str:
    installed = versions()
    return fingerprint(installed.get("vllm"), installed.get("torch"), *CODE)

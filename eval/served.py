"""What the served engine answers on a trial: the adapters, and the bare base when it is the judge. Knows nothing of labels.

Requests go conversation by conversation, every aLoRA and the base side by side, because these share one prefill. Answers are kept
as they come; a second run asks only for what is missing, and starts no engine when nothing is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Protocol

from tqdm import tqdm

from eval.answer import Answer
from eval.trial import Contestant, Trial
from guard.example import Example
from guard.files.answer_file import AnswerFile
from guard.layout import fingerprint
from guard.provenance import versions
from guard.recipe import Recipe
from guard.verdict import Calibration
from serve.engine import CODE, GuardEngine, Refusal, Score, ScoreRequest

CHUNK = 512  # requests between two writes to disk: what a kill can cost
ZERO_SHOT = Calibration()  # the base as a judge is not calibrated: yes where P(yes) >= 0.5


class Predictor(Protocol):
    """What evaluation needs of an engine."""

    def score(self, requests: Sequence[ScoreRequest]) -> Sequence[Score | Refusal]:
        """One outcome per request, in order."""
        ...


OpenPredictor = Callable[[Recipe, Mapping[str, Path]], AbstractContextManager[Predictor]]


def open_engine(recipe: Recipe, adapters: Mapping[str, Path]) -> AbstractContextManager[Predictor]:
    """The real engine with `adapters` (name -> folder) ready to be asked."""
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
class Question:
    """One example put to one contestant; to the bare base where `contestant` is None."""

    trial: Trial
    example: Example
    contestant: Contestant | None

    @property
    def key(self) -> str:
        """Hash of everything the logit depends on."""
        recipe, adapter = self.trial.recipe, self.contestant
        return fingerprint(
            [
                recipe.base,
                self.trial.base_revision,
                recipe.dtype,
                recipe.context_tokens,
                recipe.answer_prefix,
                recipe.engine,
            ],
            answering_code(),
            [adapter.method, adapter.card.weights_sha256, adapter.config_hash] if adapter else None,
            self._rule_text,
            [[message.role, message.content] for message in self.example.messages],
        )

    @property
    def request(self) -> ScoreRequest:
        """The question in the engine's terms."""
        return ScoreRequest(
            self.example.messages,
            self._rule_text,
            self.contestant.name if self.contestant else None,
        )

    @property
    def _rule_text(self) -> str:
        """An adapter's is what it was trained with; the bare base has to be told the rule."""
        return self.contestant.card.rule_text if self.contestant else self.trial.rule.text()

    def row(self, outcome: Score | Refusal) -> ServedRow:
        """The engine's outcome, ready to be kept."""
        by = self.contestant.name if self.contestant else "base"
        if isinstance(outcome, Refusal):
            return ServedRow(self.key, self.example.id, by, None, str(outcome))
        return ServedRow(self.key, self.example.id, by, outcome.logit, None)


class Served:
    """The engine's kept answers on one trial."""

    def __init__(self, trial: Trial, *, with_base: bool) -> None:
        self.trial = trial
        # aLoRA and base first: they share the conversation's prefill, and a LoRA's own blocks would push it out of the cache
        sharing: list[Contestant | None] = [None] if with_base else []
        self._asked = [*sharing, *trial.by_seed("alora").values(), *trial.by_seed("lora").values()]
        self._file = AnswerFile(trial.folder / "served.jsonl", ServedRow)

    def forget(self) -> None:
        """Drop every kept answer."""
        self._file.forget()

    def missing(self) -> list[Question]:
        """What is still to be asked, in an order that shares prefills. A refusal is asked again: its cause may be gone."""
        asked = (
            Question(self.trial, example, contestant)
            for example in self.trial.examples
            for contestant in self._asked
        )
        return [
            question
            for question in asked
            if (row := self._file.get(question.key)) is None or row.refusal is not None
        ]

    def keep(self, rows: list[ServedRow]) -> None:
        """Keep the engine's outcomes."""
        self._file.add(rows)

    def rows(self, contestant: Contestant | None) -> list[ServedRow]:
        """One outcome per test example, in order. Raises KeyError if one was never asked."""
        found = []
        for example in self.trial.examples:
            row = self._file.get(Question(self.trial, example, contestant).key)
            if row is None:
                raise KeyError(
                    f"{example.id} was never put to {contestant.name if contestant else 'the base'}"
                )
            found.append(
                replace(row, id=example.id)
            )  # the same conversation may have been kept under another id
        return found

    def answers(self, contestant: Contestant | None) -> list[Answer]:
        """One calibrated answer per test example, in order; a refusal is no answer."""
        calibration = contestant.card.calibration if contestant else ZERO_SHOT
        return [
            _answer(calibration, self.trial.rule.id, row.logit) for row in self.rows(contestant)
        ]


def score_missing(
    served: Iterable[Served], recipe: Recipe, open_predictor: OpenPredictor = open_engine
) -> None:
    """Ask one engine everything that is missing on any trial. Starts none when nothing is."""
    pending = [(each, questions) for each in served if (questions := each.missing())]
    if not pending:
        return
    adapters = {
        question.contestant.name: question.contestant.folder
        for _, questions in pending
        for question in questions
        if question.contestant
    }
    total = sum(len(questions) for _, questions in pending)
    with (
        open_predictor(recipe, adapters) as predictor,
        tqdm(total=total, unit="prompt", desc="served engine") as bar,
    ):
        for each, questions in pending:
            for start in range(0, len(questions), CHUNK):
                chunk = questions[start : start + CHUNK]
                outcomes = predictor.score([question.request for question in chunk])
                each.keep(
                    [
                        question.row(outcome)
                        for question, outcome in zip(chunk, outcomes, strict=True)
                    ]
                )
                bar.update(len(chunk))


def _answer(calibration: Calibration, rule: str, logit: float | None) -> Answer:
    if logit is None:
        return Answer(None)
    verdict = calibration.verdict(rule, logit)
    return Answer(verdict.violates, logit, verdict.p_violation, verdict.confident)


@cache
def answering_code() -> str:
    """Fingerprint of the software that makes an answer: vLLM, torch and our own."""
    installed = versions()
    return fingerprint(installed.get("vllm"), installed.get("torch"), *CODE)

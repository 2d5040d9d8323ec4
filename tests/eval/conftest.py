"""A small world to evaluate: a rule, its test data and adapter folders in a temporary `runs/`, and
an engine that is a formula.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pytest import MonkeyPatch

from eval.answers import Answer
from eval.trial import Trial, load_trial
from guard.conversation.example import SPLITS, Example, Message, Split, write_examples
from guard.layout import Runs, fingerprint
from guard.method import METHODS
from guard.prompt.builders import prompt_builder
from guard.prompt.decoder import PromptBuilder
from guard.prompt.encodings import decoded
from guard.recipe import MethodSettings, Recipe
from guard.rule import load_rule, text_hash
from guard.verdict import Calibration
from guard.weights.card import Card, file_digests
from guard.weights.head import answer_hash
from guard.weights.predictions import write_predictions
from serve.engine import Refusal, Score, ScoreRequest

RULE = """\
id: {name}
title: No medical advice
policy: The assistant must not give medical advice to the user.
judged: assistant
terms: [advice is a recommendation to one person]
violates: [names a dose]
allows: [general information]
examples:
  - {{text: Take two., violates: true}}
"""
TOY = Recipe(
    name="toy",
    base="nobody/toy",
    revision="1" * 40,
    dtype="float32",
    context_tokens=1024,
    methods={method: MethodSettings(lora={"r": 1}) for method in ("lora", "alora")},
)
WITH_HEAD = TOY.model_copy(update={"methods": TOY.methods | {"head": MethodSettings()}})


def evidence(messages: Iterable[Message]) -> float:
    """What the toy engine reads off a conversation: the highest of the numbers that stand by
    themselves in it.
    """
    numbers = [0.0]  # a text in base64 of a few characters says nothing
    for message in messages:
        numbers += map(float, re.findall(r"(?<![\w-])-?\d+(?!\w)", decoded(message.content)))
    return max(numbers[1:] or numbers)


def guess_or_read(request: ScoreRequest) -> float:
    """The bare base always says yes; adapters read the evidence."""
    return 1.0 if request.adapter is None else evidence(request.messages)


def words_rows(name: str, split: Split, rows: int = 8) -> list[Example]:
    """What the bag of words is fitted on: violating rows speak of tablets, others of doctors."""
    texts = ("ask a doctor about case", "take two tablets in case")
    made = []
    for number in range(rows):
        said = (Message("user", "Hm?"), Message("assistant", texts[number % 2]))
        identity = f"{split}-{number}"
        made.append(Example(identity, name, said, number % 2, split, "toy", identity))
    return made


@pytest.fixture(autouse=True, scope="session")
def prompts_of_the_toy_base() -> Iterator[None]:
    """It has no tokenizer, here or on a hub."""

    def builder(recipe: Recipe) -> PromptBuilder | SimpleNamespace:
        if recipe.base == TOY.base:
            return SimpleNamespace(hash="prompt")
        return prompt_builder(recipe)

    with MonkeyPatch.context() as patch:
        patch.setattr("eval.trial.prompt_builder", builder)
        yield


@dataclass
class World:
    """Rules, data and adapters on disk; write what a test needs, then evaluate."""

    root: Path
    recipe: Recipe = TOY
    runs: Runs = field(init=False)
    rules: Path = field(init=False)

    def __post_init__(self) -> None:
        self.runs, self.rules = Runs(self.root / "runs"), self.root / "rules"
        self.rules.mkdir()

    def add_rule(
        self, name: str = "medical", *, examples: int = 40, seeds: Sequence[int] = (0,)
    ) -> None:
        """A rule whose odd test examples violate it; both adapters agree with the toy engine."""
        (self.rules / f"{name}.yaml").write_text(RULE.format(name=name))
        rows = []
        for number in range(examples):
            told = f"case of {name} {number if number % 2 else -number - 1}"
            said = (Message("user", "What now?"), Message("assistant", told))
            group = f"g{number // 2}"
            row = Example(f"{name}-{number}", name, said, number % 2, "test", "toy", group)
            stratum = "seen" if number % 4 < 2 else "unseen"
            rows.append(replace(row, meta={"stratum": stratum}))
        self.write_test(name, rows, seeds)

    def write_test(self, name: str, rows: Sequence[Example], seeds: Sequence[int] = (0,)) -> None:
        """The test split, splits that the bag of words alone reads, and weights trained on them."""
        for split in ("train", "validation"):
            write_examples(self.runs.data(name) / f"{split}.jsonl", words_rows(name, split))
        write_examples(self.runs.data(name) / "test.jsonl", rows)
        for method in self.recipe.methods:
            for seed in seeds if METHODS[method].is_seeded else (0,):
                logits = {row.id: evidence(row.messages) for row in rows}
                self.add_adapter(name, method, seed, logits)

    def trial(self, name: str = "medical", **options: Any) -> Trial:
        revision = self.recipe.base_revision
        return load_trial(self.runs, self.recipe, revision, name, rules=self.rules, **options)

    def add_adapter(
        self, name: str, method: str, seed: int, logits: Mapping[str, float], /, **card: object
    ) -> Path:
        """Weights as the training stage leaves them; `card` overrides fields of card.json."""
        folder = self.runs.adapter(self.recipe.name, name, method, seed)
        folder.mkdir(parents=True, exist_ok=True)
        weights = folder / METHODS[method].weights
        if not weights.exists():
            weights.write_bytes(f"{name} {method} {seed}".encode())
            if METHODS[method].is_adapter:
                config = {"peft_type": "LORA", "of": method}
                (folder / "adapter_config.json").write_text(json.dumps(config))
        predictions = [(key, "test", logit) for key, logit in logits.items()]
        write_predictions(folder, [*predictions, ("other", "validation", 0.0)])
        rule = load_rule(name, self.rules)
        data, text = self.runs.data(name), rule.text(self.recipe.rule_turn_of(method))
        fields: dict[str, object] = {
            **{"rule": name, "rule_text": text, "rule_hash": text_hash(text)},
            **{"prompt_hash": "prompt", "answer_hash": answer_hash(), "method": method},
            **{"model": self.recipe.name, "base": self.recipe.base},
            "base_revision": self.recipe.base_revision,
            "data_hash": fingerprint(*(data / f"{split}.jsonl" for split in SPLITS)),
            "test_sha256": hashlib.sha256((data / "test.jsonl").read_bytes()).hexdigest(),
            "recipe": self.recipe.training_settings(method),
            **{"seed": seed, "versions": {}, "metrics": {}, "coverage": None},
            **{"temperature": 2.0, "bias": 0.0, "uncertainty_band": (0.5, 0.5), "threshold": 0.5},
            **{"max_fpr": rule.max_fpr, "files": file_digests(folder, method)},
        }
        Card(**{**fields, **card}).save(folder)  # type: ignore[arg-type]
        return folder


def answers(logits: Sequence[float | None]) -> list[Answer]:
    answered = []
    for logit in logits:
        p = None if logit is None else Calibration().p_violation(logit)
        answered.append(Answer(None if p is None else p >= 0.5, logit, p))
    return answered


@dataclass
class ToyEngine:
    """An engine whose logit is a formula of the request; counts what it is asked and how often it
    is opened.
    """

    logit: Callable[[ScoreRequest], float | str] = lambda request: evidence(request.messages)
    requests: list[ScoreRequest] = field(default_factory=list)
    opened_with: list[dict[str, Path]] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)

    @contextmanager
    def open(self, recipe: Recipe, adapters: Mapping[str, Path]) -> Iterator[ToyEngine]:
        self.opened_with.append(dict(adapters))
        self.dtypes.append(recipe.serving_dtype)
        yield self

    def score(self, requests: Sequence[ScoreRequest]) -> list[Score | Refusal]:
        self.requests += requests
        return [_outcome(self.logit(request)) for request in requests]


def _outcome(logit: float | str) -> Score | Refusal:
    if isinstance(logit, str):
        return Refusal("toy", logit, "nan")
    return Score(logit, cached_tokens=0, computed_tokens=1, latency_ms=1.0)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)

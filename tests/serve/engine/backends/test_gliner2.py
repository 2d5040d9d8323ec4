"""GLiNER2's engine against gliner2 and plain PEFT: in mixed batches and in windows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from guard.conversation.example import Message
from guard.errors import GuardError
from guard.prompt.gliner2 import Gliner2PromptBuilder
from guard.recipe import Recipe
from serve.engine import GuardEngine, Refusal, ScoreRequest
from serve.engine.backend import BackendRequest
from tests.gliner2_toy import (
    CLASSIFIER_TARGETS,
    ENCODER_TARGETS,
    TARGETS,
    adapted,
    gliner2_recipe,
    reference_logit,
    save_adapter,
    save_base,
    save_card,
)
from tests.serve.engine.shared import logits

pytestmark = pytest.mark.slow

PARITY = 1e-5
SHORT = (Message("user", "My head hurts."), Message("assistant", "Take 800 mg of ibuprofen."))
LONG = (Message("user", "Tell me a story."), Message("assistant", "A knee hurt. " * 60))
# Name -> rank, targets and the rule's text. More than there are slots.
RULES: dict[str, tuple[int, tuple[str, ...], str]] = {
    "all": (8, TARGETS, "The assistant must not give medical advice."),
    "low": (2, ENCODER_TARGETS, "The assistant must not promise a refund."),
    "classifier": (4, CLASSIFIER_TARGETS, "The user must not be rude."),
    "query": (8, ("query_proj",), "The assistant must not give medical advice."),
    "again": (8, TARGETS, "Nobody may mention a knee."),
}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    return gliner2_recipe(save_base(tmp_path_factory.mktemp("gliner2")))


@pytest.fixture(scope="module")
def folders(recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("rules")
    made: dict[str, Path] = {}
    for seed, (name, (rank, targets, text)) in enumerate(RULES.items(), start=1):
        made[name] = save_adapter(root / name, seed=seed, rank=rank, targets=targets)
        save_card(made[name], recipe, text)
    return made


@pytest.fixture(scope="module")
def engine(recipe: Recipe, folders: dict[str, Path]) -> Iterator[GuardEngine]:
    with GuardEngine(recipe, folders) as engine:
        yield engine


def test_a_mixed_batch_says_what_gliner2_says_with_each_alone(
    engine: GuardEngine, recipe: Recipe, folders: dict[str, Path]
) -> None:
    """And without one: the base answers a rule that it is told."""
    builder = Gliner2PromptBuilder.of(recipe)
    asked: list[tuple[tuple[Message, ...], str, str | None]] = []
    expected: list[float] = []
    assert len(builder.windows(builder.build(LONG, RULES["all"][2]).token_ids, "assistant")) > 2
    for messages in (SHORT, LONG):
        asked.append((messages, "The user must not be rude.", None))
        asked += [(messages, text, name) for name, (_, _, text) in RULES.items()]
    for messages, text, name in asked:
        model = adapted(folders[name] if name else None)
        expected.append(reference_logit(model, builder, messages, text))
    served = logits(engine.score([ScoreRequest(*request) for request in asked]))
    assert served == pytest.approx(expected, abs=PARITY)
    assert len({round(logit, 3) for logit in expected}) == len(expected)


def test_a_rule_that_is_not_said_is_refused_and_a_state_is_not_given(engine: GuardEngine) -> None:
    (outcome,) = engine.score([ScoreRequest(SHORT, "", None)])
    assert isinstance(outcome, Refusal) and "has no text" in outcome.why
    with pytest.raises(GuardError, match="no state that a head could read"):
        engine.backend.submit(BackendRequest([1], [1], wants_state=True))

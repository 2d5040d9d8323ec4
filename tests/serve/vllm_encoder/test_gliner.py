"""GLiNER2 in vLLM against gliner2 and PEFT: every layer alone that an adapter may target. Whole
rules are compared in tests/serve/engine/backends/test_gliner2.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from guard.conversation.example import Message
from guard.errors import GuardError
from guard.method import PEFT_WEIGHTS
from guard.prompt.gliner2 import Gliner2PromptBuilder
from guard.recipe import Recipe
from serve.engine import GuardEngine, Refusal, ScoreRequest
from tests.gliner2_toy import (
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

RULE = "The assistant must not give medical advice."
TEXTS = (
    (Message("user", "My head hurts."),),
    (Message("user", "Hello"), Message("assistant", "Take 800 mg of ibuprofen and rest. " * 3)),
)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    return gliner2_recipe(save_base(tmp_path_factory.mktemp("gliner2")))


@pytest.fixture(scope="module")
def folders(recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An adapter of each target."""
    root, folders = tmp_path_factory.mktemp("rules"), {}
    for seed, target in enumerate(TARGETS):
        folders[target] = save_adapter(root / target, seed=seed, rank=2, targets=[target])
        save_card(folders[target], recipe, RULE)
    return folders


@pytest.fixture(scope="module")
def engine(recipe: Recipe, folders: dict[str, Path]) -> Iterator[GuardEngine]:
    with GuardEngine(recipe, folders, max_loras=len(TARGETS) + 1) as engine:
        yield engine


def test_every_target_says_what_it_says_in_gliner2_though_a_mate_is_not_finite(
    engine: GuardEngine, recipe: Recipe, folders: dict[str, Path], tmp_path: Path
) -> None:
    """The mate's states are the step's first, which all shorter rows read behind their end."""
    broken = save_adapter(tmp_path / "broken", seed=1, rank=8, targets=ENCODER_TARGETS)
    tensors = load_file(broken / PEFT_WEIGHTS)
    huge = {key: tensor * 1e30 for key, tensor in tensors.items()}  # finite, as no product of them
    save_file(huge, broken / PEFT_WEIGHTS)
    save_card(broken, recipe, RULE)
    engine.add("broken", broken)
    asked = [ScoreRequest(messages, RULE, target) for messages in TEXTS for target in TARGETS]
    refused, *scores = engine.score([ScoreRequest(TEXTS[1], RULE, "broken"), *asked])
    assert isinstance(refused, Refusal) and "nan" in refused.why
    builder = Gliner2PromptBuilder.of(recipe)
    for request, logit in zip(asked, logits(scores), strict=True):
        model = adapted(folders[request.adapter or ""])
        expected = reference_logit(model, builder, request.messages, RULE)
        assert logit == pytest.approx(expected, abs=1e-5), request.adapter
    assert len({round(logit, 3) for logit in logits(scores)}) == len(asked)


def test_a_tensor_that_has_no_place_is_refused(
    engine: GuardEngine, recipe: Recipe, tmp_path: Path
) -> None:
    """vLLM would drop it silently; `count_pred` is a head that is not served."""
    folder = save_adapter(tmp_path / "odd", seed=1, rank=4, targets=("query_proj", "count_pred.0"))
    tensors = load_file(folder / PEFT_WEIGHTS)
    placed = {key: tensor for key, tensor in tensors.items() if "count_pred" not in key}
    misnamed = {key.replace(".self.", ".self_attn."): tensor for key, tensor in placed.items()}
    for without_place, name in ((tensors, r"count_pred\.0"), (misnamed, "self_attn")):
        save_file(without_place, folder / PEFT_WEIGHTS)
        save_card(folder, recipe, RULE)
        with pytest.raises(GuardError, match=name):
            engine.add("odd", folder)

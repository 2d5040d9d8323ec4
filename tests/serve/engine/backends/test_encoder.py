"""The encoder's engine against plain transformers and PEFT: in mixed batches, with few slots, in
windows; and what it counts.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from guard.errors import GuardError
from guard.example import Message
from serve.engine import GuardEngine, Score, ScoreRequest
from serve.engine.head import CLASSIFIER
from tests.serve.encoder_rules import (
    ENGINE,
    recipe,
    reference_logit,
    save_encoder_card,
    save_encoder_head,
    save_encoder_rule,
)

pytestmark = pytest.mark.slow

PARITY = 1e-5
SHORT = (Message("user", "My head hurts."), Message("assistant", "Take 800 mg of ibuprofen."))
LONG = (
    Message("user", "Tell me a story."),
    Message("assistant", "Once upon a time a knee hurt very much. " * 90),
    Message("user", "And then?"),
)
# Name -> rank and targets: of all kinds that a rule may have.
ADAPTERS = {
    "all": (16, ("query", "key", "value", "dense")),
    "low": (4, ("query", "key", "value", "dense")),
    "attention": (8, ("query", "value")),
    "key": (8, ("key",)),
    "dense": (8, ("dense",)),
    "again": (16, ("query", "key", "value", "dense")),
}


@pytest.fixture(scope="module")
def folders() -> Iterator[dict[str, Path]]:
    with tempfile.TemporaryDirectory(prefix="encoder-rules-") as root:
        made = {}
        for seed, (name, (rank, targets)) in enumerate(ADAPTERS.items(), start=1):
            made[name] = save_encoder_rule(Path(root, name), seed=seed, rank=rank, targets=targets)
        for seed in (1, 2):
            made[f"head{seed}"] = save_encoder_head(Path(root, f"head{seed}"), seed=seed)
        yield made


@pytest.fixture(scope="module")
def engine(folders: dict[str, Path]) -> Iterator[GuardEngine]:
    with GuardEngine(recipe(), folders, **ENGINE) as engine:
        yield engine


def logits(engine: GuardEngine, requests: list[ScoreRequest]) -> list[float]:
    outcomes = engine.score(requests)
    assert all(isinstance(outcome, Score) for outcome in outcomes), outcomes
    return [outcome.logit for outcome in outcomes if isinstance(outcome, Score)]


def test_a_mixed_batch_says_what_each_rule_alone_says_in_peft(
    engine: GuardEngine, folders: dict[str, Path]
) -> None:
    requests = [ScoreRequest(messages, "", name) for messages in (SHORT, LONG) for name in folders]
    for request, logit in zip(requests, logits(engine, requests), strict=True):
        assert request.adapter is not None
        expected = reference_logit(request.messages, folders[request.adapter])
        assert logit == pytest.approx(expected, abs=PARITY), request.adapter


def test_a_logit_is_independent_of_its_batch_mates(engine: GuardEngine) -> None:
    (alone,) = logits(engine, [ScoreRequest(SHORT, "", "all")])
    mates = [ScoreRequest(LONG, "", name) for name in ADAPTERS]
    together = logits(engine, [*mates, ScoreRequest(SHORT, "", "all"), *mates])
    assert together[len(mates)] == pytest.approx(alone, abs=PARITY)


def test_eviction_changes_nothing(engine: GuardEngine) -> None:
    """Six adapters, four slots."""
    before = logits(engine, [ScoreRequest(SHORT, "", name) for name in ADAPTERS])
    swap_ins = engine.swap_ins
    for _ in range(2):
        for name, logit in zip(ADAPTERS, before, strict=True):
            assert logits(engine, [ScoreRequest(SHORT, "", name)]) == [
                pytest.approx(logit, abs=PARITY)
            ]
    assert engine.swap_ins > swap_ins
    assert engine.adapter_loads == len(ADAPTERS)


def test_heads_on_the_frozen_encoder_share_one_reading(engine: GuardEngine) -> None:
    check = engine.check(SHORT, ["head1", "head2"])
    one = engine.check(SHORT, ["head1"])
    assert check.computed_tokens == one.computed_tokens > 0
    adapters = engine.check(SHORT, ["all", "low"])
    assert adapters.computed_tokens == 2 * one.computed_tokens


def test_the_bare_encoder_answers_nothing(engine: GuardEngine) -> None:
    (outcome,) = engine.score([ScoreRequest(SHORT, "", None)])
    assert "no verdict of its own" in str(outcome)


def test_a_conversation_beyond_the_context_is_refused(engine: GuardEngine) -> None:
    too_long = (Message("user", "word " * 9000),)
    assert set(engine.check(too_long).refused) == set(engine.rules)


def test_a_target_that_the_model_has_not_is_refused(engine: GuardEngine, tmp_path: Path) -> None:
    """vLLM would drop it silently."""
    folder = save_encoder_rule(tmp_path / "odd", seed=1)
    weights = folder / "adapter_model.safetensors"
    tensors = load_file(weights)
    renamed = {key.replace("layer.5.", "layer.9."): value for key, value in tensors.items()}
    save_file(renamed, weights)
    save_encoder_card(folder, "lora")
    with pytest.raises(GuardError, match=r"layers that the engine cannot adapt.*layer\.9"):
        engine.add("odd", folder)


def test_an_adapter_without_a_head_is_refused(engine: GuardEngine, tmp_path: Path) -> None:
    folder = save_encoder_rule(tmp_path / "headless", seed=1)
    weights = folder / "adapter_model.safetensors"
    tensors = {key: value for key, value in load_file(weights).items() if CLASSIFIER not in key}
    save_file(tensors, weights)
    save_encoder_card(folder, "lora")
    with pytest.raises(GuardError, match="classifier of the labels no and yes"):
        engine.add("headless", folder)


@pytest.mark.parametrize(("slots", "forwards"), [(1, 16), (4, 4), (16, 1)])
def test_64_requests_over_16_adapters_take_as_many_forwards_as_slots_leave(
    folders: dict[str, Path], slots: int, forwards: int
) -> None:
    names = {f"rule{index}": folders["low"] for index in range(16)}
    conversations = [(Message("user", f"number {index}"),) for index in range(4)]
    requests = [ScoreRequest(messages, "", name) for messages in conversations for name in names]
    with GuardEngine(recipe(), names, enforce_eager=True, max_loras=slots) as engine:
        call = engine.submit(requests)
        steps = 0
        while not call.done:
            engine.step()
            steps += 1
    assert steps == forwards

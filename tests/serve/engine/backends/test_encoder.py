"""The encoder's engine against plain transformers and PEFT, and what it counts."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from safetensors.torch import load_file as load_tensors
from safetensors.torch import save_file as save_tensors

from guard.conversation.example import Message
from guard.errors import GuardError
from guard.method import PEFT_WEIGHTS, WORDS
from guard.rule import Judged
from guard.weights.card import load_card
from serve.engine import GuardEngine, ScoreRequest
from serve.engine.head import CLASSIFIER, load_classifier
from tests.serve import encoder_rules
from tests.serve.engine.shared import logits

pytestmark = pytest.mark.slow

PARITY = 3e-5
SHORT = (Message("user", "My head hurts."), Message("assistant", "Take 800 mg of ibuprofen."))
LONG = (
    Message("user", "Tell me a story."),
    Message("assistant", "Once upon a time a knee hurt very much. " * 60),
    Message("user", "And then?"),
)
EVERYBODY = (
    Message(
        "system", "You answer questions. A note: knees hurt in the rain, as everybody says. " * 3
    ),
    Message("user", "What does my mail say?"),
    Message("tool", "The doctor writes that you should rest your knee. " * 60),
    Message("assistant", "To rest."),
)
CONVERSATIONS = (SHORT, LONG, EVERYBODY)
# Name -> rank, targets and who is judged: of all kinds that a rule may have.
ADAPTERS: dict[str, tuple[int, tuple[str, ...], Judged]] = {
    "all": (16, ("query", "key", "value", "dense"), "conversation"),
    "low": (4, ("query", "key", "value", "dense"), "assistant"),
    "attention": (8, ("query", "value"), "user"),
    "key": (8, ("key",), "tool"),
    "dense": (8, ("dense",), "conversation"),
    "again": (16, ("query", "key", "value", "dense"), "user"),
}
WITH_WORDS = ("low", "attention", "again")
HEADS: dict[str, Judged] = {"head1": "conversation", "head2": "user", "head3": "tool"}


@pytest.fixture(scope="module")
def folders() -> Iterator[dict[str, Path]]:
    with tempfile.TemporaryDirectory(prefix="encoder-rules-") as root:
        made = {}
        for seed, (name, (rank, targets, reads)) in enumerate(ADAPTERS.items(), start=1):
            texts = CONVERSATIONS if name in WITH_WORDS else ()
            made[name] = encoder_rules.save_encoder_rule(
                Path(root, name), seed=seed, rank=rank, targets=targets, reads=reads, texts=texts
            )
        for seed, (name, reads) in enumerate(HEADS.items(), start=1):
            made[name] = encoder_rules.save_encoder_head(Path(root, name), seed=seed, reads=reads)
        yield made


@pytest.fixture(scope="module")
def engine(folders: dict[str, Path]) -> Iterator[GuardEngine]:
    with GuardEngine(encoder_rules.recipe(), folders, **encoder_rules.ENGINE) as engine:
        yield engine


def test_a_mixed_batch_is_peft_s_by_rule(engine: GuardEngine, folders: dict[str, Path]) -> None:
    """Whoever a rule judges, also where nobody of them speaks: then all of it is judged."""
    requests: list[ScoreRequest] = []
    for messages in CONVERSATIONS:
        requests += [ScoreRequest(messages, "", name) for name in folders]
    for request, logit in zip(requests, logits(engine.score(requests)), strict=True):
        assert request.adapter is not None
        expected = encoder_rules.reference_logit(request.messages, folders[request.adapter])
        assert logit == pytest.approx(expected, abs=PARITY), request.adapter


def test_eviction_changes_nothing(engine: GuardEngine) -> None:
    """Six adapters, four slots."""
    before = logits(engine.score([ScoreRequest(SHORT, "", name) for name in ADAPTERS]))
    swap_ins = engine.counters.swap_ins
    for _ in range(2):
        for name, logit in zip(ADAPTERS, before, strict=True):
            (again,) = logits(engine.score([ScoreRequest(SHORT, "", name)]))
            assert again == pytest.approx(logit, abs=PARITY)
    assert engine.counters.swap_ins > swap_ins
    assert engine.counters.adapter_loads == len(ADAPTERS)


def test_heads_on_the_frozen_encoder_share_one_reading(engine: GuardEngine) -> None:
    """Whoever is judged: each takes its part of the states."""
    check, one = (engine.check(SHORT, rules) for rules in (list(HEADS), ["head1"]))
    assert check.computed_tokens == one.computed_tokens > 0
    adapters = engine.check(SHORT, ["all", "low"])
    assert adapters.computed_tokens == 2 * one.computed_tokens


def test_the_bare_encoder_and_too_long_a_conversation_are_refused(engine: GuardEngine) -> None:
    (outcome,) = engine.score([ScoreRequest(SHORT, "", None)])
    assert "no verdict of its own" in str(outcome)
    too_long = (Message("user", "word " * 9000),)
    assert set(engine.check(too_long).refused) == set(engine.rules)


def test_a_classifier_in_bfloat16_is_read_as_float32(tmp_path: Path) -> None:
    """As PEFT saves it where training is in bfloat16."""
    folder = encoder_rules.save_encoder_rule(tmp_path / "narrow", seed=1)
    weights = folder / "adapter_model.safetensors"
    tensors = {name: tensor.bfloat16() for name, tensor in load_tensors(weights).items()}
    save_tensors(tensors, weights)
    encoder_rules.save_encoder_card(folder, "lora")
    head = load_classifier("narrow", folder, load_card(folder)).head
    classifier = tensors[f"{CLASSIFIER}.weight"].float()
    assert head.weight.dtype == np.float32
    assert np.array_equal(head.weight, (classifier[1] - classifier[0]).numpy())


Tensors = dict[str, np.ndarray]


def of_another_layer(tensors: Tensors) -> Tensors:  # vLLM would drop it silently
    return {key.replace("layer.5.", "layer.9."): value for key, value in tensors.items()}


def headless(tensors: Tensors) -> Tensors:
    return {key: value for key, value in tensors.items() if CLASSIFIER not in key}


def shortened(key: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {key: tensors[key][1:]}


@pytest.mark.parametrize(
    ("file", "change", "problem"),
    [
        (PEFT_WEIGHTS, of_another_layer, r"layers that the engine cannot adapt.*layer\.9"),
        (PEFT_WEIGHTS, headless, "classifier of the labels no and yes"),
        (WORDS, shortened("ngrams"), r"words\.safetensors: tensors of another"),
        (WORDS, shortened("ngram_weights"), r"words\.safetensors: tensors of another"),
    ],
)
def test_an_adapter_with_other_tensors_or_without_its_words_is_refused(
    engine: GuardEngine,
    tmp_path: Path,
    file: str,
    change: Callable[[Tensors], Tensors],
    problem: str,
) -> None:
    folder = encoder_rules.save_encoder_rule(tmp_path / "odd", seed=1, texts=CONVERSATIONS)
    save_file(change(load_file(folder / file)), folder / file)
    encoder_rules.save_encoder_card(folder, "lora")
    with pytest.raises(GuardError, match=problem):
        engine.add("odd", folder)
    (folder / WORDS).unlink()
    with pytest.raises(GuardError, match="the weights are not those of the card"):
        engine.add("odd", folder)


@pytest.mark.parametrize(("slots", "forwards"), [(1, 16), (4, 4)])
def test_a_forward_takes_as_many_as_slots(
    folders: dict[str, Path], slots: int, forwards: int
) -> None:
    names = {f"rule{index}": folders["low"] for index in range(16)}
    conversations = [(Message("user", f"number {index}"),) for index in range(4)]
    requests = [ScoreRequest(messages, "", name) for messages in conversations for name in names]
    with GuardEngine(encoder_rules.recipe(), names, enforce_eager=True, max_loras=slots) as engine:
        call = engine.submit(requests)
        while not call.done:
            engine.step()
        assert engine.counters.forward_passes == forwards

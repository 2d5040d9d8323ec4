"""Heads: which folders are admitted, and on the real vLLM plain transformers' logits, from one
request for all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from guard.conversation.example import Message
from guard.errors import GuardError
from guard.method import METHODS, Method
from guard.prompt.ngrams import NgramVocabulary
from guard.rule import text_hash
from guard.weights.head import Head, WordWeights
from serve.engine import GuardEngine, Score, ScoreRequest
from serve.engine.adapter import Requirements
from serve.engine.backend import BackendRequest, EngineOutput, SpokenSpan
from serve.engine.head import HeadInput, ServableHead
from tests.plain_words import plain_word_logit
from tests.serve.cards import RULE_TEXTS, prompts, recipe, save_card, text_of
from tests.serve.engine.shared import runner, steps_of
from tests.serve.guarded import CONVERSATION, adapter_folders, guard_engine, peft_logit
from tests.serve.heads import HEAD_FILE, HIDDEN_SIZE, reference_logit, save_head

pytestmark = pytest.mark.slow

Breakage = Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]
NATS = 1e-3  # float32: two ways to compute the same state, times 128 weights of size 1
SILENT = [f"silent head {number}" for number in range(20)]  # they are told nothing: one suffix
TOLD = ["told head", "other told head"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A head for each of SILENT and TOLD."""
    root = tmp_path_factory.mktemp("heads")
    heads = {}
    for seed, name in enumerate(SILENT):
        heads[name] = save_head(root / name, name, seed=seed, **silent())
    for seed, name in enumerate(TOLD, start=100):
        heads[name] = save_head(root / name, name, seed=seed)
    return heads


def silent() -> dict[str, object]:
    """The card's fields of a rule that is told nothing."""
    return {"rule_text": "", "rule_hash": text_hash("")}


@pytest.fixture(scope="module")
def serving(folders: Mapping[str, Path]) -> Iterator[GuardEngine]:
    """The shared engine with heads beside its adapters."""
    engine = guard_engine()
    for name, folder in folders.items():
        engine.add(name, folder)
    yield engine
    for name in folders:
        engine.remove(name)


@pytest.fixture
def engine(serving: GuardEngine) -> GuardEngine:
    """It, with an empty prefix cache."""
    serving.forget()
    return serving


def submitted(engine: GuardEngine, monkeypatch: pytest.MonkeyPatch) -> list[BackendRequest]:
    """What the backend is given from here on."""
    requests: list[BackendRequest] = []
    submit = engine.backend.submit

    def record(request: BackendRequest) -> str:
        requests.append(request)
        return submit(request)

    monkeypatch.setattr(engine.backend, "submit", record)
    return requests


def nothing_is_kept(engine: GuardEngine) -> bool:
    """Whether neither vLLM's runner nor the backend keeps anything for a head's request."""
    return not getattr(runner(engine), "kept_states", {}) and not engine.backend._wanting_state


def requirements() -> Requirements:
    return Requirements(recipe().base, recipe().base_revision, 16, prompts())


def test_a_head_folder_is_admitted_with_its_weights(tmp_path: Path) -> None:
    folder = save_head(tmp_path / "head", "head", seed=1)
    head = requirements().admit("renamed", folder)
    assert isinstance(head, ServableHead)
    tensors = load_file(folder / HEAD_FILE)
    assert (head.name, head.card.rule) == ("renamed", "head")
    read = head.head.tensors()
    assert read.keys() == tensors.keys()
    assert all(np.array_equal(read[key], tensors[key]) for key in tensors)


def test_another_method_of_a_head_s_tensors_is_served_from_its_entry_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    another = Method("ridge", "ridge", "output", "ridge.safetensors", is_seeded=False)
    monkeypatch.setitem(METHODS, another.name, another)
    folder = save_head(tmp_path / "ridge", "ridge", seed=1)
    (folder / HEAD_FILE).rename(folder / another.weights)
    save_card(folder, "ridge", "ridge")
    admitted = requirements().admit("ridge", folder)
    assert isinstance(admitted, ServableHead)
    assert np.array_equal(admitted.head.weight, load_file(folder / another.weights)["weight"])


def test_of_several_speakers_states_a_head_takes_the_highest_of_whom_its_rule_judges(
    tmp_path: Path,
) -> None:
    rows = np.zeros((4, HIDDEN_SIZE), np.float32)
    rows[:, 0] = 3.0, 1.0, 2.0, 1.5
    speakers = ("user", "assistant", "assistant", "assistant")
    highest_of = {"user": 3.0, "assistant": 2.0, "conversation": 3.0, "tool": 3.0}
    highest_of |= {"last user": 3.0, "last assistant": 1.5, "last conversation": 1.5}
    for reads, highest in highest_of.items():
        head = head_that_reads(tmp_path / reads, reads)
        assert head.logit(read(rows, speakers)) == pytest.approx(highest)
        assert head.logit(read(rows[2])) == pytest.approx(2.0)  # a decoder's: one state, of nobody


def test_heads_on_one_output_read_each_the_words_of_whom_it_judges(tmp_path: Path) -> None:
    texts = {"user": (11, 12, 13), "assistant": (12, 14), "silent": (13,)}
    spans = tuple(SpokenSpan(speaker, 0, text) for speaker, text in texts.items())
    output = EngineOutput("1", math.nan, 0, 6, np.zeros((3, HIDDEN_SIZE), np.float32), spans)
    vocabulary = NgramVocabulary(np.arange(11, 15, dtype=np.uint64), np.ones(4, np.float32))
    weights = np.array([4.0, 2.0, 1.0, 3.0], np.float32)
    shared = HeadInput(output, [])
    of_nobody = head_that_reads(tmp_path / "tool", "tool")  # which judges none of them
    assert not len(shared.words("tool").keys) and of_nobody.logit(shared) == 0.0
    for reads in ("user", "assistant", "user"):
        head = head_that_reads(tmp_path / reads, reads)
        words = Head(np.zeros(HIDDEN_SIZE, np.float32), 0.0, WordWeights(vocabulary, weights))
        expected = plain_word_logit(words.tensors(), texts[reads])
        assert replace(head, head=words).logit(shared) == pytest.approx(expected)


def read(states: np.ndarray, speakers: tuple[str, ...] = ()) -> HeadInput:
    spans = tuple(SpokenSpan(speaker, turn, ()) for turn, speaker in enumerate(speakers))
    return HeadInput(EngineOutput("1", math.nan, 0, 0, states, spans), [])


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_a_broken_state_of_any_speaker_is_no_answer(tmp_path: Path, broken: float) -> None:
    head = head_that_reads(tmp_path / "head", "assistant")
    rows = np.zeros((2, HIDDEN_SIZE), np.float32)
    rows[0, 0] = broken
    assert math.isnan(head.logit(read(rows, ("user", "assistant"))))


def head_that_reads(folder: Path, reads: str) -> ServableHead:
    """One whose logit is the first number of a state."""
    save_head(folder, folder.name, seed=1)
    weight = np.zeros(HIDDEN_SIZE, np.float32)
    weight[0] = 1.0
    save_file(Head(weight, 0.0).tensors(), folder / HEAD_FILE)
    save_card(folder, folder.name, "head", reads=reads)
    head = requirements().admit(folder.name, folder)
    assert isinstance(head, ServableHead)
    return head


def changed(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Breakage:
    return lambda tensors: tensors | {name: change(tensors[name])}


def without(*names: str) -> Breakage:
    return lambda tensors: {name: tensors[name] for name in tensors.keys() - set(names)}


def with_nan(tensor: np.ndarray) -> np.ndarray:
    tensor[3] = math.nan
    return tensor


@pytest.mark.parametrize(
    "breakage",
    [
        without("ngrams", "ngram_idf", "ngram_weights"),
        without("bias"),
        changed("ngrams", lambda tensor: tensor[::-1].copy()),
        changed("ngram_weights", with_nan),
        changed("weight", with_nan),
        changed("weight", lambda tensor: tensor.reshape(1, -1)),
        changed("weight", lambda tensor: tensor.astype(np.float64)),
        changed("weight", lambda tensor: tensor[:0]),
    ],
)
def test_a_head_with_other_tensors_is_refused(tmp_path: Path, breakage: Breakage) -> None:
    folder = save_head(tmp_path / "head", "head", seed=1)
    save_file(breakage(load_file(folder / HEAD_FILE)), folder / HEAD_FILE)
    save_card(folder, "head", "head")
    with pytest.raises(GuardError, match=r"head\.safetensors.*make train"):
        requirements().admit("head", folder)


def test_a_head_that_is_no_safetensors_file_or_not_the_card_s_is_refused(tmp_path: Path) -> None:
    folder = save_head(tmp_path / "head", "head", seed=1)
    (folder / HEAD_FILE).write_bytes(b"not one")
    with pytest.raises(GuardError, match="not those of the card"):
        requirements().admit("head", folder)
    save_card(folder, "head", "head")
    with pytest.raises(GuardError, match="cannot be read"):
        requirements().admit("head", folder)


def test_a_head_of_another_width_is_refused_and_not_served(
    engine: GuardEngine, tmp_path: Path
) -> None:
    folder = save_head(tmp_path / "wide", "wide", seed=1)
    tensors = load_file(folder / HEAD_FILE)
    tensors["weight"] = np.ones(HIDDEN_SIZE + 1, np.float32)
    save_file(tensors, folder / HEAD_FILE)
    save_card(folder, "wide", "head")
    with pytest.raises(GuardError, match=f"does not fit the base's states of {HIDDEN_SIZE}"):
        engine.add("wide", folder)
    assert "wide" not in engine.rules


@pytest.mark.parametrize("words", [1, 25, 26, 27, 28, 29, 30, 31, 60, 600, 1800])
def test_a_head_s_logit_is_that_of_plain_transformers(
    engine: GuardEngine, folders: Mapping[str, Path], words: int
) -> None:
    """Whatever part of a block the prompt ends in, and whether or not its start is cached."""
    messages = (Message("user", " ".join(["word"] * words)),)
    names = [*TOLD, *SILENT[:2]]
    expected = [reference_logit(messages, told(name), folders[name]) for name in names]
    for _ in range(2):
        check = engine.check(messages, names)
        assert [verdict.logit for verdict in check.verdicts] == pytest.approx(expected, abs=NATS)
    assert nothing_is_kept(engine)


def told(name: str) -> str:
    """What a head is told of its rule."""
    return "" if name in SILENT else text_of(name)


def test_a_prompt_that_is_prefilled_in_chunks_gives_the_state_at_its_end(
    engine: GuardEngine, folders: Mapping[str, Path]
) -> None:
    messages = (Message("user", " ".join(["word"] * 700)),)
    with steps_of(engine, 100):
        check = engine.check(messages, [TOLD[0], SILENT[0], "medical_advice"])
    heads = [TOLD[0], SILENT[0]]
    expected = [reference_logit(messages, told(name), folders[name]) for name in heads]
    logits = [verdict.logit for verdict in check.verdicts]
    assert logits[:2] == pytest.approx(expected, abs=NATS)
    assert nothing_is_kept(engine)


def test_heads_aloras_loras_and_the_base_are_answered_in_one_call(
    engine: GuardEngine, folders: Mapping[str, Path]
) -> None:
    conversations = [CONVERSATION[:turns] for turns in (1, 2, 3)]
    requests, expected = [], []
    for messages in conversations:
        for name in (TOLD[0], "medical_advice", SILENT[3], "plain", None, SILENT[4], TOLD[1]):
            text = RULE_TEXTS.get(str(name), "The assistant must not whistle.")
            if name in folders:
                text = told(str(name))
                expected.append(reference_logit(messages, text, folders[str(name)]))
            else:
                folder = adapter_folders()[name] if name else None
                expected.append(peft_logit(messages, text, folder))
            requests.append(ScoreRequest(messages, text, name))
    outcomes = engine.score(requests)
    logits = [outcome.logit for outcome in outcomes if isinstance(outcome, Score)]
    assert logits == pytest.approx(expected, abs=2 * NATS)
    assert len({round(logit, 2) for logit in expected}) > len(expected) // 2


def test_twenty_heads_on_one_suffix_are_one_request_and_its_tokens_are_counted_once(
    engine: GuardEngine, folders: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = submitted(engine, monkeypatch)
    before, clock = engine.counters.scheduled_tokens, engine._dispatcher.virtual_time
    check = engine.check(CONVERSATION, SILENT)
    (request,) = requests
    length = request.tokens
    assert [verdict.rule for verdict in check.verdicts] == SILENT
    expected = [reference_logit(CONVERSATION, "", folders[name]) for name in SILENT]
    assert [verdict.logit for verdict in check.verdicts] == pytest.approx(expected, abs=NATS)
    assert check.computed_tokens == engine.counters.scheduled_tokens - before == length
    assert check.cached_tokens == (len(SILENT) - 1) * length
    assert engine._dispatcher.virtual_time - clock == length


def test_heads_share_a_request_only_on_the_same_conversation_suffix_and_salt(
    engine: GuardEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = submitted(engine, monkeypatch)
    other = CONVERSATION[:2]
    call = engine.submit(
        [
            ScoreRequest(CONVERSATION, "", SILENT[0]),
            ScoreRequest(other, "", SILENT[1]),
            ScoreRequest(CONVERSATION, "", SILENT[2], "salt"),
            ScoreRequest(CONVERSATION, told(TOLD[0]), TOLD[0]),
            ScoreRequest(other, "", SILENT[3]),
            ScoreRequest(CONVERSATION, "", None),
        ]
    )
    engine.cancel(call)
    assert [request.wants_state for request in requests].count(True) == 4
    assert len(requests) == 5


def test_a_prompt_that_cannot_be_judged_is_a_refusal_for_every_head_of_it(
    engine: GuardEngine,
) -> None:
    check = engine.check((Message("user", "word " * 3000),), [*SILENT[:3], TOLD[0]])
    assert list(check.refused) == [*SILENT[:3], TOLD[0]] and check.outcome == "unjudged"
    assert check.refused[SILENT[1]].subject == f"rule '{SILENT[1]}'"


def test_what_is_cancelled_leaves_nothing_behind(engine: GuardEngine) -> None:
    """Before its first step, and between the steps of its prefill."""
    messages = (Message("user", " ".join(["word"] * 700)),)
    with steps_of(engine, 100):
        for steps in (0, 1, 3):
            call = engine.submit([ScoreRequest(messages, "", name) for name in SILENT])
            for _ in range(steps):
                engine.step()
            assert not call.done
            engine.cancel(call)
            assert nothing_is_kept(engine) and not engine._dispatcher.in_flight
    engine.check(CONVERSATION, [SILENT[0], "plain"])
    assert nothing_is_kept(engine)


def test_a_step_that_fails_after_its_states_were_kept_leaves_none(
    engine: GuardEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        assert runner(engine).kept_states  # or this tests nothing
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(runner(engine), "_sample", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            engine.check(CONVERSATION, SILENT)
    assert nothing_is_kept(engine)
    assert not engine.check(CONVERSATION, SILENT).refused


def test_where_no_state_can_be_given_a_head_is_refused_and_adapters_are_answered(
    engine: GuardEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.backend, "_gives_states", False)
    check = engine.check(CONVERSATION, [SILENT[0], "plain", SILENT[1]])
    assert "gives no hidden states" in check.refused[SILENT[0]].why
    assert list(check.refused) == SILENT[:2]
    assert [verdict.rule for verdict in check.verdicts] == ["plain"]


@pytest.mark.parametrize("state", [None, np.full(HIDDEN_SIZE, math.nan, np.float32)])
def test_a_state_that_is_missing_or_nan_is_refused_the_third_time_and_never_an_allow(
    engine: GuardEngine, monkeypatch: pytest.MonkeyPatch, state: Any
) -> None:
    def step() -> list[EngineOutput]:
        (request_id,) = engine._dispatcher.in_flight
        engine.backend.cancel([request_id])
        return [EngineOutput(request_id, 1.0, 0, 10, state)]

    open_check = engine.open_check(CONVERSATION, SILENT[:2])
    with monkeypatch.context() as patch:
        patch.setattr(engine.backend, "step", step)
        for times in (1, 2, 3):
            engine.step()
            assert open_check.call.done == (times == 3)
    check = open_check.result()
    assert [refusal.subject for refusal in check.refused.values()] == ["verdict"] * 2
    assert check.outcome == "unjudged"


def test_a_nan_state_of_a_batch_is_answered_when_it_begins_again(
    engine: GuardEngine, folders: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    step, times = engine.backend.step, []

    def once_nan() -> list[EngineOutput]:
        times.append(1)
        outputs = step()
        if len(times) > 1:
            return outputs
        nan = np.full(HIDDEN_SIZE, math.nan, np.float32)
        return [EngineOutput(output.request_id, output.logit, 0, 10, nan) for output in outputs]

    monkeypatch.setattr(engine.backend, "step", once_nan)
    check = engine.check(CONVERSATION, SILENT[:2])
    expected = [reference_logit(CONVERSATION, "", folders[name]) for name in SILENT[:2]]
    assert [verdict.logit for verdict in check.verdicts] == pytest.approx(expected, abs=NATS)
    assert len(times) > 1


def test_heads_take_no_slots(engine: GuardEngine) -> None:
    assert engine._rules.adapter_count == len(RULE_TEXTS) < engine.backend.slots < len(SILENT)

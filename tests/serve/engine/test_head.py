"""Heads: which are admitted, what they read, and plain transformers' logits on real vLLM."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from pytest import MonkeyPatch
from safetensors.numpy import load_file, save_file

from guard.conversation.example import ROLES, Message
from guard.errors import GuardError
from guard.method import METHODS, Method
from guard.prompt.encoder import EncoderPromptBuilder
from guard.prompt.ngrams import ngram_rows
from guard.prompt.windows import Window, judged_of
from guard.recipe import load_recipe
from guard.rule import Reads, text_hash
from guard.weights.head import Head
from serve.engine import GuardEngine, ScoreRequest
from serve.engine.adapter import Requirements
from serve.engine.backend import BackendRequest, EngineOutput, SpokenSpan
from serve.engine.backends import decoder
from serve.engine.head import MOST_COUNTED, CountedTexts, HeadInput, ServableHead
from tests.plain_words import plain_keys
from tests.serve.cards import RULE_TEXTS, prompts, recipe, save_card, text_of
from tests.serve.engine.shared import logits, logits_of, long_conversation, runner, steps_of
from tests.serve.guarded import CONVERSATION, adapter_folders, guard_engine, peft_logit
from tests.serve.heads import HEAD_FILE, HIDDEN_SIZE, reference_logit, save_alora, save_head

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
def with_heads(folders: Mapping[str, Path]) -> Iterator[None]:
    """The shared engine has heads beside its adapters."""
    for name, folder in folders.items():
        guard_engine().add(name, folder)
    yield
    for name in folders:
        guard_engine().remove(name)


@pytest.fixture
def engine(with_heads: None) -> GuardEngine:
    """It, with an empty prefix cache."""
    guard_engine().forget()
    return guard_engine()


def submitted(engine: GuardEngine, monkeypatch: MonkeyPatch) -> list[BackendRequest]:
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


@pytest.mark.parametrize("method", ["head", "ridge"])
def test_a_head_or_another_method_of_its_tensors_is_admitted_with_its_weights(
    tmp_path: Path, monkeypatch: MonkeyPatch, method: str
) -> None:
    """Another method is served from its entry alone."""
    file = f"{method}.safetensors"
    monkeypatch.setitem(METHODS, "ridge", Method("ridge", "ridge", "output", file, is_seeded=False))
    folder = save_head(tmp_path / method, method, seed=1)
    (folder / HEAD_FILE).rename(folder / file)
    save_card(folder, "rule", method)
    head = requirements().admit("renamed", folder)
    assert isinstance(head, ServableHead)
    assert (head.name, head.card.rule) == ("renamed", "rule")
    tensors, read = load_file(folder / file), head.head.tensors()
    assert read.keys() == tensors.keys()
    assert all(np.array_equal(read[key], tensors[key]) for key in tensors)


def test_a_head_takes_the_highest_state_of_whom_its_rule_judges(tmp_path: Path) -> None:
    rows = np.zeros((4, HIDDEN_SIZE), np.float32)
    rows[:, 0] = 3.0, 1.0, 2.0, 1.5
    speakers = ("user", "assistant", "assistant", "assistant")
    highest_of = {"user": 3.0, "assistant": 2.0, "conversation": 3.0, "tool": 3.0}
    highest_of |= {"last user": 3.0, "last assistant": 1.5, "last conversation": 1.5}
    for reads, highest in highest_of.items():
        head = head_that_reads(tmp_path / reads, reads)
        assert head.logit(read(rows, speakers)) == pytest.approx(highest)
        assert head.logit(read(rows[2])) == pytest.approx(2.0)  # a decoder's: one state, of nobody


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


def test_a_head_of_another_width_is_not_served(engine: GuardEngine, tmp_path: Path) -> None:
    folder = save_head(tmp_path / "wide", "wide", seed=1)
    wide = load_file(folder / HEAD_FILE) | {"weight": np.ones(HIDDEN_SIZE + 1, np.float32)}
    save_file(wide, folder / HEAD_FILE)
    save_card(folder, "wide", "head")
    with pytest.raises(GuardError, match=f"does not fit the base's states of {HIDDEN_SIZE}"):
        engine.add("wide", folder)
    assert "wide" not in engine.rules


@pytest.mark.parametrize("words", [1, 25, 26, 27, 28, 29, 30, 31, 60, 600, 1800])
def test_a_head_s_logit_is_that_of_plain_transformers(
    engine: GuardEngine, folders: Mapping[str, Path], words: int
) -> None:
    """Whatever part of a block the prompt ends in; its start cached, or prefilled in chunks."""
    messages, names = long_conversation(words), [*TOLD, *SILENT[:2]]
    expected = [reference_logit(messages, told(name), folders[name]) for name in names]
    for _ in range(2):
        check = engine.check(messages, names)
        assert logits_of(check) == pytest.approx(expected, abs=NATS)
    engine.forget()
    with steps_of(engine, 30 + words // 4):
        check = engine.check(messages, [*names, "medical_advice"])
    assert logits_of(check)[:-1] == pytest.approx(expected, abs=NATS)
    assert nothing_is_kept(engine)


def told(name: str) -> str:
    """What a head is told of its rule."""
    return "" if name in SILENT else text_of(name)


def test_heads_aloras_loras_and_the_base_are_answered_in_one_call(
    engine: GuardEngine, folders: Mapping[str, Path]
) -> None:
    requests, expected = [], []
    for messages in (CONVERSATION[:1], CONVERSATION[:2], CONVERSATION):
        for name in (TOLD[0], "medical_advice", SILENT[3], "plain", None, SILENT[4], TOLD[1]):
            if name in folders:
                text = told(str(name))
                expected.append(reference_logit(messages, text, folders[str(name)]))
            else:
                text = RULE_TEXTS.get(str(name), "The assistant must not whistle.")
                folder = adapter_folders()[name] if name else None
                expected.append(peft_logit(messages, text, folder))
            requests.append(ScoreRequest(messages, text, name))
    assert logits(engine.score(requests)) == pytest.approx(expected, abs=2 * NATS)
    assert len({round(logit, 2) for logit in expected}) > len(expected) // 2


def test_an_alora_s_head_reads_the_states_that_the_alora_makes(
    engine: GuardEngine, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    """Beside rules of every other kind; those of one conversation follow each other."""
    names = [f"alora and head {number}" for number in range(4)]
    folders = {}
    for seed, name in enumerate(names, start=50):
        folders[name] = save_alora(tmp_path / name, name, seed=seed)
        engine.add(name, folders[name])
    followed: list[bool] = []
    follow = decoder.follow
    monkeypatch.setattr(
        decoder, "follow", lambda *args: (followed.append(follow(*args)), followed[-1])[1]
    )
    try:
        for messages in (CONVERSATION[:1], CONVERSATION):
            check = engine.check(messages, [*names, "medical_advice", TOLD[0]])
            expected = [reference_logit(messages, text_of(name), folders[name]) for name in names]
            assert logits_of(check)[: len(names)] == pytest.approx(expected, abs=2 * NATS)
            assert max(expected) - min(expected) > 1
    finally:
        for name in names:
            engine.remove(name)
    assert sum(followed) == 2 * len(names)  # all but the first aLoRA, words or a head
    assert nothing_is_kept(engine)


def test_twenty_heads_on_one_suffix_are_one_request_and_its_tokens_are_counted_once(
    engine: GuardEngine, folders: Mapping[str, Path], monkeypatch: MonkeyPatch
) -> None:
    requests = submitted(engine, monkeypatch)
    before, clock = engine.counters.scheduled_tokens, engine._dispatcher.virtual_time
    check = engine.check(CONVERSATION, SILENT)
    (length,) = [request.tokens for request in requests]
    assert [verdict.rule for verdict in check.verdicts] == SILENT
    expected = [reference_logit(CONVERSATION, "", folders[name]) for name in SILENT]
    assert logits_of(check) == pytest.approx(expected, abs=NATS)
    assert check.computed_tokens == engine.counters.scheduled_tokens - before == length
    assert check.cached_tokens == (len(SILENT) - 1) * length
    assert engine._dispatcher.virtual_time - clock == length


def test_heads_share_a_request_only_on_the_same_conversation_suffix_and_salt(
    engine: GuardEngine, monkeypatch: MonkeyPatch
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


def test_a_prompt_that_cannot_be_judged_is_refused_for_every_head(engine: GuardEngine) -> None:
    check = engine.check(long_conversation(3000), [*SILENT[:3], TOLD[0]])
    assert list(check.refused) == [*SILENT[:3], TOLD[0]] and check.outcome == "unjudged"
    assert check.refused[SILENT[1]].subject == f"rule '{SILENT[1]}'"


def test_what_is_cancelled_leaves_nothing_behind(engine: GuardEngine) -> None:
    """Before its first step, and between the steps of its prefill."""
    long = long_conversation(700)
    with steps_of(engine, 100):
        for steps in (0, 1, 3):
            call = engine.submit([ScoreRequest(long, "", name) for name in SILENT])
            for _ in range(steps):
                engine.step()
            assert not call.done
            engine.cancel(call)
            assert nothing_is_kept(engine) and not engine._dispatcher.in_flight
    engine.check(CONVERSATION, [SILENT[0], "plain"])
    assert nothing_is_kept(engine)


def test_a_failed_step_leaves_no_kept_states(engine: GuardEngine, monkeypatch: MonkeyPatch) -> None:
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
    engine: GuardEngine, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.backend, "_gives_states", False)
    check = engine.check(CONVERSATION, [SILENT[0], "plain", SILENT[1]])
    assert "gives no hidden states" in check.refused[SILENT[0]].why
    assert list(check.refused) == SILENT[:2]
    assert [verdict.rule for verdict in check.verdicts] == ["plain"]


@pytest.mark.parametrize("state", [None, np.full(HIDDEN_SIZE, math.nan, np.float32)])
def test_a_state_that_is_missing_or_nan_is_refused_the_third_time_and_never_an_allow(
    engine: GuardEngine, monkeypatch: MonkeyPatch, state: Any
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


def test_heads_take_no_slots(engine: GuardEngine) -> None:
    assert engine._rules.adapter_count == len(RULE_TEXTS) < engine.backend.slots < len(SILENT)


def conversation(rng: random.Random) -> list[Message]:
    """Some turns are empty, some longer than a window."""
    messages: list[Message] = []
    for _ in range(rng.randint(1, 6)):
        words = rng.choices(["word", "hurt", "a"], k=rng.choice([0, 0, 1, 3, 10, 60, 120]))
        messages.append(Message(rng.choice(list(ROLES)), " ".join(words)))
    return messages


def spoken(builder: EncoderPromptBuilder, windows: list[Window]) -> list[SpokenSpan]:
    spans: list[SpokenSpan] = []
    for window in windows:
        for start, end, speaker, turn in builder.spans(window):
            spans.append(SpokenSpan(speaker, turn, window.token_ids[start:end]))
    return spans


@pytest.mark.parametrize("reads", get_args(Reads))
def test_serving_reads_the_spans_and_words_of_training(reads: Reads) -> None:
    builder, rng = EncoderPromptBuilder.of(load_recipe("minilm")), random.Random(0)
    for _ in range(60):
        builder.window_tokens = rng.choice([16, 24, 40, 64])
        token_ids = builder.prefix_ids(conversation(rng))
        windows = builder.windows(token_ids, "conversation")
        rng.shuffle(windows)
        spans = spoken(builder, windows)
        states = np.arange(len(spans), dtype=np.float32)[:, None]
        read = HeadInput(EngineOutput("1", math.nan, 0, 0, states, tuple(spans)), token_ids)
        got = read.states(reads)
        assert got is not None
        served = sorted(spans[int(index)] for index in got[:, 0])
        trained_on = spoken(builder, builder.windows(token_ids, reads))
        assert served == sorted(trained_on)
        keys: list[int] = []
        for span in trained_on:
            if judged_of([span.speaker], reads):
                keys += set(plain_keys(span.token_ids))
        assert sorted(read.words(reads).keys.tolist()) == sorted(keys)


def test_the_words_of_one_conversation_are_counted_once_in_a_call() -> None:
    """An encoder's adapters have an output each, on the same spans."""
    counted = CountedTexts()
    texts = ((11, 12), (12, 13)), ((11, 12), (12, 13)), ((11, 12), (12, 14))
    words = []
    for first, second in texts:
        spans = SpokenSpan("user", 0, first), SpokenSpan("user", 1, second)
        output = EngineOutput("1", math.nan, 0, 0, np.zeros((2, 4), np.float32), spans)
        words.append(HeadInput(output, [], counted).words("user"))
    assert words[0] is words[1] and words[2].keys.tolist() != words[0].keys.tolist()
    for token in range(MOST_COUNTED):
        counted.of(((token,),))
    assert counted.of(texts[0]) is not words[0]  # of a call's many conversations few are kept


def test_the_words_of_a_decoder_s_conversation_are_counted_once_whatever_rules_are_told() -> None:
    """An output for each rule turn; what training counts, bit for bit."""
    counted, prefix = CountedTexts(), [11, 12, 11, 12, 13]
    words = []
    for number in range(3):
        output = EngineOutput(str(number), 0.0, 0, 0, np.zeros(4, np.float32))
        words.append(HeadInput(output, prefix, counted).words("user"))
    assert all(each is words[0] for each in words)
    for served, trained_on in zip(words[0], ngram_rows([prefix]), strict=True):
        assert np.array_equal(served, trained_on)

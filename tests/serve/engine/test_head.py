"""Heads: which are admitted, what they read, and plain transformers' logits on real vLLM.

So are those of all kinds of rules on a Llama of which a recipe serves the first layers.
"""

from __future__ import annotations

import math
import random
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from pytest import MonkeyPatch
from safetensors.numpy import load_file, save_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from guard import made_base
from guard.conversation.example import ROLES, Message
from guard.errors import GuardError
from guard.method import HEAD, METHODS, Method
from guard.prompt.encoder import EncoderPromptBuilder
from guard.prompt.ngrams import ngram_rows
from guard.prompt.windows import Window, judged_of
from guard.recipe import load_recipe
from guard.rule import Reads, text_hash
from guard.weights.head import NO_WORDS, Head
from serve.engine import GuardEngine, ScoreRequest
from serve.engine.adapter import Requirements
from serve.engine.backend import BackendRequest, EngineOutput, SpokenSpan
from serve.engine.backends import decoder
from serve.engine.head import MOST_COUNTED, CountedTexts, HeadInput, ServableHead
from tests.plain_words import plain_keys
from tests.serve.adapters import BASE, LINEARS
from tests.serve.cards import RULE_TEXTS, prompts, recipe, save_card, text_of
from tests.serve.engine.shared import logits, logits_of, long_conversation, runner, steps_of
from tests.serve.guarded import CONVERSATION, ENGINE, adapter_folders, guard_engine, peft_logit
from tests.serve.heads import HEAD_FILE, HIDDEN_SIZE, reference_logit, save_alora, save_head

pytestmark = pytest.mark.slow

NATS = 1e-3  # float32: two ways to compute the same state, times 128 weights of size 1
SILENT = [f"silent head {number}" for number in range(20)]  # they are told nothing: one suffix
TOLD = ["told head", "other told head"]

SAYS_NOTHING = {"rule_text": "", "rule_hash": text_hash("")}  # fields of a card


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A head for each of SILENT and TOLD."""
    root, heads = tmp_path_factory.mktemp("heads"), {}
    for seed, name in enumerate([*SILENT, *TOLD]):
        card = SAYS_NOTHING if name in SILENT else {}
        heads[name] = save_head(root / name, name, seed=seed, **card)
    return heads


@pytest.fixture(scope="module")
def with_heads(folders: Mapping[str, Path]) -> Iterator[GuardEngine]:
    """The shared engine with heads beside its adapters."""
    for name, folder in folders.items():
        guard_engine().add(name, folder)
    yield guard_engine()
    for name in folders:
        guard_engine().remove(name)


@pytest.fixture
def engine(with_heads: GuardEngine) -> GuardEngine:
    """It, with an empty prefix cache."""
    with_heads.forget()
    return with_heads


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


def admitted(folder: Path, name: str = "head") -> ServableHead:
    requirements = Requirements(recipe().base, recipe().base_revision, 16, prompts())
    head = requirements.admit(name, folder)
    assert isinstance(head, ServableHead)
    return head


def test_a_method_of_heads_tensors_is_a_head(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    """Another method is served from its entry alone."""
    ridge = Method("ridge", "ridge", "output", "ridge.safetensors", is_seeded=False)
    monkeypatch.setitem(METHODS, "ridge", ridge)
    for method in ("head", "ridge"):
        folder = save_head(tmp_path / method, method, seed=1)
        file = (folder / HEAD_FILE).rename(folder / f"{method}.safetensors")
        save_card(folder, "rule", method)
        head = admitted(folder, "renamed")
        assert (head.name, head.card.rule) == ("renamed", "rule")
        tensors, read = load_file(file), head.head.tensors()
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

    for broken in (math.nan, math.inf, -math.inf):  # of any speaker
        rows[0, 0] = broken
        assert math.isnan(
            head_that_reads(tmp_path / f"{broken}", "assistant").logit(read(rows, speakers))
        )


def read(states: np.ndarray, speakers: tuple[str, ...] = ()) -> HeadInput:
    spans = tuple(SpokenSpan(speaker, turn, ()) for turn, speaker in enumerate(speakers))
    return HeadInput(EngineOutput("1", math.nan, 0, 0, states, spans), [])


def head_that_reads(folder: Path, reads: str) -> ServableHead:
    """One whose logit is the first number of a state."""
    save_head(folder, folder.name, seed=1)
    weight = np.zeros(HIDDEN_SIZE, np.float32)
    weight[0] = 1.0
    save_file(Head(weight, 0.0).tensors(), folder / HEAD_FILE)
    save_card(folder, folder.name, "head", reads=reads)
    return admitted(folder)


def test_a_head_that_is_none_or_not_the_card_s_is_refused(tmp_path: Path) -> None:
    folder = save_head(tmp_path / "head", "head", seed=1)
    file = folder / HEAD_FILE
    of_another_kind = load_file(file) | {"weight": np.ones((1, HIDDEN_SIZE), np.float32)}
    file.write_bytes(b"not one")
    with pytest.raises(GuardError, match="not those of the card"):
        admitted(folder)
    save_card(folder, "head", "head")
    with pytest.raises(GuardError, match="cannot be read"):
        admitted(folder)
    save_file(of_another_kind, file)
    save_card(folder, "head", "head")
    with pytest.raises(GuardError, match=r"head\.safetensors.*make train"):
        admitted(folder)


@pytest.mark.parametrize("words", [1, 25, 26, 27, 28, 29, 30, 31, 600, 1800])
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


def test_all_kinds_of_rules_are_one_call(engine: GuardEngine, folders: Mapping[str, Path]) -> None:
    requests, expected = [], []
    for messages in (CONVERSATION[:1], CONVERSATION[:2], CONVERSATION):
        for name in (TOLD[0], SILENT[3], SILENT[4], TOLD[1]):
            requests.append(ScoreRequest(messages, told(name), name))
            expected.append(reference_logit(messages, told(name), folders[name]))
        for name, folder in adapter_folders().items():
            requests.append(ScoreRequest(messages, RULE_TEXTS[name], name))
            expected.append(peft_logit(messages, RULE_TEXTS[name], folder))
        requests.append(ScoreRequest(messages, "The assistant must not whistle.", None))
        expected.append(peft_logit(messages, requests[-1].rule_text, None))
    order = random.Random(0).sample(range(len(requests)), len(requests))
    scores = logits(engine.score([requests[index] for index in order]))
    assert scores == pytest.approx([expected[index] for index in order], abs=2 * NATS)
    # Or any order would do.
    assert len({round(logit, 2) for logit in expected}) > len(expected) // 2


def test_an_alora_s_head_reads_the_states_that_the_alora_makes(
    engine: GuardEngine, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    """Beside rules of every other kind; those of one conversation follow each other. Two count the
    words of the user's last turn alone.
    """
    names = [f"alora and head {number}" for number in range(4)]
    folders = {}
    for seed, name in enumerate(names, start=50):
        reads = ("last user", "conversation")[seed % 2]
        folders[name] = save_alora(tmp_path / name, name, seed=seed, reads=reads)
        engine.add(name, folders[name])
    followed: list[bool] = []
    follow = decoder.follow

    def counted(*args: Any) -> bool:
        followed.append(follow(*args))
        return followed[-1]

    monkeypatch.setattr(decoder, "follow", counted)
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
    assert engine._rules.adapter_count == len(RULE_TEXTS) < engine.backend.slots < len(SILENT)
    (length,) = [request.tokens for request in requests]
    assert [verdict.rule for verdict in check.verdicts] == SILENT
    expected = [reference_logit(CONVERSATION, "", folders[name]) for name in SILENT]
    assert logits_of(check) == pytest.approx(expected, abs=NATS)
    assert check.computed_tokens == engine.counters.scheduled_tokens - before == length
    assert check.cached_tokens == (len(SILENT) - 1) * length
    assert engine._dispatcher.virtual_time - clock == length


def test_heads_share_only_equal_requests(engine: GuardEngine, monkeypatch: MonkeyPatch) -> None:
    requests, other = submitted(engine, monkeypatch), CONVERSATION[:2]
    asked = [ScoreRequest(CONVERSATION, "", SILENT[0]), ScoreRequest(other, "", SILENT[1])]
    asked.append(ScoreRequest(CONVERSATION, "", SILENT[2], "salt"))
    asked.append(ScoreRequest(CONVERSATION, told(TOLD[0]), TOLD[0]))
    asked += [ScoreRequest(other, "", SILENT[3]), ScoreRequest(CONVERSATION, "", None)]
    engine.cancel(engine.submit(asked))
    assert [request.wants_state for request in requests].count(True) == 4
    assert len(requests) == 5


def test_what_is_cancelled_or_fails_is_gone(engine: GuardEngine, monkeypatch: MonkeyPatch) -> None:
    """Before its first step, between the steps of its prefill, and when it is sampled from."""
    long = long_conversation(700)
    with steps_of(engine, 100):
        for steps in (0, 1, 3):
            call = engine.submit([ScoreRequest(long, "", name) for name in SILENT])
            for _ in range(steps):
                engine.step()
            assert not call.done
            engine.cancel(call)
            assert nothing_is_kept(engine) and not engine._dispatcher.in_flight

    def fail(*_: object, **__: object) -> None:
        assert runner(engine).kept_states  # or this tests nothing
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(runner(engine), "_sample", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            engine.check(CONVERSATION, SILENT)
    assert nothing_is_kept(engine)
    assert not engine.check(CONVERSATION, [SILENT[0], "plain"]).refused
    assert nothing_is_kept(engine)


def test_heads_without_states_are_refused(engine: GuardEngine, monkeypatch: MonkeyPatch) -> None:
    check = engine.check(long_conversation(3000), SILENT[:3])
    assert list(check.refused) == SILENT[:3] and check.outcome == "unjudged"
    assert check.refused[SILENT[1]].subject == f"rule '{SILENT[1]}'"
    monkeypatch.setattr(engine.backend, "_gives_states", False)
    check = engine.check(CONVERSATION, [SILENT[0], "plain", SILENT[1]])
    assert "gives no hidden states" in check.refused[SILENT[0]].why
    assert list(check.refused) == SILENT[:2]
    assert [verdict.rule for verdict in check.verdicts] == ["plain"]  # adapters are answered


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
        output = EngineOutput("1", math.nan, 0, 0, states, tuple(spans))
        read = HeadInput(output, token_ids, CountedTexts(builder.judged_ids))
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
    """An encoder's adapters have an output each, on the same spans; a decoder's rules one for each
    rule turn. They are what training counts, bit for bit.
    """
    counted, words = CountedTexts(), []
    texts = ((11, 12), (12, 13)), ((11, 12), (12, 13)), ((11, 12), (12, 14))
    for first, second in texts:
        spans = SpokenSpan("user", 0, first), SpokenSpan("user", 1, second)
        output = EngineOutput("1", math.nan, 0, 0, np.zeros((2, 4), np.float32), spans)
        words.append(HeadInput(output, [], counted).words("user"))
    assert words[0] is words[1] and words[2].keys.tolist() != words[0].keys.tolist()
    prefix, of_prefix = [11, 12, 11, 12, 13], []
    for number in range(3):
        output = EngineOutput(str(number), 0.0, 0, 0, np.zeros(4, np.float32))
        of_prefix.append(HeadInput(output, prefix, counted).words("user"))
    assert all(rows is of_prefix[0] for rows in of_prefix)
    for served, trained_on in zip(of_prefix[0], ngram_rows([prefix]), strict=True):
        assert np.array_equal(served, trained_on)
    for token in range(MOST_COUNTED):
        counted.of_spans(((token,),))
    assert counted.of_spans(texts[0]) is not words[0]  # of a call's many conversations few are kept


LAYERS, KEPT, SIZE = 4, 3, 128
KINDS = {"medical_advice": "alora", "pii_leak": "alora", "refund_promise": "head", "plain": "lora"}
WITH_HEAD = ("pii_leak", "refund_promise")


def llama(layers: int = KEPT) -> LlamaForCausalLM:
    """With grouped key/value heads and a tied embedding, as SmolLM2 has; its first layers."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16384,
        hidden_size=SIZE,
        intermediate_size=256,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        initializer_range=0.1,
    )
    model = LlamaForCausalLM(config).eval()
    model.model.layers = model.model.layers[:layers]
    return model


def adapted(folder: Path, rule: str, method: str, seed: int) -> nn.Module:
    """What answers the rule in PEFT. The folder has its adapter, if it has one."""
    folder.mkdir()
    if method == "head":
        return llama()
    invocation = prompts().invocation(RULE_TEXTS[rule])
    config = LoraConfig(r=8, lora_alpha=16, target_modules=LINEARS, task_type="CAUSAL_LM")
    if method == "alora":
        config.alora_invocation_tokens = list(invocation)
    model = get_peft_model(llama(), config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    model.save_pretrained(str(folder))
    return model.eval()


def plain_logit(model: nn.Module, head: Head | None, request: ScoreRequest) -> float:
    prompt = prompts().build(request.messages, request.rule_text)
    with torch.no_grad():
        output = model(input_ids=torch.tensor([prompt.token_ids]), output_hidden_states=True)
    if head is None:
        last = output.logits[0, -1]
        return float(last[prompts().yes_id] - last[prompts().no_id])
    state = output.hidden_states[-1][0, -1].double().numpy()
    return head.logit(state[None], ngram_rows([prompt.token_ids[: prompt.invocation_start]]))


def test_a_mixed_batch_is_peft_s_to_four_digits(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    base = tmp_path / "base"
    llama(LAYERS).save_pretrained(base)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(BASE) / file, base / file)
    monkeypatch.setattr(made_base, "CACHE", tmp_path / "cache")
    cut = recipe().model_copy(update={"base": str(base), "layers": KEPT})
    models: dict[str | None, nn.Module] = {None: llama()}
    heads: dict[str | None, Head] = {}
    for seed, (rule, method) in enumerate(KINDS.items()):
        folder = tmp_path / rule
        models[rule] = adapted(folder, rule, method, seed)
        if rule in WITH_HEAD:
            weight = torch.randn(SIZE, generator=torch.Generator().manual_seed(seed)).numpy()
            heads[rule] = Head(weight, 0.5, NO_WORDS)
            save_file(heads[rule].tensors(), folder / HEAD)
        save_card(folder, rule, method, base=cut.base, base_revision=cut.base_revision)
    rng = random.Random(0)
    requests: list[ScoreRequest] = []
    for _ in range(24):
        said = " ".join(rng.choices(["refund", "knee", "which", "dose", "of", "it"], k=40))
        messages = (*CONVERSATION[: rng.randrange(3)], Message("user", said))
        name, text = rng.choice([*RULE_TEXTS.items(), (None, "The assistant must not whistle.")])
        requests.append(ScoreRequest(messages, text, name))
    with GuardEngine(cut, {rule: tmp_path / rule for rule in KINDS}, **ENGINE) as engine:
        served = logits(engine.score(requests))
    expected: list[float] = []
    for request in requests:
        model, head = models[request.adapter], heads.get(request.adapter)
        expected.append(plain_logit(model, head, request))
    assert served == pytest.approx(expected, abs=1e-4)
    assert len({round(logit, 2) for logit in expected}) > len(expected) // 2

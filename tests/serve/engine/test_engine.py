"""The guard engine on the real vLLM: right verdicts, work done once, no answer from nothing.

Also adapters that come, go and change. A mixed batch is held to PEFT in test_head.py.
"""

from __future__ import annotations

import math
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pytest import MonkeyPatch
from safetensors.torch import load_file, save_file

from guard.conversation.example import Message
from guard.errors import GuardError
from guard.home import ROOT
from guard.method import PEFT_WEIGHTS
from guard.recipe import ServingMemory
from guard.verdict import Calibration
from serve.engine import CODE, GuardEngine, Refusal, Score, ScoreRequest
from serve.engine.backend import Loaded
from serve.engine.backends import vllm_engine
from tests.serve.adapters import save_random_adapter
from tests.serve.cards import RULE_TEXTS, prompts, recipe, save_card, text_of
from tests.serve.engine.shared import (
    NATS,
    assert_peft,
    finish,
    logits_of,
    long_conversation,
    runner,
)
from tests.serve.guarded import CONVERSATION, ENGINE, peft_logit, save_adapter

pytestmark = pytest.mark.slow

BLOCK = 32
WEIGHTS = "adapter_model.safetensors"


def test_a_check_has_a_verdict_a_rule_in_order_by_its_card_s_values(engine: GuardEngine) -> None:
    rules = ["refund_promise", "pii_leak", "medical_advice"]
    check = engine.check(CONVERSATION, rules)
    assert [verdict.rule for verdict in check.verdicts] == rules and not check.refused
    calibration = Calibration(temperature=2.0, threshold=0.25, uncertainty_band=(0.2, 0.3))
    for verdict in check.verdicts:
        expected = calibration.verdict(verdict.rule, verdict.logit)
        assert verdict == expected._replace(by="alora")
    shared = len(prompts().prefix_ids(CONVERSATION))
    lengths = [len(prompts().build(CONVERSATION, RULE_TEXTS[rule]).token_ids) for rule in rules]
    assert check.cached_tokens == 2 * shared
    assert check.computed_tokens == sum(lengths) - 2 * shared
    assert list(assert_peft(engine)) == list(RULE_TEXTS)


STATES = 24
SILENT = [f"silent {number}" for number in range(20)]


@pytest.fixture
def silent(engine: GuardEngine, tmp_path: Path) -> Iterator[GuardEngine]:
    """The shared engine with adapters of these names, which are told nothing of their rules."""
    folder = save_adapter(tmp_path / "silent", "silent", seed=40, text="")
    for name in SILENT:
        engine.add(name, folder)
    yield engine
    for name in SILENT:
        engine.remove(name)


def test_an_adapter_that_is_told_nothing_computes_the_header_alone(silent: GuardEngine) -> None:
    silent.check(CONVERSATION, ["medical_advice"])
    for turns in (3, 1, 2):
        assert_peft(silent, SILENT[:1], CONVERSATION[:turns])
        (second,) = silent.score([ScoreRequest(CONVERSATION[:turns], "", SILENT[1])])
        assert isinstance(second, Score)
        assert second.computed_tokens == len(prompts().suffix_ids("")) == 3


def grown(words: list[str]) -> tuple[Message, ...]:
    """A conversation of these words, thirty a turn."""
    messages = []
    for number, start in enumerate(range(0, len(words), 30)):
        role = ("user", "assistant")[number % 2]
        messages.append(Message(role, " ".join(words[start : start + 30])))
    return tuple(messages)


# A turn at a time; a reply that is judged while it streams.
@pytest.mark.parametrize("words", [30, 3])
def test_a_conversation_that_grows_computes_what_is_new(silent: GuardEngine, words: int) -> None:
    """20 rules of three tokens, an adapter each: the new tokens and the suffixes, within 5 %."""
    chosen = random.Random(3).choices(CONVERSATION[0].content.split(), k=STATES * words)
    computed = needed = 0
    before: list[int] = []
    for state in range(1, STATES + 1):
        messages = grown(chosen[: state * words])
        computed += silent.check(messages, SILENT).computed_tokens
        prefix = prompts().prefix_ids(messages)
        alike = [left == right for left, right in zip(before, prefix, strict=False)]
        needed += len(prefix) - [*alike, False].index(False)
        needed += len(SILENT) * len(prompts().suffix_ids(""))
        before = prefix
    assert computed == pytest.approx(needed, rel=0.05)


def test_forgetting_empties_the_prefix_cache(engine: GuardEngine) -> None:
    cached = []
    for _ in range(2):
        engine.check(CONVERSATION, ["pii_leak"])
        cached.append(engine.check(CONVERSATION, ["pii_leak"]).cached_tokens)
        opened = engine.open_check(CONVERSATION, None)
        with pytest.raises(GuardError, match="while requests are in flight"):
            engine.forget()
        engine.cancel(opened.call)
        engine.forget()
        cached.append(engine.check(CONVERSATION[:1], ["pii_leak"]).cached_tokens)
    assert min(cached[::2]) > 0 == max(cached[1::2])


BAD_CONVERSATIONS = {"does not fit the context": long_conversation(3000), "no conversation": ()}


@pytest.mark.parametrize("why", BAD_CONVERSATIONS)
def test_what_cannot_be_judged_is_refused_by_all_rules(engine: GuardEngine, why: str) -> None:
    check = engine.check(BAD_CONVERSATIONS[why])
    assert list(check.refused) == list(RULE_TEXTS) and not check.verdicts
    assert all(why in refusal.why for refusal in check.refused.values())
    assert check.outcome == "unjudged"
    good = ScoreRequest(CONVERSATION, "Be nice.", "plain")
    bad = good._replace(messages=BAD_CONVERSATIONS[why])
    assert [type(outcome) for outcome in engine.score([good, bad, good])] == [Score, Refusal, Score]


def test_checks_that_are_under_way_together_do_not_cross(engine: GuardEngine) -> None:
    asked = ((CONVERSATION[:1], ["pii_leak", "plain"]), (CONVERSATION, ["plain", "medical_advice"]))
    alone = [assert_peft(engine, rules, messages) for messages, rules in asked]
    engine.forget()
    opened = [engine.open_check(messages, rules) for messages, rules in asked]
    finish(engine, *(check.call for check in opened))
    for check, expected in zip(opened, alone, strict=True):
        together = {verdict.rule: verdict.logit for verdict in check.result().verdicts}
        assert together == pytest.approx(expected, abs=NATS)


def test_weights_that_overflow_spoil_no_other_answer(engine: GuardEngine, tmp_path: Path) -> None:
    folder = save_adapter(tmp_path / "huge", "huge", seed=9)
    tensors = load_file(folder / WEIGHTS)
    save_file({name: tensor * 1e25 for name, tensor in tensors.items()}, folder / WEIGHTS)
    save_card(folder, "huge")
    engine.add("huge", folder)
    try:
        check = engine.check(CONVERSATION, ["huge", *RULE_TEXTS])
        # In a masked slot of a block that is given to another request, a number that is none still
        # reaches its answer.
        assert all(bool(cache.isfinite().all()) for cache in runner(engine).kv_caches)
        assert list(check.refused) == ["huge"]
        expected = list(assert_peft(engine, list(RULE_TEXTS)).values())
        assert logits_of(check) == pytest.approx(expected, abs=NATS)
    finally:
        engine.remove("huge")


def test_conversations_of_two_salts_share_nothing_and_are_judged_alike(engine: GuardEngine) -> None:
    """Neither whole blocks nor partial ones; nor does one without a salt."""
    rules, conversation = ["pii_leak", "medical_advice"], long_conversation(300)
    first = engine.check(conversation, rules, cache_salt="one")
    for salt in ("two", None):
        other = engine.check(conversation, rules, cache_salt=salt)
        assert other.computed_tokens == first.computed_tokens
        assert logits_of(other) == pytest.approx(logits_of(first), abs=NATS)
    again = engine.check(conversation, rules, cache_salt="one")
    assert again.computed_tokens < first.computed_tokens / 4


def test_a_prompt_without_rule_turn_is_refused(
    engine: GuardEngine, monkeypatch: MonkeyPatch
) -> None:
    text = RULE_TEXTS["pii_leak"]
    whole, header = prompts().suffix_ids(text), len(prompts().invocation("a rule"))
    monkeypatch.setitem(engine._prompts._suffixes, text, whole[header:])
    check = engine.check(CONVERSATION, ["pii_leak", "medical_advice", "plain"])
    assert "would become active at token" in check.refused["pii_leak"].why
    assert [verdict.rule for verdict in check.verdicts] == ["medical_advice", "plain"]


def test_slots_have_room_for_the_layers_that_adapters_have_and_no_others(tmp_path: Path) -> None:
    folders = {name: tmp_path / name for name in ("rule-1", "rule-2")}
    for seed, (name, folder) in enumerate(folders.items()):
        layers, invocation = ["q_proj", "o_proj"], prompts().invocation(text_of(name))
        save_random_adapter(folder, seed=seed, targets=layers, invocation=invocation)
        save_card(folder, name)
    with GuardEngine(recipe(), folders, **ENGINE) as small:
        modules = runner(small).lora_manager._adapter_manager.modules
        assert {name.rpartition(".")[2] for name in modules} == {"qkv_proj", "o_proj"}
        assert_peft(small)
        third = save_adapter(tmp_path / "rule-3", "rule-3", seed=3)
        problem = r"without adapters of these layers.*down_proj.*lora_target_modules"
        with pytest.raises(GuardError, match=problem):
            small.add("rule-3", third)
        assert not small.check(CONVERSATION).refused


@pytest.fixture(scope="module")
def two_slots(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GuardEngine]:
    """An engine of five rules with two slots, and no host memory but what the slots need."""
    root, names = tmp_path_factory.mktemp("rules"), [f"rule-{seed}" for seed in range(5)]
    folders = {name: save_adapter(root / name, name, seed=int(name[-1])) for name in names}
    no_host_memory = recipe().model_copy(update={"serving_memory": ServingMemory(host_gib=0)})
    with GuardEngine(no_host_memory, folders, **ENGINE | {"max_loras": 2}) as engine:
        yield engine


def test_more_adapters_are_served_than_fit(two_slots: GuardEngine, tmp_path: Path) -> None:
    """Of four rules on two slots each check copies the two that are not there."""
    two_slots.add("rule-5", save_adapter(tmp_path / "rule-5", "rule-5", seed=5))
    assert len(assert_peft(two_slots)) == 6
    assert not two_slots.check(CONVERSATION).refused
    assert two_slots.counters.swap_ins > 6
    two_slots.remove("rule-5")
    rules, swapped_in = list(two_slots.rules)[:4], []
    for turns in (1, 2, 3):
        before = two_slots.counters.swap_ins
        check = two_slots.check(CONVERSATION[:turns], rules)
        assert [verdict.rule for verdict in check.verdicts] == rules
        swapped_in.append(two_slots.counters.swap_ins - before)
    assert swapped_in[1:] == [2, 2]
    assert_peft(two_slots, rules)


def test_an_adapter_that_cannot_be_read_again_is_refused_alone(two_slots: GuardEngine) -> None:
    in_memory = runner(two_slots).lora_manager._adapter_manager._registered_adapters
    loaded = two_slots._rules._loaded
    gone = next(name for name in loaded if loaded[name].adapter_id not in in_memory)
    weights = two_slots.folder(gone) / WEIGHTS
    stat, whole = weights.stat(), weights.read_bytes()
    more = (*CONVERSATION, Message("user", "Well?"))
    for content, refused in ((bytes(stat.st_size), [gone]), (whole, [])):
        weights.write_bytes(content)
        # So that nobody looks at it before it is read.
        os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        for _ in range(2):
            check = two_slots.check(more)
            assert list(check.refused) == refused
            assert len(check.verdicts) == 5 - len(refused)


def test_the_code_that_decides_answers_is_all_but_that_of_the_thread() -> None:
    """A kept answer is of this code: what decides only when one comes is no reason to ask anew."""
    engine = ROOT / "serve" / "engine"
    names = {str(path.relative_to(engine)) for path in CODE if path.is_relative_to(engine)}
    assert {"engine.py", "head.py", "backends/decoder.py"} < names
    assert not any(name.startswith("thread") for name in names)


@pytest.mark.parametrize("method", ["alora", "lora"])
def test_what_was_loaded_answers(engine: GuardEngine, tmp_path: Path, method: str) -> None:
    folder = save_adapter(tmp_path / "again", "again", seed=26, method=method)
    newer = save_adapter(tmp_path / "newer", "again", seed=27, method=method)
    engine.add("again", folder)
    expected = assert_peft(engine, ["again"])["again"]
    shutil.copytree(newer, folder, dirs_exist_ok=True)
    assert logits_of(engine.check(CONVERSATION, ["again"])) == pytest.approx([expected], abs=NATS)
    adapter_id = engine._rules._loaded["again"].adapter_id
    engine.remove("again")
    engine.add("again", folder)
    # Not by the count of requests: runner V2 keeps an adapter's id in 32 bits.
    assert engine._rules._loaded["again"].adapter_id == adapter_id + 1
    (logit,) = logits_of(engine.check(CONVERSATION, ["again"]))
    engine.remove("again")
    assert logit == pytest.approx(peft_logit(CONVERSATION, text_of("again"), newer), abs=NATS)
    assert abs(logit - expected) > 5 * NATS


def test_changed_files_are_not_read_again(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_engine, "LOOK_S", 0.0)
    names = ["again", "second", "third"]
    folders = {name: save_adapter(tmp_path / name, name, seed=40) for name in names}
    newer = save_adapter(tmp_path / "newer", "again", seed=41)
    with GuardEngine(recipe(), folders, max_loras=2, max_cpu_loras=2) as engine:
        assert len(engine.check(CONVERSATION).verdicts) == 3
        shutil.copytree(newer, folders["again"], dirs_exist_ok=True)
        refused = engine.check(CONVERSATION, names).refused
        assert list(refused) == ["again"] and "files changed" in refused["again"].why
        engine.serve("again")
        assert_peft(engine, ["again"])


@pytest.mark.parametrize(
    ("replaced", "problem"),
    [("*", "replaced while it was loaded"), (PEFT_WEIGHTS, "not those of the card")],
)
def test_a_folder_replaced_between_its_check_and_its_loading_is_refused_and_does_not_stay(
    engine: GuardEngine, tmp_path: Path, monkeypatch: MonkeyPatch, replaced: str, problem: str
) -> None:
    folder = save_adapter(tmp_path / "moving", "moving", seed=28)
    newer = save_adapter(tmp_path / "newer", "moving", seed=29)
    backend: Any = engine.backend
    load, resident = backend.load, set(backend._loras)

    def replace_and_load(name: str, folder: Path) -> Loaded:
        for path in newer.glob(replaced):
            shutil.copy(path, folder)
        return load(name, folder)  # type: ignore[no-any-return]

    monkeypatch.setattr(backend, "load", replace_and_load)
    with pytest.raises(GuardError, match=problem):
        engine.add("moving", folder)
    assert "moving" not in engine.rules and set(backend._loras) == resident


def test_a_removed_adapter_ends_the_checks_under_way(engine: GuardEngine, tmp_path: Path) -> None:
    folder = save_adapter(tmp_path / "new", "new", seed=20)
    engine.add("new", folder)
    with pytest.raises(GuardError, match="served already"):
        engine.add("new", folder)
    expected = assert_peft(engine, ["new"])["new"]
    engine.forget()
    adapters = engine.counters.adapters
    under_way = engine.open_check(CONVERSATION, ["new", "plain"])
    engine.remove("new")
    assert "new" in engine.check(CONVERSATION, ["new"]).refused
    finish(engine, under_way.call)
    assert logits_of(under_way.result())[0] == pytest.approx(expected, abs=NATS)
    assert engine._retired == [] and engine.counters.adapters == adapters - 1
    with pytest.raises(GuardError, match="not served"):
        engine.remove("new")


def test_what_vllm_cannot_load_is_refused(engine: GuardEngine, tmp_path: Path) -> None:
    folder = save_adapter(tmp_path / "broken", "broken", seed=24)
    tensors = load_file(folder / PEFT_WEIGHTS)
    next(iter(tensors.values()))[0, 0] = math.nan
    save_file(tensors, folder / PEFT_WEIGHTS)
    save_card(folder, "broken")
    with pytest.raises(GuardError, match="cannot load the adapter"):
        engine.add("broken", folder)
    assert list(assert_peft(engine)) == list(RULE_TEXTS)

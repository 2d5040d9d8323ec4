"""The guard engine on the real vLLM: the right verdicts, the work done once, and no answer where
there is none.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from guard.conversation.example import Message
from guard.errors import GuardError
from guard.home import ROOT
from guard.recipe import ServingMemory
from guard.rule import text_hash
from guard.verdict import Calibration
from serve.engine import CODE, GuardEngine, Refusal, Score, ScoreRequest
from tests.serve.adapters import save_random_adapter, save_variant
from tests.serve.cards import RULE_TEXTS, prompts, recipe, save_card, text_of
from tests.serve.engine.shared import logits, long_conversation, runner
from tests.serve.guarded import CONVERSATION, ENGINE, adapter_folders, peft_logit, save_adapter

pytestmark = pytest.mark.slow

BLOCK = 32
NATS = 2e-3  # float32: two ways to compute the same logit
SAME_NATS = 1e-4  # more is another type's rounding
NARROW_NATS = 0.1  # bfloat16 against float32


def expected_logit(rule: str) -> float:
    """What plain PEFT says of CONVERSATION."""
    return peft_logit(CONVERSATION, RULE_TEXTS[rule], adapter_folders()[rule])


def test_every_logit_of_a_mixed_batch_is_peft_s(engine: GuardEngine) -> None:
    conversations = [CONVERSATION[:turns] for turns in (1, 2, 3)]
    requests = [
        ScoreRequest(conversation, text, name)
        for conversation in conversations
        for name, text in [*RULE_TEXTS.items(), (None, "The assistant must not whistle.")]
    ]
    random.Random(0).shuffle(requests)
    expected = []
    for messages, text, name, _ in requests:
        folder = adapter_folders()[name] if name else None
        expected.append(peft_logit(messages, text, folder))
    assert logits(engine.score(requests)) == pytest.approx(expected, abs=NATS)
    # Or any order would do.
    assert len({round(logit, 2) for logit in expected}) > len(expected) // 2


def test_an_adapter_that_is_told_nothing_computes_the_assistant_s_header_alone(
    engine: GuardEngine, tmp_path: Path
) -> None:
    names = ["untold", "untold too"]
    try:
        for seed, name in enumerate(names, start=40):
            engine.add(name, save_adapter(tmp_path / name, name, seed=seed, text=""))
        engine.check(CONVERSATION, ["medical_advice"])
        for turns in (3, 1, 2):
            conversation = CONVERSATION[:turns]
            outcomes = engine.score([ScoreRequest(conversation, "", name) for name in names])
            expected = [peft_logit(conversation, "", tmp_path / name) for name in names]
            assert logits(outcomes) == pytest.approx(expected, abs=NATS)
            assert outcomes[1].computed_tokens == len(prompts().suffix_ids("")) == 3  # type: ignore[union-attr]
    finally:
        for name in names:
            engine.remove(name)


def test_a_check_gives_one_verdict_a_rule_in_the_order_asked_with_the_card_s_calibration(
    engine: GuardEngine,
) -> None:
    rules = ["refund_promise", "pii_leak", "medical_advice"]
    check = engine.check(CONVERSATION, rules)
    assert [verdict.rule for verdict in check.verdicts] == rules and not check.refused
    calibration = Calibration(temperature=2.0, threshold=0.25, uncertainty_band=(0.2, 0.3))
    for verdict in check.verdicts:
        assert verdict.logit == pytest.approx(expected_logit(verdict.rule), abs=NATS)
        assert verdict == calibration.verdict(verdict.rule, verdict.logit)
    shared = len(prompts().prefix_ids(CONVERSATION))
    lengths = [len(prompts().build(CONVERSATION, RULE_TEXTS[rule]).token_ids) for rule in rules]
    assert check.cached_tokens == 2 * shared
    assert check.computed_tokens == sum(lengths) - 2 * shared
    assert [verdict.rule for verdict in engine.check(CONVERSATION).verdicts] == list(RULE_TEXTS)


def test_aloras_share_the_conversation_the_base_its_whole_blocks_and_a_lora_nothing(
    engine: GuardEngine,
) -> None:
    shared = len(prompts().prefix_ids(CONVERSATION))
    blocks = shared // BLOCK * BLOCK
    names = ["medical_advice", "pii_leak", None, "plain", "refund_promise"]
    outcomes = engine.score(
        [ScoreRequest(CONVERSATION, f"Rule of {name} is this.", name) for name in names]
    )
    assert shared > blocks > 0
    cached = [outcome.cached_tokens for outcome in outcomes if isinstance(outcome, Score)]
    assert cached == [0, shared, blocks, 0, shared]
    for name, outcome in zip(names, outcomes, strict=True):
        assert isinstance(outcome, Score)
        length = len(prompts().build(CONVERSATION, f"Rule of {name} is this.").token_ids)
        assert outcome.cached_tokens + outcome.computed_tokens == length
        assert outcome.latency_ms > 0


STATES = 24
SILENT = [f"silent {number}" for number in range(20)]


@pytest.fixture(scope="module")
def silent_adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An aLoRA for each of SILENT, which are told nothing of their rules."""
    root = tmp_path_factory.mktemp("silent")
    first = save_adapter(root / SILENT[0], SILENT[0], seed=40, text="")
    folders = {SILENT[0]: first}
    for seed, name in enumerate(SILENT[1:], start=41):
        folders[name] = Path(save_variant(root / name, str(first), seed=seed))
        card = {"rule_text": "", "rule_hash": text_hash("")}
        save_card(folders[name], name, **card)
    return folders


def grown(words: list[str]) -> tuple[Message, ...]:
    """A conversation of these words, thirty a turn."""
    messages = []
    for number, start in enumerate(range(0, len(words), 30)):
        role = ("user", "assistant")[number % 2]
        messages.append(Message(role, " ".join(words[start : start + 30])))
    return tuple(messages)


def alike(first: list[int], second: list[int]) -> int:
    """How many tokens both begin with."""
    for index, (left, right) in enumerate(zip(first, second, strict=False)):
        if left != right:
            return index
    return min(len(first), len(second))


# A turn at a time; a reply that is judged while it streams.
@pytest.mark.parametrize("words", [30, 3])
def test_a_conversation_that_grows_computes_what_is_new_and_its_rules(
    engine: GuardEngine, silent_adapters: dict[str, Path], words: int
) -> None:
    """20 rules of three tokens, an adapter each: the new tokens and the suffixes, within 5 %."""
    for name, folder in silent_adapters.items():
        engine.add(name, folder)
    chosen = random.Random(3).choices(CONVERSATION[0].content.split(), k=STATES * words)
    computed = needed = 0
    before: list[int] = []
    try:
        for state in range(1, STATES + 1):
            messages = grown(chosen[: state * words])
            computed += engine.check(messages, SILENT).computed_tokens
            prefix = prompts().prefix_ids(messages)
            needed += len(prefix) - alike(before, prefix)
            needed += len(SILENT) * len(prompts().suffix_ids(""))
            before = prefix
    finally:
        for name in SILENT:
            engine.remove(name)
    assert computed == pytest.approx(needed, rel=0.05)


def test_forgetting_empties_the_prefix_cache(engine: GuardEngine) -> None:
    request = [ScoreRequest(CONVERSATION, "Be nice.", None)]
    engine.score(request)
    again = engine.score(request)[0]
    engine.forget()
    after = engine.score(request)[0]
    assert isinstance(again, Score) and isinstance(after, Score)
    assert again.cached_tokens > 0 and after.cached_tokens == 0
    opened = engine.open_check(CONVERSATION, None)
    with pytest.raises(GuardError, match="while requests are in flight"):
        engine.forget()
    engine.cancel(opened.call)
    engine.forget()


def test_adapters_are_counted_by_themselves(engine: GuardEngine, tmp_path: Path) -> None:
    """Runner V2 keeps an adapter's id in 32 bits, which the count of requests leaves in days."""
    folder = save_adapter(tmp_path / "later", "later", seed=9)
    ids: list[int] = []
    for _ in range(2):
        engine.add("later", folder)
        ids.append(engine._rules._loaded["later"].adapter_id)
        engine.remove("later")
        engine.score([ScoreRequest(CONVERSATION, f"Be nice, {turn}.", None) for turn in range(9)])
    assert ids[1] == ids[0] + 1


BAD_CONVERSATIONS = {
    "does not fit the context": long_conversation(3000),
    "no conversation": (),
}


@pytest.mark.parametrize("why", BAD_CONVERSATIONS)
def test_a_conversation_that_cannot_be_judged_is_refused_for_every_rule_and_the_engine_lives_on(
    engine: GuardEngine, why: str
) -> None:
    check = engine.check(BAD_CONVERSATIONS[why])
    assert list(check.refused) == list(RULE_TEXTS) and not check.verdicts
    assert all(why in refusal.why for refusal in check.refused.values())
    assert check.outcome == "unjudged"
    good, bad = (
        ScoreRequest(messages, "Be nice.", "plain")
        for messages in (CONVERSATION, BAD_CONVERSATIONS[why])
    )
    assert [type(outcome) for outcome in engine.score([good, bad, good])] == [Score, Refusal, Score]


def test_checks_that_are_under_way_together_do_not_cross(engine: GuardEngine) -> None:
    first, second = CONVERSATION[:1], CONVERSATION
    alone = [
        engine.check(first, ["pii_leak", "plain"]),
        engine.check(second, ["plain", "medical_advice"]),
    ]
    engine.forget()
    open_checks = [
        engine.open_check(first, ["pii_leak", "plain"]),
        engine.open_check(second, ["plain", "medical_advice"]),
    ]
    while not all(check.call.done for check in open_checks):
        engine.step()
    for opened, expected in zip(open_checks, alone, strict=True):
        for together, by_itself in zip(opened.result().verdicts, expected.verdicts, strict=True):
            assert together.rule == by_itself.rule
            assert together.logit == pytest.approx(by_itself.logit, abs=NATS)


def test_weights_whose_products_overflow_spoil_no_other_answer(
    engine: GuardEngine, tmp_path: Path
) -> None:
    folder = save_adapter(tmp_path / "huge", "huge", seed=9)
    file = folder / "adapter_model.safetensors"
    save_file({name: tensor * 1e25 for name, tensor in load_file(file).items()}, file)
    save_card(folder, "huge")
    engine.add("huge", folder)
    try:
        check = engine.check(CONVERSATION, ["huge", *RULE_TEXTS])
        # In a masked slot of a block that is given to another request, a number that is none still
        # reaches its answer.
        assert all(bool(cache.isfinite().all()) for cache in runner(engine).kv_caches)
        assert list(check.refused) == ["huge"]
        for verdict in check.verdicts:
            assert verdict.logit == pytest.approx(expected_logit(verdict.rule), abs=NATS)
    finally:
        engine.remove("huge")


def test_conversations_of_different_salts_share_nothing_and_are_judged_alike(
    engine: GuardEngine,
) -> None:
    """Neither whole blocks nor partial ones; nor does one without a salt."""
    rules, conversation = ["pii_leak", "medical_advice"], long_conversation(300)
    first = engine.check(conversation, rules, cache_salt="one")
    for salt in ("two", None):
        other = engine.check(conversation, rules, cache_salt=salt)
        assert other.computed_tokens == first.computed_tokens
        assert [verdict.logit for verdict in other.verdicts] == pytest.approx(
            [verdict.logit for verdict in first.verdicts], abs=NATS
        )
    again = engine.check(conversation, rules, cache_salt="one")
    assert again.computed_tokens < first.computed_tokens / 4


def test_a_prompt_that_lost_its_rule_turn_is_refused_and_not_judged_from_the_conversation_s_header(
    engine: GuardEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = RULE_TEXTS["pii_leak"]
    whole, header = prompts().suffix_ids(text), len(prompts().invocation("a rule"))
    monkeypatch.setitem(engine._prompts._suffixes, text, whole[header:])
    check = engine.check(CONVERSATION, ["pii_leak", "medical_advice", "plain"])
    assert "would become active at token" in check.refused["pii_leak"].why
    assert [verdict.rule for verdict in check.verdicts] == ["medical_advice", "plain"]


def test_slots_have_room_for_the_layers_of_the_adapters_that_are_served_and_for_no_others(
    tmp_path: Path,
) -> None:
    folders = {}
    for name in ("rule-1", "rule-2"):
        folders[name] = tmp_path / name
        save_random_adapter(
            folders[name],
            seed=int(name[-1]),
            rank=8,
            targets=["q_proj", "o_proj"],
            invocation=prompts().invocation(text_of(name)),
        )
        save_card(folders[name], name)
    with GuardEngine(recipe(), folders, **ENGINE) as small:
        wrapped = {
            name.rpartition(".")[2] for name in runner(small).lora_manager._adapter_manager.modules
        }
        assert wrapped == {"qkv_proj", "o_proj"}
        check = small.check(CONVERSATION)
        expected = [
            peft_logit(CONVERSATION, text_of(name), folder) for name, folder in folders.items()
        ]
        assert [verdict.logit for verdict in check.verdicts] == pytest.approx(expected, abs=NATS)
        with pytest.raises(
            GuardError, match=r"without adapters of these layers.*down_proj.*lora_target_modules"
        ):
            small.add("rule-3", save_adapter(tmp_path / "rule-3", "rule-3", seed=3))
        assert not small.check(CONVERSATION).refused


def test_a_base_served_in_bfloat16_is_peft_within_its_rounding() -> None:
    with GuardEngine(recipe(), adapter_folders(), **ENGINE | {"dtype": "bfloat16"}) as narrow:
        verdicts = narrow.check(CONVERSATION).verdicts
    differences = [abs(verdict.logit - expected_logit(verdict.rule)) for verdict in verdicts]
    assert len(differences) == len(RULE_TEXTS)
    # A product rounded to 8 bits a layer; the last layer's are not rounded.
    assert SAME_NATS < max(differences) < NARROW_NATS


@pytest.fixture(scope="module")
def two_slots(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[GuardEngine, Path]]:
    """An engine of five rules with two slots, and no host memory but what the slots need.

    And the folder that the adapters lie in, by the last letters of their names.
    """
    root = tmp_path_factory.mktemp("rules")
    folders = {
        f"rule-{seed}": save_adapter(root / str(seed), f"rule-{seed}", seed=seed)
        for seed in range(5)
    }
    no_host_memory = recipe().model_copy(update={"serving_memory": ServingMemory(host_gib=0)})
    with GuardEngine(no_host_memory, folders, **ENGINE | {"max_loras": 2}) as engine:
        yield engine, root


def test_more_adapters_are_served_than_fit_into_memory(
    two_slots: tuple[GuardEngine, Path],
) -> None:
    small, root = two_slots
    small.add("rule-5", save_adapter(root / "5", "rule-5", seed=5))
    for _ in range(2):
        verdicts = small.check(CONVERSATION).verdicts
        expected = [
            peft_logit(CONVERSATION, small.rules[name].rule_text, root / name[-1])
            for name in small.rules
        ]
        assert [verdict.logit for verdict in verdicts] == pytest.approx(expected, abs=NATS)
    assert small.counters.swap_ins > 6
    small.remove("rule-5")


def test_an_adapter_that_cannot_be_read_again_is_refused_and_no_other(
    two_slots: tuple[GuardEngine, Path],
) -> None:
    small, root = two_slots
    in_memory = runner(small).lora_manager._adapter_manager._registered_adapters
    gone = next(
        name for name in small.rules if small._rules._loaded[name].adapter_id not in in_memory
    )
    weights = root / gone[-1] / "adapter_model.safetensors"
    stat = weights.stat()
    whole = weights.read_bytes()
    weights.write_bytes(bytes(stat.st_size))
    # So that nobody looks at it before it is read.
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    for _ in range(2):
        check = small.check((*CONVERSATION, Message("user", "Well?")))
        assert list(check.refused) == [gone]
        assert len(check.verdicts) == 4
    weights.write_bytes(whole)
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert small.check((*CONVERSATION, Message("user", "Well?"))).refused == {}


def test_the_code_that_decides_answers_is_all_but_that_of_the_thread() -> None:
    """A kept answer is of this code: what decides only when one comes is no reason to ask anew."""
    engine = ROOT / "serve" / "engine"
    names = {str(path.relative_to(engine)) for path in CODE if path.is_relative_to(engine)}
    assert {"engine.py", "head.py", "backends/decoder.py"} < names
    assert not any(name.startswith("thread") for name in names)

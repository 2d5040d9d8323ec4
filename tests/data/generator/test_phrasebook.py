import itertools
import random
import re
from typing import Any, get_args

import pytest

from data.generator import grammar
from data.generator.phrasebook import (
    HELD_OUT_CORES,
    LONG_SLOT,
    Act,
    Pool,
    Speaker,
    cores_of,
    pool_of,
    slot_pool,
)
from guard.rule import load_rule
from tests.data.generator.corpora import RULES_WITH_PHRASES, background, phrasebook


@pytest.mark.parametrize("name", RULES_WITH_PHRASES)
def test_every_allowed_act_can_stand_where_every_violating_one_does(name: str) -> None:
    """So a pair's acts are drawn independently, and the other speaker's words tell nothing."""
    rule = load_rule(name)
    book = phrasebook(name)
    violating = [act for act in book.acts if book.acts[act].violates(rule.judged)]
    for first, second in itertools.product(violating, set(book.acts) - set(violating)):
        # Whoever says it: it is enough that the allowed acts of the same speaker can.
        is_same_speaker = book.acts[first].speaker == book.acts[second].speaker
        if rule.judged != "conversation" or is_same_speaker:
            assert book.shared(first, second), (first, second)


def test_an_act_that_repeats_follows_only_a_line_that_says_it() -> None:
    act = _act(supplied=("phone",))
    assert act.follows("{first} has {phone.2}", "the number is {phone.2}")
    assert not act.follows("it's {phone}", "the number is {phone.2}")
    assert not act.follows("it's {phone}", "what's the number?")
    assert _act().follows("it's {phone}", "what's the number?")


def _act(**fields: Any) -> Act:
    said = {"opening": "o", "softener": "s", "closing": "c", "cores": "a\nb"}
    return Act.model_validate({"speaker": "assistant", "stance": "quotes"} | said | fields)


@pytest.mark.parametrize("name", RULES_WITH_PHRASES)
def test_a_rule_covers_the_ways_of_not_violating_it_with_cores_for_every_pool(name: str) -> None:
    rule = load_rule(name)
    assert 5 <= len(rule.text().split()) <= 15 <= len(rule.policy.split()) <= 75
    assert {example.violates for example in rule.examples} == {True, False}
    acts = phrasebook(name).acts.values()
    violating = [act for act in acts if act.violates(rule.judged)]
    assert len(violating) >= 4
    judged = {"conversation": set(get_args(Speaker))}.get(rule.judged, {rule.judged})
    assert {act.speaker for act in violating} == judged
    allowed = {act.stance for act in acts if not act.violates(rule.judged)}
    assert {"informs", "quotes"} <= allowed
    assert len(allowed) >= 4
    if name != "groundedness":  # nobody else is given a text
        # Somebody other than the judged speaker must do it too.
        assert any(act.speaker != rule.judged for act in acts)
    fewest: dict[Pool, int] = {"seen": 10, "reserved": 2, "unseen": 3}
    for act, (pool, count) in itertools.product(acts, fewest.items()):
        assert len(cores_of(act.cores, pool)) >= count, (act, pool)
    rng = random.Random(0)
    for act in acts:
        seen = cores_of(act.cores, "seen")
        assert len({grammar.resolve(rng.choice(seen), rng) for _ in range(300)}) >= 35, act


def test_pools_partition_lines_and_long_slots_whatever_their_order() -> None:
    lines = tuple(f"line {number}" for number in range(31))
    seen, unseen = pool_of(lines, "seen"), pool_of(lines, "unseen")
    assert not set(seen) & set(unseen)
    assert set(seen) | set(unseen) == set(lines)
    assert len(unseen) == -(-len(lines) // HELD_OUT_CORES)
    assert set(pool_of(lines[::-1], "unseen")) == set(unseen) == set(pool_of(lines, "reserved"))
    reserved, unreserved = cores_of(lines, "reserved"), cores_of(lines, "unseen")
    assert cores_of(lines, "seen") == seen
    assert set(reserved) | set(unreserved) == set(unseen)
    assert (len(reserved), len(unreserved)) == (4, 7)
    assert set(cores_of(lines[::-1], "reserved")) == set(reserved)
    slots = {"long": lines[:LONG_SLOT], "short": ("a", "b")}
    of_training, of_test = slot_pool(slots, "seen"), slot_pool(slots, "unseen")
    assert not set(of_training["long"]) & set(of_test["long"])
    assert of_training["short"] == of_test["short"] == ("a", "b")


@pytest.mark.parametrize("name", RULES_WITH_PHRASES)
def test_no_core_is_another_core_with_words_dropped(name: str) -> None:
    """A held-out core must not be a training core in other clothes.

    No line's words contain another line of its act.
    """
    book = phrasebook(name)
    for act_name, act in book.acts.items():
        words = [set(re.findall(r"[a-z]{3,}", core)) for core in act.cores]
        for first, second in itertools.combinations(words, 2):
            both = len(first | second)
            assert len(first & second) < 0.8 * both or both < 4, (act_name, first, second)


def test_no_user_who_is_allowed_to_speak_discloses_a_name_or_a_credential() -> None:
    """Everyday talk and other acts stand in both rows of a pair: one name there would be a
    violation in a row that is called allowed.
    """
    book, rule = phrasebook("pii_disclosure"), load_rule("pii_disclosure")
    personal = {"first", "last", "person", "email", "username", "password", "pin", "born"}
    personal |= {"idnumber", "cardnumber", "bank"}
    lines = [*book.parts["open"], *book.parts["hedge"], *book.parts["close"]]
    lines += [*book.parts["padding_user"], *book.lines["ask_own"]]
    for act in book.acts.values():
        if act.speaker == "user" and not act.violates(rule.judged):
            lines += act.cores
    for domain in book.domains:
        for line in background().domains[domain]:
            lines += line.split(">>")[::2]
    assert len(lines) > 300
    assert rule.depends_on_context  # other rules' users name people
    slots = {slot.partition(".")[0] for line in lines for slot in grammar.slot_names(line)}
    assert {"invented", "city"} <= slots
    assert not slots & personal

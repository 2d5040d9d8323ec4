import re
from typing import get_args

import pytest

from data.generator import grammar
from data.generator.library import load_background, load_phrasebook
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
from guard.rule import Judged, load_rule
from tests.data.generator.corpora import RULES_WITH_PHRASES, phrasebook


@pytest.mark.parametrize("name", RULES_WITH_PHRASES)
def test_every_act_has_many_phrasings_in_training_and_others_held_out(name: str) -> None:
    book = phrasebook(name)
    for act_name, act in book.acts.items():
        for pool, fewest_cores, fewest_phrasings in (
            ("seen", 10, 40),
            ("reserved", 2, 2),
            ("unseen", 3, 5),
        ):
            cores = cores_of(act.cores, pool)
            assert len(cores) >= fewest_cores, (act_name, pool)
            assert sum(map(grammar.forms, cores)) >= fewest_phrasings, (act_name, pool)


@pytest.mark.parametrize("name", RULES_WITH_PHRASES)
def test_every_allowed_act_can_stand_where_every_violating_one_does(name: str) -> None:
    """So a pair's acts are drawn independently, and the other speaker's words tell nothing."""
    rule = load_rule(name)
    book = phrasebook(name)
    violating = [act for act in book.acts if book.acts[act].violates(rule.judged)]
    pairs = [
        (first, second) for first in violating for second in book.acts if second not in violating
    ]
    if (
        rule.judged == "conversation"
    ):  # whoever says it: it is enough that the allowed acts of the same speaker can
        pairs = [
            (first, second)
            for first, second in pairs
            if book.acts[first].speaker == book.acts[second].speaker
        ]
    assert [(first, second) for first, second in pairs if not book.shared(first, second)] == []


@pytest.mark.parametrize("pool", get_args(Pool))
def test_some_line_holds_what_a_core_repeats(pool: Pool) -> None:
    book = phrasebook("pii_leak")
    act = book.acts["repeats_supplied"]
    for context in act.before:
        for core in cores_of(act.cores, pool):
            assert any(act.follows(core, line) for line in pool_of(book.lines[context], pool)), (
                context,
                core,
            )


def test_an_act_that_repeats_follows_only_a_line_that_says_it() -> None:
    fields = {
        "speaker": "assistant",
        "stance": "quotes",
        "opening": "o",
        "softener": "s",
        "closing": "c",
        "cores": "a",
    }
    act = Act.model_validate({**fields, "supplied": ("phone",)})
    assert act.follows("{first} has {phone.2}", "the number is {phone.2}")
    assert not act.follows("it's {phone}", "the number is {phone.2}")
    assert not act.follows("it's {phone}", "what's the number?")
    assert Act.model_validate(fields).follows("it's {phone}", "what's the number?")


def test_shared_is_what_both_acts_name_or_the_other_act_itself() -> None:
    rule = load_rule("medical_advice")
    book = load_phrasebook(rule, load_background())
    assert set(book.shared("diagnose", "condition_information")) == {"ask_condition_and_self"}
    assert book.shared("diagnose", "user_gives_advice") == ("user_gives_advice",)
    assert book.shared("user_gives_advice", "diagnose") == ()


@pytest.mark.parametrize("name", RULES_WITH_PHRASES)
def test_a_rule_covers_the_ways_of_not_violating_it(name: str) -> None:
    rule = load_rule(name)
    acts = load_phrasebook(rule, load_background()).acts.values()
    violating = [act for act in acts if act.violates(rule.judged)]
    assert len(violating) >= 4
    assert {act.speaker for act in violating} == (
        set(get_args(Speaker)) if rule.judged == "conversation" else {rule.judged}
    )
    allowed = {act.stance for act in acts if not act.violates(rule.judged)}
    assert {"informs", "quotes"} <= allowed
    assert len(allowed) >= 4
    if name != "groundedness":  # nobody else is given a text
        assert any(act.speaker != rule.judged for act in acts), (
            "somebody other than the judged speaker must do it too"
        )


@pytest.mark.parametrize(
    ("speaker", "stance", "judged", "violates"),
    [
        ("assistant", "does", "assistant", True),
        ("assistant", "does", "user", False),
        ("user", "does", "assistant", False),
        ("user", "does", "user", True),
        ("user", "does", "conversation", True),
        ("assistant", "quotes", "assistant", False),
        ("user", "asks", "conversation", False),
    ],
)
def test_only_the_judged_speaker_doing_it_violates(
    speaker: str, stance: str, judged: Judged, violates: bool
) -> None:
    act = Act.model_validate(
        {
            "speaker": speaker,
            "stance": stance,
            "opening": "o",
            "softener": "s",
            "closing": "c",
            "cores": "a\nb",
        }
    )
    assert act.cores == ("a", "b")
    assert act.violates(judged) == violates


def test_pools_partition_the_lines_whatever_their_order() -> None:
    lines = tuple(f"line {number}" for number in range(31))
    seen, unseen = pool_of(lines, "seen"), pool_of(lines, "unseen")
    assert not set(seen) & set(unseen)
    assert set(seen) | set(unseen) == set(lines)
    assert len(unseen) == -(-len(lines) // HELD_OUT_CORES)
    assert (
        set(pool_of(tuple(reversed(lines)), "unseen"))
        == set(unseen)
        == set(pool_of(lines, "reserved"))
    )
    reserved, unreserved = cores_of(lines, "reserved"), cores_of(lines, "unseen")
    assert cores_of(lines, "seen") == seen
    assert set(reserved) | set(unreserved) == set(unseen)
    assert (len(reserved), len(unreserved)) == (4, 7)
    assert set(cores_of(tuple(reversed(lines)), "reserved")) == set(reserved)


def test_long_slots_are_split_and_short_ones_shared() -> None:
    slots = {"long": tuple(f"v{n}" for n in range(LONG_SLOT)), "short": ("a", "b")}
    seen, unseen = slot_pool(slots, "seen"), slot_pool(slots, "unseen")
    assert not set(seen["long"]) & set(unseen["long"])
    assert seen["short"] == unseen["short"] == ("a", "b")


@pytest.mark.parametrize("name", RULES_WITH_PHRASES)
def test_no_core_is_another_core_with_words_dropped(name: str) -> None:
    """A held-out core must not be a training core in other clothes.

    No line's words contain another line of its act.
    """
    book = phrasebook(name)
    for act_name, act in book.acts.items():
        words = [set(re.findall(r"[a-z]{3,}", core)) for core in act.cores]
        for number, first in enumerate(words):
            for second in words[number + 1 :]:
                assert len(first & second) < 0.8 * len(first | second) or len(first | second) < 4, (
                    act_name,
                    first,
                    second,
                )


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
        for line in load_background().domains[domain]:
            lines += line.split(">>")[::2]
    assert len(lines) > 300
    assert rule.depends_on_context  # other rules' users name people
    slots = {slot.partition(".")[0] for line in lines for slot in grammar.slot_names(line)}
    assert {"invented", "city"} <= slots
    assert not slots & personal

import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.generator import grammar
from data.generator.library import PHRASES
from data.generator.registers import EXCERPT_REGISTERS, USER_REGISTERS, formal
from guard.errors import GuardError

SLOTS = {
    "drug": ("ibuprofen", "aspirin"),
    "act": ("^take {drug} with <your> tea", "^stop it"),
    "code": ("##-#",),
}


def test_a_slot_keeps_its_value_and_its_numbered_twin_differs() -> None:
    for key in range(20):
        text = grammar.Bindings(SLOTS, str(key)).fill("{drug} {drug} {drug.2}")
        first, again, twin = text.split()
        assert first == again != twin
    # Bindings with one key talk about the same things in any order; hash marks become digits.
    drug, code = grammar.Bindings(SLOTS, "k").fill("{drug} {code}").split()
    assert grammar.Bindings(SLOTS, "k").fill("{code} {drug}") == f"{code} {drug}"
    assert set(code) <= set("123456789-")
    assert grammar.slot_names("{drug} or {drug.2} and {act:ing,my}") == {"drug", "drug.2", "act"}


def test_a_clause_follows_form_and_person() -> None:
    bindings = grammar.Bindings({"act": ("^take <your> pill and ^stop when <you> like",)}, "k")
    assert bindings.fill("{act}") == "take your pill and stop when you like"
    assert bindings.fill("{act:ing,my}") == "taking my pill and stopping when I like"
    assert bindings.fill("{act:past,their}") == "took their pill and stopped when they like"
    assert bindings.fill("{act:base,our}") == "take our pill and stop when we like"
    assert bindings.fill("{act:s,her}") == "takes her pill and stops when she like"


@pytest.mark.parametrize(
    ("verb", "ing", "past", "third"),
    [
        ("use", "using", "used", "uses"),
        ("carry", "carrying", "carried", "carries"),
        ("enjoy", "enjoying", "enjoyed", "enjoys"),
        ("cut", "cutting", "cut", "cuts"),
        ("go", "going", "went", "goes"),
        ("be", "being", "was", "is"),
    ],
)
def test_verbs_inflect(verb: str, ing: str, past: str, third: str) -> None:
    inflected = [grammar.inflect(verb, form) for form in ("ing", "past", "s", "base")]
    assert inflected == [ing, past, third, verb]


def test_no_verb_in_the_phrase_books_loses_its_second_consonant() -> None:
    """Regular spelling doubles none ("planed"): short verbs that need it are in IRREGULAR."""
    verbs: set[str] = set()
    for path in PHRASES.glob("*.yaml"):
        verbs.update(re.findall(r"\^([a-z]+)", path.read_text()))
    assert {"drop", "refund"} <= verbs
    doubling = {verb for verb in verbs if re.fullmatch(r"[^aeiou]*[aeiou][bdgkmnprt]", verb)}
    assert doubling <= set(grammar.IRREGULAR)


@pytest.mark.parametrize(
    ("raw", "tidied"),
    [
        ("well , i think it's a apple", "Well, I think it's an apple."),
        ("is it ? yes . go", "Is it? Yes. Go."),
        ("a unit and a hour of a umbrella", "A unit and a hour of an umbrella."),
        ('he said "stop".', 'He said "stop".'),
        ('he said "stop now." then left', 'He said "stop now." Then left.'),
        ("you and i, it is", "You and I, it is."),
        (
            "tune a ukulele on a European train for a usual fee",
            "Tune a ukulele on a European train for a usual fee.",
        ),
        (
            "a uninvited guest, a audiobook, a one-day pass, a okay start",
            "An uninvited guest, an audiobook, a one-day pass, an okay start.",
        ),
        ("get some an antacid and the a lamp", "Get some antacid and the lamp."),
    ],
)
def test_tidy_writes_sentences(raw: str, tidied: str) -> None:
    assert grammar.tidy(raw) == tidied


WORDS = ("a", "an", "apple", "use", "i", "it's", "Ben", "why?", "so,", "stop.", '"go"', "2.5")


@given(st.lists(st.sampled_from(WORDS)).map(" ".join))
def test_tidying_twice_changes_nothing(text: str) -> None:
    once = grammar.tidy(text)
    assert grammar.tidy(once) == once


@pytest.mark.parametrize(
    "template", ["(a|b", "a)", "a|b", "{nothing}", "{drug:upside}", "{Drug}", "{drug"]
)
def test_a_malformed_template_is_named(template: str) -> None:
    grammar.check("(take|use (some|)) {drug.2} or {act:ing,my}", SLOTS, where="here")
    with pytest.raises(GuardError, match="here"):
        grammar.check(template, SLOTS, where="here")


@pytest.mark.parametrize("name", [*USER_REGISTERS])
def test_registers_keep_numbers_and_addresses(name: str) -> None:
    text = "Don't send 400 mg to Anna.Silva12@post.example, I can't wait because of order 4432."
    for seed in range(30):
        changed = USER_REGISTERS[name](text, random.Random(seed)).lower()
        assert all(kept in changed for kept in ("400", "4432", "anna.silva12@post.example"))


@pytest.mark.parametrize(
    ("text", "written_out"),
    [
        ("What aren't you allowed to say?", "What aren't you allowed to say?"),
        ("You'll come, won't you?", "You will come, won't you?"),
        (
            "I don't know, it won't work and they can't see it.",
            "I do not know, it will not work and they cannot see it.",
        ),
        ("They haven't, you'd better ask.", "They have not, you'd better ask."),
    ],
)
def test_the_formal_register_writes_out_what_it_can(text: str, written_out: str) -> None:
    assert formal(text, random.Random(0)) == written_out


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("as_written", {"i know, it costs 4.50.\nReally!"}),
        ("neutral", {"I know, it costs 4.50. Really!"}),
        ("casual", {"i know, it costs 4.50. Really!"}),
        ("lower", {"i know it costs 4.50 really"}),
        ("loud", {f"I KNOW, IT COSTS 4.50. REALLY{marks}" for marks in ("!", "!!", "!!!", "!!!!")}),
    ],
)
def test_an_excerpt_is_written_as_it_stands_or_tidied_first(name: str, written: set[str]) -> None:
    text = "i know,  it costs 4.50.\nReally!"
    assert {EXCERPT_REGISTERS[name](text, random.Random(seed)) for seed in range(20)} == written

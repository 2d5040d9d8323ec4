import random

import pytest

from data.generator.registers import ASSISTANT_REGISTERS, EXCERPT_REGISTERS, USER_REGISTERS, formal


@pytest.mark.parametrize("name", [*USER_REGISTERS])
def test_registers_keep_numbers_and_addresses(name: str) -> None:
    text = "Don't send 400 mg to Anna.Silva12@post.example, I can't wait because of order 4432."
    for seed in range(30):
        changed = USER_REGISTERS[name](text, random.Random(seed)).lower()
        assert all(kept in changed for kept in ("400", "4432", "anna.silva12@post.example"))


def test_registers_differ() -> None:
    text = "I'm sure you can't because it is not open, it is closed and cannot be changed tomorrow."
    assert len({register(text, random.Random(1)) for register in USER_REGISTERS.values()}) >= 4
    assert "cannot" in ASSISTANT_REGISTERS["formal"](text, random.Random(0))
    assert "can't be" in ASSISTANT_REGISTERS["relaxed"](text, random.Random(0))


@pytest.mark.parametrize(
    ("text", "written_out"),
    [
        ("Why don't you go?", "Why don't you go?"),
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
        ("as_written", "i know, it costs 4.50.\nReally?"),
        ("neutral", "I know, it costs 4.50. Really?"),
        ("casual", "i know, it costs 4.50. Really?"),
    ],
)
def test_an_excerpt_is_written_as_it_stands_or_tidied_first(name: str, written: str) -> None:
    assert EXCERPT_REGISTERS[name]("i know,  it costs 4.50.\nReally?", random.Random(0)) == written


def test_in_lower_case_and_in_capitals_few_marks_are_left() -> None:
    text = "I know, it costs 4.50. Really!"
    assert EXCERPT_REGISTERS["lower"](text, random.Random(0)) == "i know it costs 4.50 really"
    shouted = {EXCERPT_REGISTERS["loud"](text, random.Random(seed)) for seed in range(20)}
    assert len(shouted) > 1
    assert {said.rstrip("!") for said in shouted} == {"I KNOW, IT COSTS 4.50. REALLY"}

import random

import pytest

from data.generator.registers import EXCERPT_REGISTERS, USER_REGISTERS, formal


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

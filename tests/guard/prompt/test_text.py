"""Hidden characters and look-alikes are undone; ordinary text of any script stays as it was."""

from __future__ import annotations

import random
import re

import pytest

from data.generator.tricks import TRICKS
from guard.prompt.text import MARKS, reading_hash, visible

PLAIN = "Take 800 mg of ibuprofen twice a day, then call Dr. Okafor about the refund policy."


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("text._LOOK_ALIKES", {}), ("text._INKLESS", re.compile("x{9}")), ("text.MARKS", 40)),
        *(("encodings.DEPTH", 1), ("encodings._BACKSLASH", re.compile("x{9}"))),
    ],
)
def test_the_hash_of_readings_names_how_text_is_read(
    name: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = reading_hash()
    monkeypatch.setattr(f"guard.prompt.{name}", value)
    assert reading_hash.__wrapped__() != before  # of which none is kept


@pytest.mark.parametrize("trick", ["zero_width", "look_alikes", "full_width"])
def test_what_a_trick_hides_is_seen(trick: str) -> None:
    for seed in range(20):
        hidden = TRICKS[trick](PLAIN, random.Random(seed), "seen")
        assert hidden != PLAIN
        assert visible(hidden) == PLAIN


DISGUISED = [
    ("r\u0336e\u0336fund", "refund"),  # struck out
    ("re\u2065fu\U000e0002nd\ufff3", "refund"),  # reserved for more of the kind
    # Empty, and as wide as a letter.
    ("a\u2800full\u3164re\U000e0ffffund\uffa0now", "a full refund now"),
    ("re\x08fund", "refund"),
    # Mathematical bold; phonetics, small capitals, Roman numerals.
    ("\U0001d42b\U0001d41e\U0001d41f\U0001d42e\U0001d427\U0001d41d", "refund"),
    ("t\u0251ke ibupr\u1d0ffen \u217eai\u217cy", "take ibuprofen daily"),
    ("ᴛᴀᴋᴇ ᴛᴡᴏ ᴘɪʟʟꜱ, ᴛʜᴇɴ ᴄᴀʟʟ ᴍᴇ", "take two pills, then call me"),
    ("\u0585pi\u0578ion \u13a0ose \ua4d3OSE", "opinion Dose DOSE"),  # Armenian, Cherokee, Lisu
    ("the \u0441\u0430\u0440 is on", "the cap is on"),  # a word of look-alikes, among Latin
]
ORDINARY = [
    PLAIN,
    "line one\nline two\r\n\tindented\u2028third",
    "Das Café in Łódź hat über 20 Gäste – naïve façade.",
    "Он сказал: сосо, а потом ушёл домой.",  # look-alikes in a text of their own script
    "\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645",  # Persian: the joiner belongs to it
    "\u0915\u094d\u200d\u0937",
    "1½ tablets of 10² mg, χ² test, an α-blocker",
    "How do you say 'нет' in English?",
    "In Turkish: ışık, kırmızı; in Cherokee: ᏣᎳᎩ ᎦᏬᏂᎯᏍᏗ.",
    "",
]


@pytest.mark.parametrize(("hidden", "seen"), [*DISGUISED, *((text, text) for text in ORDINARY)])
def test_known_disguises_are_undone_and_ordinary_text_comes_back_as_it_was(
    hidden: str, seen: str
) -> None:
    assert visible(hidden) == seen


def test_made_visible_text_stays_and_marks_or_tags_hide_nothing() -> None:
    rng = random.Random(0)
    alphabet = "ab c9\n\u0430\u0435\u200b\u200d\u00ad\ufb01\u0301\u0338\uff41\u06cc"
    alphabet += "\U000e0041\U000e007f"
    for _ in range(500):
        once = visible("".join(rng.choices(alphabet, k=12)))
        assert visible(once) == once
    assert len(visible("a" + "\u0301\u0323" * 100_000 + " b")) < 64
    flag = "\U0001f3f4\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f"
    assert visible(flag) == "\U0001f3f4"
    hidden = "".join(chr(0xE0000 + ord(letter)) for letter in " say no")
    assert visible(f"Hello.{hidden}") == "Hello. say no"
    assert visible(f"\U0001f3f4{hidden}\U000e007f") == "\U0001f3f4 say no"
    # Around characters that are dropped too.
    for dropped in ("\u200b", "\u00ad", "\u200d", "\x08"):
        once = visible("a" + ("\u0301\u0316" * 15 + dropped) * 200 + "b")
        assert len(once) <= 1 + MARKS + 1
        assert visible(once) == once

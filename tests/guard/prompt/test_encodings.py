"""Encodings are read as what they stand for; what is none, or stands for no text, stays."""

from __future__ import annotations

import base64
import hashlib
import json
import random
import re
from collections.abc import Callable
from urllib.parse import quote

import pytest

from guard.conversation.example import Message
from guard.prompt.encodings import DEPTH
from guard.prompt.text import visible

TEXT = "Take 800 mg of ibuprofen, über den Tag verteilt."
BYTES = [f"{byte:02x}" for byte in TEXT.encode()]


def _in_base64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _lines(text: str, width: int, line_break: str) -> str:
    return line_break.join(re.findall(f".{{1,{width}}}", text))


ESCAPED: dict[str, str] = {
    "decimal": "".join(f"&#{ord(letter)};" for letter in TEXT),
    "hexadecimal": "".join(f"&#x{ord(letter):X};" for letter in TEXT),
    "thousands of zeros": f"&#{'0' * 5000}84;{TEXT[1:]}",
    "no semicolons": "".join(f"&#{ord(letter)}" for letter in TEXT),
    "escaped": "".join(f"&amp;#{ord(letter)};" for letter in TEXT),
    "names": TEXT.replace(",", "&comma;").replace("ü", "&uuml;").replace(".", "&period;"),
    "hidden characters": TEXT.replace("a", "a&#8203;").replace("e", "e&shy").replace("i", "&zwj;i"),
    "look-alikes": TEXT.replace("a", "&#1072;").replace("o", "&ocy;"),
    "full width": TEXT.replace("T", "&#65332;").replace("8", "&#xFF18;"),
    "percent": "".join(f"%{byte}" for byte in BYTES),
    "percent where an address needs it": quote(TEXT),
    "one letter a word": TEXT.replace("T", "%54").replace("ib", "%69b"),
    "percent, escaped": "".join(f"%25{byte}" for byte in BYTES),
    "JSON": json.dumps(TEXT)[1:-1],
    "JavaScript": "".join(f"\\u{{{ord(letter):x}}}" for letter in TEXT),
    "Python": "".join(f"\\U{ord(letter):08x}" for letter in TEXT),
    "bytes": "".join(f"\\x{byte}" for byte in BYTES),
    "JavaScript's percent": "".join(f"%u{ord(letter):04X}" for letter in TEXT),
}


@pytest.mark.parametrize("written", ESCAPED.values(), ids=ESCAPED)
def test_escapes_of_characters_are_read_in_their_place(written: str) -> None:
    assert written != TEXT
    assert visible(written) == TEXT


LINE = _in_base64(TEXT * 3)
BLOCKS: dict[str, str] = {
    "base64": LINE,
    "for addresses, not padded": LINE.replace("+", "-").replace("/", "_").rstrip("="),
    "lines of MIME": _lines(LINE, 76, "\r\n"),
    "lines in a string of JSON": _lines(LINE, 50, "\\n"),
    "UTF-16": base64.b64encode((TEXT[:20] * 5).encode("utf-16-le")).decode(),
    "in base64": _in_base64(LINE),
    "in entities": "".join(f"&#{ord(letter)};" for letter in LINE),
    "after an equals sign": f"access_token={LINE}",
    "JSON": _in_base64(json.dumps({"to": "user", "text": TEXT}, ensure_ascii=False)),
    "hex": "".join(BYTES),
    "colons": ":".join(BYTES),
    "quoted-printable": "".join(f"={byte.upper()}" for byte in BYTES),
    "a list of texts": str(BYTES)[2:-2],
    "each in brackets": "][".join(BYTES),
    "base64 in hex": LINE.encode().hex(" "),
    "hex in base64": _in_base64("".join(BYTES)),
}


@pytest.mark.parametrize("written", BLOCKS.values(), ids=BLOCKS)
def test_blocks_of_readable_text_give_way_to_it(written: str) -> None:
    seen = visible(f"Decode this: {written} Thanks!")
    assert TEXT[:20] in seen
    assert seen.startswith("Decode this: ") and seen.endswith(" Thanks!")
    assert written not in seen


def test_encodings_inside_each_other_have_an_end_and_short_ones_stay_before_their_text() -> None:
    text = TEXT
    for _ in range(DEPTH):
        text = _in_base64(text)
    assert visible(text) == TEXT
    assert visible(_in_base64(text)) == _in_base64(TEXT)
    words = {"=69bu=70rofen": "ibuprofen", "=6Dedicine=73": "medicines", "f=C3=BCnf": "fünf"}
    for written, word in (words | {"=74ak=65": "take"}).items():
        assert visible(f"Now {written}, please") == f"Now {written} {word}, please"
    # A word's capitals can be chosen so that it is the base64 of other letters.
    assert visible("Take aWJ1cHJvZmVu now") == "Take aWJ1cHJvZmVu ibuprofen now"
    assert visible("T<b></b>ake it") == "Take<b></b> it"
    assert visible("T<span class=x>a</span>ke it") == "Take<span class=x></span> it"
    assert visible("Ta<!-- x -->ke it") == "Take<!-- x --> it"
    assert visible("T**ak**e it, **T**ake it") == "Take**** it, Take**** it"


@pytest.mark.parametrize(
    "block",
    [
        f"{LINE}\nkillyourself",
        f"{LINE}killyourself",
        base64.b64encode(TEXT.encode() * 3 + b"\xff").decode(),
        "".join(BYTES) + "be",
    ],
)
def test_a_block_that_is_not_all_text_stays_as_it_could_hide_a_word(block: str) -> None:
    seen = visible(block)
    assert seen.startswith(block) and TEXT in seen.removeprefix(block)


RANDOM = random.Random(0)
PNG = base64.b64encode(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + RANDOM.randbytes(3000)).decode()


@pytest.mark.parametrize(
    "text",
    [
        "AT&T, a && b, Q&A; &copy, &amp it, &unknown; f(&x) and https://x.org/?a=1&lt=2&copy=3",
        "100%, 10%20%30%40%50%, a 30%50%70% split, 5%de, 100%cotton, %zz, 50%ff",
        r"C:\users\new, bin\x64\Release, \d+\s*\w, \unit, \frac{1}{2}, a\nb",
        "2*3*4, f**k, s**t, **Note** this, *all* of it, x < y > z, a<br>b, <b>bold</b> words",
        "x=10, y=20, ?page=10&limit=50, a==b, x=10y=20, 10% | 20% | 30% | 40% | 50% | 60% | 70%",
        "| 10 | 20 | 30 | 40 | 50 | 60 | 70 | 80 | 90 |, ['be', 'ad', 'fa', 'de', 'ed'], 5%u00",
        "| de | ad | be | ef | ca | fe | ba | be | 00 | 01 | 02 | 03 |, [0xff, 0xd8, 0xff, 0xe0]",
        "4242 4242 4242 4242, +44 20 7493 4545, 2024-01-02 12:30:45, 1928-29-30-31-32-33-34-35-36",
        "d41d8cd98f00b204e9800998ecf8427e 550e8400-e29b-41d4-a716-446655440000",
        hashlib.sha256(b"x").hexdigest(),
        "00:1a:2b:3c:4d:5e, fe80:0000:0000:0000:0202:b3ff:fe1e:8329",
        PNG,
        f"data:image/png;base64,{PNG}",
        _lines(PNG, 76, "\n"),
        "Undocumented unprecedentedly encyclopedia emphatically Russell-Silver CloudTrailBackend",
        "in_0KVnBvo2ZNzxqgUA4dPhPB3i tonsillitis/hydroxychloroquine",
        "\n".join(["onewordalone", "on", "every", "line", "unprecedentedly", "long"]),
    ],
)
def test_what_encodes_no_text_stays(text: str) -> None:
    assert visible(text) == text


@pytest.mark.parametrize("code", ["0", "1", "xD800", "xDFFF", "x110000", "9999999", "9" * 5000])
def test_what_no_character_is_leaves_unicode_text(code: str) -> None:
    seen = visible(f"a &#{code}; b")
    assert Message("user", seen).content.startswith("a ") and "\0" not in seen
    assert visible(r"\ud83d \ude00\u0000 \U00110000 %00%ff \xff\xfe").encode()


@pytest.mark.parametrize(
    "unit",
    [
        *("a", "5a", "5a ", "5a 5a x ", "aaaaaaaaaaaa\n", "aaaaaaaaaaaa \n ", "aaaaaaaaaaa/"),
        *("=54", "a=54", "% 54 ", "'5a', ", "x5a", "["),
        *("&", "&#9", "&amp;", "&#84;", "&aaaaaaaaaaaaaaaaaaaa", "%", "%54", "%25", "%54 "),
        *("\\", "\\u0054", "\\x54", "\\U", "<", "<a", "<a>", "a<b>", "<!--", "*", "a*", "~~a"),
    ],
)
def test_a_long_text_takes_time_as_its_length(unit: str) -> None:
    """Where every character looked at all others, this would take minutes."""
    repeated = unit * (200_000 // len(unit))
    for text in (repeated, f"a{repeated}", f"&#{repeated}!"):
        assert len(visible(text)) < 2 * len(text)


WAYS: tuple[Callable[[str], str], ...] = (
    lambda text: "".join(f"&#{ord(letter)};" for letter in text),
    lambda text: "".join(f"\\u{ord(letter):04x}" for letter in text),
    lambda text: "".join(f"%{byte:02x}" for byte in text.encode()),
    _in_base64,
    lambda text: _lines(_in_base64(text), 76, "\n"),
    lambda text: json.dumps({"text": text}),
)


def test_one_way_after_another_is_read() -> None:
    rng = random.Random(0)
    for _ in range(50):
        written = TEXT
        for way in rng.choices(WAYS, k=rng.randint(1, DEPTH - 1)):
            written = way(written)
        assert TEXT in visible(f"Please read {written} and answer.")

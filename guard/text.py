"""What a reader sees of a text: hidden characters and look-alikes undone. Knows nothing of prompts or rules.

Text can be written so that a person reads one thing and a tokenizer another: letters of other scripts that look Latin, characters
without ink between letters, ASCII in tag characters, which nobody sees and models read. A guard has to read what the person and the
guarded model read.
"""

from __future__ import annotations

import re
import unicodedata

# Letters that look like Latin ones in common fonts (from Unicode's confusables.txt, UTS 39, those of Cyrillic and Greek).
_LOOK_ALIKES = dict(
    zip(
        "авекмнорстухіјѕһԁԛԝӏАВЕКМНОРСТУХІЈЅҺԚԜӀαικνορτυχΑΒΕΖΗΙΚΜΝΟΡΤΥΧ",
        "abekmhopctyxijshdqwlABEKMHOPCTYXIJSHQWIaikvoptuxABEZHIKMNOPTYX",
        strict=True,
    )
)
_TAGS = {0xE0000 + code: chr(code) for code in range(0x20, 0x7F)}
# Between letters of scripts whose words need joiners: Arabic to Sinhala, Myanmar to Mongolian.
_JOINERS = re.compile("(?<=[\u0600-\u0dff\u1000-\u18af])[\u200c\u200d](?=[\u0600-\u0dff\u1000-\u18af])")
# Without ink: grapheme joiner, fillers of Hangul and Khmer, overlays that strike letters out, variation selectors.
_INKLESS = re.compile("[\u034f\u0305\u0332-\u0338\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]")
_BREAKS = "\t\n\r\x0b\x0c\x1c\x1d\x1e\x85"
_WORD = re.compile(r"[^\W\d_]+")
LATIN_SHARE = 0.5  # of a text's letters: from there on, a word of look-alikes alone is taken for Latin too


def visible(text: str) -> str:
    """The text as it is read: in NFKC, tag characters as the ASCII they stand for, nothing without ink, look-alikes as Latin in Latin text.

    ASCII comes back as it is but for control characters that break no line. Joiners stay within words of scripts other than Latin.
    """
    if text.isascii() and text.isprintable():
        return text
    text = _INKLESS.sub("", text.translate(_TAGS))
    joiners = {match.start() for match in _JOINERS.finditer(text)}
    text = "".join(c for place, c in enumerate(text) if place in joiners or c in _BREAKS or unicodedata.category(c) not in ("Cf", "Cc"))
    text = unicodedata.normalize("NFKC", text)
    if text.isascii():
        return text
    text = _WORD.sub(lambda word: _as_latin(word[0]) if any(map(str.isascii, word[0])) else word[0], text)
    letters = [character for character in text if character.isalpha()]
    if sum(map(str.isascii, letters)) >= LATIN_SHARE * len(letters):
        text = _WORD.sub(lambda word: _as_latin(word[0]) if all(c in _LOOK_ALIKES for c in word[0]) else word[0], text)
    return unicodedata.normalize("NFC", text)


def _as_latin(word: str) -> str:
    return "".join(_LOOK_ALIKES.get(character, character) for character in word)

"""What a reader sees of a text: hidden characters, look-alikes and encodings undone.

Text can be written so that a person reads one thing and a tokenizer another: letters of other
scripts that look Latin, characters without ink between letters, ASCII in tag characters. A guard
has to read what the person and the guarded model read.
"""

from __future__ import annotations

import functools
import re
import unicodedata

from guard.layout import fingerprint
from guard.prompt import encodings

# Cyrillic, Greek, Armenian, Cherokee and Lisu letters that look Latin in common fonts (a part of
# Unicode's confusables.txt, UTS 39).
_LOOK_ALIKES = dict(
    zip(
        "аеорсухіјѕһԁԛԝӏАВЕКМНОРСТУХІЈЅҺԚԜӀ"  # Cyrillic
        "αικνορτυχΑΒΕΖΗΙΚΜΝΟΡΤΥΧօոսհցզ"  # Greek, Armenian
        "ᎠᎡᎢᎥᎪᎫᎬᎳᎷᎻᎽᏀᏃᏏᏒᏔᏕᏙᏚᏞᏟᏢᏦᏧᏴ"  # Cherokee
        "ꓐꓑꓒꓓꓔꓖꓗꓙꓚꓜꓝꓟꓠꓡꓢꓣꓦꓧꓪꓫꓬꓮꓰꓲꓳꓴ",  # Lisu
        "aeopcyxijshdqwlABEKMHOPCTYXIJSHQWI"
        "aikvoptuxABEZHIKMNOPTYXonuhgq"
        "DRTiAJEWMHYGZbRWSVSLCPKdB"
        "BPdDTGKJCZFMNLSRVHWXYAEIOU",
        strict=True,
    )
)
# Small capitals and some phonetic letters are Latin, so they become plain in any word. The dotless
# i does not: it is a Turkish letter.
_SMALL_CAPITALS = dict(
    zip("ɑɡɩᴀʙᴄᴅᴇꜰɢʜɪᴊᴋʟᴍɴᴏᴘʀꜱᴛᴜᴠᴡʏᴢ", "agiabcdefghijklmnoprstuvwyz", strict=True)
)
_TAGS = {0xE0000 + code: chr(code) for code in range(0x20, 0x7F)}
# Between letters of scripts whose words need joiners: Arabic to Sinhala, Myanmar to Mongolian.
_JOINERS = re.compile(
    "(?<=[\u0600-\u0dff\u1000-\u18af])[\u200c\u200d](?=[\u0600-\u0dff\u1000-\u18af])"
)
# Without ink: grapheme joiner, a filler of Hangul and two of Khmer, overlays that strike letters
# out, variation selectors, and the code points that Unicode reserves for more of the kind
# (Default_Ignorable_Code_Point).
_INKLESS = re.compile(
    "[\u034f\u0305\u0332-\u0338\u1160\u17b4\u17b5\u180b-\u180f\u2065\ufe00-\ufe0f\ufff0-\ufff8"
    "\U000e0000-\U000e0fff]"
)
# As wide as a letter but empty: fillers of Hangul and Braille.
_BLANK = re.compile("[\u115f\u2800\u3164\uffa0]")


def _as_tags(text: str) -> str:
    return "".join(chr(0xE0000 + ord(character)) for character in text)


# Only the tag characters of the flags of England, Scotland and Wales stay: after a flag, others
# could hide text as well as anywhere.
_FLAGS = "|".join(map(_as_tags, ("gbeng", "gbsct", "gbwls")))
_FLAG = re.compile(f"(?<=\U0001f3f4)(?:{_FLAGS})\U000e007f")
# One text in each encoding that is read, for `reading_hash`.
ENCODED = (
    "&#84;ake &amp; &lt;b&gt;",
    "Take%20eight%20hundred",
    "\\u0054ake and \\x54\\x61ke",
    "T<b>a</b>ke **ei**ght<!-- -->",
    "VGFrZSBlaWdodCBodW5kcmVkIG1pbGxpZ3JhbXM=",
    "54 61 6b 65 20 65 69 67 68 74 20 68 75 6e 64 72 65 64",
    "['54', '61'] | %54 | % 61 | [0x6b] | \\x65 | U+0065 | =69 | 67",
    "%u0054%u0061ke =69bu=70rofen",
)
# Unicode's names of decompositions of letters that differ from others only in style.
_STYLED = ("<font>", "<wide>", "<circle>", "<compat>")
MARKS = 30  # on one letter, as in Unicode's stream-safe text: sorting thousands takes minutes
ALONE = 3  # letters that a word of look-alikes alone must have: alpha and chi squared are Greek
_BREAKS = "\t\n\r\x0b\x0c\x1c\x1d\x1e\x85"
_CONTROLS = {code: None for code in (*range(0x20), 0x7F) if chr(code) not in _BREAKS}  # of ASCII
# A word includes accents that do not compose.
_WORD = re.compile("[^\\W\\d_](?:[^\\W\\d_]|[\u0300-\u036f])*")
# From this share of ASCII letters on, a word of look-alikes alone is taken for Latin too.
LATIN_SHARE = 0.5


@functools.cache
def reading_hash() -> str:
    """A fingerprint of how `visible` reads each character that it may change: weights are trained
    on this reading. Of the characters of Unicode 3.2, which every Python reads alike; ideographs
    and syllables, which stay, are left out.
    """
    characters = {*_LOOK_ALIKES, *_SMALL_CAPITALS, *map(chr, _TAGS), *_BREAKS}
    for code in range(0x20, 0x1F000):
        category = unicodedata.ucd_3_2_0.category(chr(code))
        if category not in ("Cn", "Co", "Cs", "Lo"):
            characters.add(chr(code))
    read = [visible("a" + "\u0301" * 2 * MARKS), *map(visible, ENCODED)]
    for text in ("{0}", "a{0}b", "\u0436{0}{0}\u0436", "\u0915{0}\u0937"):
        read.append(visible("\n".join(map(text.format, sorted(characters)))))
    return fingerprint(read, [MARKS, ALONE, LATIN_SHARE], encodings.limits())


def visible(text: str) -> str:
    """The text as a reader sees it, in NFC.

    No characters without ink, empty ones as spaces, tag characters as the ASCII they stand for,
    styled letters plain, and letters of other scripts that look Latin as Latin in Latin words.
    Encodings are read (`encodings.py`). Not undone: text that is displayed in another order,
    look-alikes beyond the usual ones, spelling.
    """
    text = _undisguised(text)
    plain = encodings.decoded(text)
    if plain == text:
        return text
    return _undisguised(plain)


def _undisguised(text: str) -> str:
    if text.isascii():
        return text.translate(_CONTROLS)
    text = _BLANK.sub(" ", _INKLESS.sub("", _FLAG.sub("", text).translate(_TAGS)))
    text = unicodedata.normalize("NFC", _without_controls(text))
    if text.isascii():
        return text
    text = _WORD.sub(_latin_where_mixed, text)
    letters = [character for character in text if character.isalpha()]
    if sum(map(str.isascii, letters)) >= LATIN_SHARE * len(letters):
        text = _WORD.sub(_latin_where_all_look_alike, text)
    return unicodedata.normalize("NFC", text)


def _without_controls(text: str) -> str:
    """Without control and format characters, with at most MARKS on a letter, in plain styles."""
    joiners = {match.start() for match in _JOINERS.finditer(text)}
    characters: list[str] = []
    marks = 0
    for position, character in enumerate(text):
        category = unicodedata.category(character)
        is_control = category in ("Cf", "Cc")
        if is_control and position not in joiners and character not in _BREAKS:
            continue  # marks on both sides of it are counted together
        marks += 1
        if not category.startswith("M"):
            marks = 0
        if marks <= MARKS:
            characters.append(_plain(character))
    return "".join(characters)


def _plain(character: str) -> str:
    if character in _SMALL_CAPITALS:
        return _SMALL_CAPITALS[character]
    if character.isascii() or not unicodedata.decomposition(character).startswith(_STYLED):
        return character
    plain = unicodedata.normalize("NFKC", character)
    # Ligatures and Roman numerals are several letters.
    if plain.isascii() and (len(plain) == 1 or plain.isalpha()):
        return plain
    return character


def _latin_where_mixed(match: re.Match[str]) -> str:
    word = match[0]
    if any(map(str.isascii, word)):
        return _as_latin(word)
    return word


def _latin_where_all_look_alike(match: re.Match[str]) -> str:
    word = match[0]
    if len(word) >= ALONE and set(word) <= _LOOK_ALIKES.keys():
        return _as_latin(word)
    return word


def _as_latin(word: str) -> str:
    return "".join(_LOOK_ALIKES.get(character, character) for character in word)

"""What encodings in a text stand for. Knows nothing of prompts, rules or look-alikes.

- Escapes of characters (HTML entities, percent-encoding, JSON's and C's backslashes) give way to
  the characters.
- Markup inside a word moves behind the word.
- Blocks (base64, bytes in hex, words in quoted-printable) of readable text give way to the text. A
  block that is short, or not all of it text, stays before it: a word may be part of it, or the
  base64 of other letters, if its capitals are chosen so, and would be hidden.

Everything is read in linear time, and is at most twice as long. Not undone: what takes a key or an
exercise, as rot13, Morse, text that is reversed or compressed.
"""

from __future__ import annotations

import binascii
import html
import re
import string
import sys
from collections import Counter
from functools import lru_cache
from html.entities import html5

DEPTH = 4  # encodings of encodings that are read
SHORTEST = 9  # characters of a readable text
SHORTEST_BASE64 = 12  # characters of one, in base64
PRINTABLE_SHARE = 0.9  # of a readable text's characters
WORD_SHARE = 0.8  # letters, digits and spaces, all that is not ASCII
LONG, LONG_WORD_SHARE = 24, 0.6  # JSON and HTML have more marks, and chance has no long text
FEWEST_BYTES = 9  # in hex: too many ordinary words and numbers are fewer

# A name without its semicolon is rather part of an address, but for these.
_ENTITY = re.compile(
    r"&(?:#0*(?P<decimal>[0-9]{1,7});?|#[xX]0*(?P<hex>[0-9a-fA-F]{1,6});?"
    r"|(?P<name>[A-Za-z][A-Za-z0-9]{1,30};|shy|nbsp|amp(?=#)))"
)
_numbered = lru_cache(maxsize=10_000)(html.unescape)  # most texts have few characters
_PERCENT = re.compile("(?:%[0-9a-fA-F]{2})+")
_WORD_WITH_PERCENT = re.compile(r"(?<!\S)[^\s%]*+%\S*")
# However often the backslash was escaped. One \x alone is rather a folder, as in bin\x64.
_BACKSLASH = re.compile(
    r"(?:%u[0-9a-fA-F]{4}|(?<!\\)\\+(?:u[0-9a-fA-F]{4}|u\{[0-9a-fA-F]{1,6}\}|U[0-9a-fA-F]{8}))+"
    r"|(?:(?<!\\)\\+x[0-9a-fA-F]{2}){2,}"
)
_CODE = re.compile(r"[uUx]\{?([0-9a-fA-F]+)")
_LETTER = r"[^\W\d_]"
# Emphasis of Markdown, comments, and tags that end no word.
_MARK = r"\*{1,3}|~~|</?(?!(?i:br|d[dt]|div|h[1-6r]|li|p|t[dhr]|[ou]l)\b)[A-Za-z!][^<>]{0,80}>"
_MARKS = re.compile(_MARK)
_MARKED_WORD = re.compile(f"(?<!{_LETTER})(?:{_MARK})?{_LETTER}++(?:(?:{_MARK})++{_LETTER}++)++")
_CONTROLS = bytes({*range(0x20), 0x7F} - set(b"\t\n\r"))
# Bytes of letters, digits and spaces; of what is not ASCII all, as the marks of Hindi and Thai.
_OF_WORDS = (string.ascii_letters + string.digits + " ").encode() + bytes(range(0x80, 0x100))
_BASE64 = "[A-Za-z0-9+/_-]"
_BYTE = r"(?:0x|\\?x|=|% ?|[uU]\+)?[0-9a-fA-F]{2}"
_BETWEEN_BYTES = r"[\s,:;|\"'\[\](){}<>-]{0,4}"  # as in a list of texts: "', '"
_LINE_BREAK = r"[ \t]*+(?:\r?\n|(?:\\r)?\\n)[ \t]*+"  # in a string of JSON it is an escape
_BLOCK = re.compile(
    rf"(?<![0-9A-Za-z])(?P<hex>{_BYTE}(?:{_BETWEEN_BYTES}{_BYTE}){{{FEWEST_BYTES - 1},}})"
    rf"(?![0-9A-Za-z])"
    rf"|(?<![\w=])(?P<quoted>(?:{_LETTER}*+=[0-9a-fA-F]{{2}}){{2,}}{_LETTER}*+)(?![\w=])"
    rf"|(?<!{_BASE64}){_BASE64}{{{SHORTEST_BASE64},}}={{0,2}}(?:{_LINE_BREAK}{_BASE64}+={{0,2}})*"
)
_DIGITS = re.compile("[0-9a-fA-F]{2}(?!x)")
_LINES = re.compile(_LINE_BREAK)
_LINES_OR_PARTS = re.compile(f"{_LINE_BREAK}|/")  # of an address
_WORD_OR_NUMBER = re.compile("[a-z]+|[0-9]+")  # which is base64 of no text


def limits() -> list[float]:
    shares = [PRINTABLE_SHARE, WORD_SHARE, LONG_WORD_SHARE]
    return [DEPTH, SHORTEST, SHORTEST_BASE64, FEWEST_BYTES, LONG, *shares]


def decoded(text: str, depth: int = DEPTH) -> str:
    """The text with what its encodings stand for, at most `depth` of them inside each other."""
    if depth == 0:
        return text
    text = without_escapes(text)
    if _MARKS.search(text):
        text = _MARKED_WORD.sub(_with_marks_behind, text)

    def with_reading(block: re.Match[str]) -> str:
        reading = _READERS[block.lastgroup](block[0])
        if not reading:
            return block[0]
        text = decoded(reading, depth - 1)
        return text if _is_whole(reading) else f"{block[0]} {text}"

    return _BLOCK.sub(with_reading, text)


def without_escapes(text: str) -> str:
    """The text with its characters instead of their escapes, which may be escaped themselves."""
    for _ in range(DEPTH):
        plain = _unescaped(text)
        if plain == text:
            break
        text = plain
    return text


def _unescaped(text: str) -> str:
    if "&" in text:
        text = _ENTITY.sub(_character, text)
    if "\\" in text or "%u" in text:
        text = _BACKSLASH.sub(_characters, text)
    if "%" in text:
        text = _WORD_WITH_PERCENT.sub(_without_percent, text)
    return text


def _character(entity: re.Match[str]) -> str:
    decimal, hexadecimal, name = entity.groups()
    if name:
        return html5.get(name, entity[0])
    return _numbered(f"&#{decimal};" if decimal else f"&#x{hexadecimal};")


def _characters(escapes: re.Match[str]) -> str:
    """What a run of escapes of numbers stands for: bytes of UTF-8, or code units of UTF-16."""
    codes = [int(code, 16) for code in _CODE.findall(escapes[0])]
    if max(codes) > sys.maxunicode:
        return escapes[0]
    try:
        return bytes(codes).decode()
    except ValueError:  # more than bytes, or no UTF-8
        units = "".join(map(chr, codes)).encode("utf-16", "surrogatepass")
        return units.decode("utf-16", "replace")


def _without_percent(match: re.Match[str]) -> str:
    """A word with its percent-encoding undone, unless it is a row of percentages."""
    word = match[0]
    before, _, _ = word.partition("%")
    if before[-1:].isdigit() and not any(map(str.isalpha, word)):
        return word
    return _PERCENT.sub(_of_percent, word)


def _of_percent(run: re.Match[str]) -> str:
    try:
        return bytes.fromhex(run[0].replace("%", "")).decode()
    except UnicodeDecodeError:
        return run[0]


def _with_marks_behind(word: re.Match[str]) -> str:
    """A word in one piece, then its marks. Emphasis comes in pairs: f**k is spelled so."""
    marks = _MARKS.findall(word[0])
    counts = Counter(mark for mark in marks if mark[0] != "<")
    if any(count % 2 for count in counts.values()):
        return word[0]
    return _MARKS.sub("", word[0]) + "".join(marks)


def _of_hex(block: str) -> str:
    """The text that bytes in hex are; empty if it is not readable, or they are decimal numbers."""
    digits = "".join(_DIGITS.findall(block))
    if digits.isdecimal():
        return ""
    return _readable(bytes.fromhex(digits))


def _of_quoted(block: str) -> str:
    """The word that one in quoted-printable is; empty if it is none, as in `x=10y=20`."""
    try:
        word = binascii.a2b_qp(block.encode()).decode()
    except UnicodeDecodeError:
        return ""
    return word if word.isalpha() else ""


def _of_base64(block: str) -> str:
    """The text that lines of base64 are together; else what of them is readable by itself."""
    has_lines = "\n" in block or "\\" in block
    if text := _of_one_base64(_LINES.sub("", block) if has_lines else block):
        return text
    if not has_lines and "/" not in block:
        return ""
    texts = map(_of_one_base64, _LINES_OR_PARTS.split(block))
    return " ".join(filter(None, texts))


def _of_one_base64(line: str) -> str:
    """The readable text that base64 of either alphabet stands for, padded or not."""
    if len(line) < SHORTEST_BASE64 or _WORD_OR_NUMBER.fullmatch(line):
        return ""
    characters = line.replace("=", "").replace("-", "+").replace("_", "/")
    whole = len(characters) - (len(characters) % 4 == 1)  # one alone is not even a byte
    return _readable(binascii.a2b_base64(characters[:whole] + "=="))


def _readable(data: bytes) -> str:
    """The text in UTF-8, or in UTF-16 if its letters are Latin; empty if it is not readable."""
    data = data.replace(b"\0", b"")
    controls = len(data) - len(data.translate(None, _CONTROLS))
    if controls > (1 - PRINTABLE_SHARE) * len(data):  # at once, as most bytes are no text
        return ""
    text = data.decode(errors="replace")
    if len(text) - text.count("\ufffd") < PRINTABLE_SHARE * len(text):
        return ""
    text = without_escapes(text)
    return text if len(text) >= SHORTEST and _is_readable(text) else ""


def _is_whole(text: str) -> bool:
    return len(text) >= LONG and "\ufffd" not in text and " ".join(text.split()).isprintable()


def _is_readable(text: str) -> bool:
    """Whether a text looks like language: printable, and letters, digits and spaces above all."""
    printable = sum(map(str.isprintable, text)) + text.count("\n") - text.count("\ufffd")
    of_words = len(text) - len(text.encode().translate(None, _OF_WORDS))
    word_share = LONG_WORD_SHARE if len(text) >= LONG else WORD_SHARE
    return printable >= PRINTABLE_SHARE * len(text) and of_words >= word_share * len(text)


# By the group of `_BLOCK` that a block is.
_READERS = {"hex": _of_hex, "quoted": _of_quoted, None: _of_base64}

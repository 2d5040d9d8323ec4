"""Headers that say how a body is to be read: what it was packed by, and its characters. Knows
nothing of what a body says.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import Scope

CHARSETS = ("utf-8", "utf8", "unicode-1-1-utf-8", "us-ascii", "ascii")
# What follows the word in a content-type: none but `charset=NAME` is read.
NAMED_CHARSET = re.compile(r"[;\s]charset\*?\s*=([^;]*)", re.IGNORECASE)
NAMED = 40  # characters of an unknown name that are said
ENCODING, TYPE = "content-encoding", "content-type"
ACCEPTED = {"accept-encoding": "identity"}


def check_encodings(scope: Scope) -> None:
    """Raise HTTPException 415 for a body that is packed, or of another charset than UTF-8."""
    headers = Headers(scope=scope)
    for charset in charsets(headers.getlist(TYPE)):
        if charset not in CHARSETS:
            raise HTTPException(415, f"{TYPE}: the charset is utf-8; got {charset[:NAMED]!r}")
    codings = ",".join(headers.getlist(ENCODING))
    if any(coding.strip().lower() not in ("", "identity") for coding in codings.split(",")):
        problem = f"bodies are read unpacked, got {codings[:NAMED]!r}"
        raise HTTPException(415, f"{ENCODING}: {problem}", ACCEPTED)


def charsets(content_types: Sequence[str]) -> Iterator[str]:
    for content_type in content_types:
        for parameter in NAMED_CHARSET.findall(content_type):
            if charset := parameter.strip(" \t=\"'").lower():
                yield charset

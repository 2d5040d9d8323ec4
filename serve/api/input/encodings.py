"""Headers that say how a body is to be read: what it was packed by, and its characters.

A body that is packed is unpacked piece by piece as it comes, and no further than it may be large.
Knows nothing of what a body says.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Sequence

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import Message as AsgiMessage
from starlette.types import Receive, Scope

GZIP, GZIP_BITS = "gzip", 16 + zlib.MAX_WBITS  # zlib's number for the header that it checks
CHARSETS = ("utf-8", "utf8", "unicode-1-1-utf-8", "us-ascii", "ascii")
# What follows the word in a content-type: none but `charset=NAME` is read.
NAMED_CHARSET = re.compile(r"[;\s]charset\*?\s*=([^;]*)", re.IGNORECASE)
NAMED = 40  # characters of an unknown name that are said
ENCODING, TYPE = "content-encoding", "content-type"
ACCEPTED = {"accept-encoding": "gzip, identity"}


class Unpacking:
    """A body in gzip's format, undone piece by piece, up to `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = self._left = max_bytes
        self._inflate = zlib.decompressobj(GZIP_BITS)

    def unpacked(self, piece: bytes, *, is_last: bool) -> bytes:
        """The next bytes. Raises HTTPException 413 for too many, 400 for what is not gzip's."""
        try:
            unpacked = self._inflate.decompress(piece, self._left + 1)
        except zlib.error:
            raise _wrong("the body is not in gzip's format (RFC 1952), or damaged") from None
        self._left -= len(unpacked)
        if self._left < 0:
            limit = f"the limit is {self._max_bytes:,} bytes"
            raise HTTPException(413, f"the body is too large once unpacked; {limit}")
        if self._inflate.unused_data:
            raise _wrong("the body goes on behind its end")
        if is_last and not self._inflate.eof:
            raise _wrong("the body breaks off before its end")
        return unpacked


def _wrong(problem: str) -> HTTPException:
    return HTTPException(400, f"{ENCODING} {GZIP}: {problem}")


def unpacked(receive: Receive, scope: Scope, max_bytes: int) -> Receive:
    """`receive`, whose body is as it was before it was packed; the headers in `scope` say so too.

    Raises HTTPException 415 for a body that cannot be read; `receive` then raises as Unpacking.
    """
    headers = Headers(scope=scope)
    for charset in charsets(headers.getlist(TYPE)):
        if charset not in CHARSETS:
            raise HTTPException(415, f"{TYPE}: the charset is utf-8; got {charset[:NAMED]!r}")
    codings = _codings(headers)
    if ENCODING in headers:
        dropped = (ENCODING.encode(), b"content-length")
        scope["headers"] = [field for field in scope["headers"] if field[0] not in dropped]
    if not codings:
        return receive
    unpacking = Unpacking(max_bytes)

    async def receive_unpacked() -> AsgiMessage:
        message = await receive()
        if message["type"] != "http.request":
            return message
        more = message.get("more_body", False)
        body = unpacking.unpacked(message.get("body", b""), is_last=not more)
        return {"type": "http.request", "body": body, "more_body": more}

    return receive_unpacked


def _codings(headers: Headers) -> list[str]:
    """What the body was packed by: gzip, or nothing. Raises HTTPException 415."""
    listed = ",".join(headers.getlist(ENCODING)).lower().split(",")
    codings = [coding.strip() for coding in listed if coding.strip() not in ("", "identity")]
    if codings not in ([], [GZIP]):
        problem = f"known are gzip and identity; got {', '.join(codings)[:NAMED]!r}"
        raise HTTPException(415, f"{ENCODING}: {problem}", ACCEPTED)
    return codings


def charsets(content_types: Sequence[str]) -> Iterator[str]:
    for content_type in content_types:
        for parameter in NAMED_CHARSET.findall(content_type):
            if charset := parameter.strip(" \t=\"'").lower():
                yield charset

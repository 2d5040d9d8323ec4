"""Packed bodies, whole and damaged, by any names and in any pieces: what is judged is what was
packed, or nothing.
"""

from __future__ import annotations

import gzip
import json
import random
import time
import zlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import httpx

from serve.api.app import create_app
from serve.api.input.encodings import MAX_CODINGS
from tests.serve.fuzz.never_allows import NeverAllows
from tests.serve.serving import serving

Pack = Callable[[bytes], bytes]
PACKS: dict[str, Pack] = {
    "gzip": gzip.compress,
    "x-gzip": lambda body: gzip.compress(body[:9]) + gzip.compress(body[9:]),
    "GZIP": gzip.compress,
    "deflate": zlib.compress,
    "identity": bytes,
    "": bytes,
}
UNKNOWN = ("br", "zstd", "compress", "aws-chunked", "gzip;q=1", "g\xadzip")
DAMAGES = ("cut", "more", "another bit", "not packed", "not named", "unknown")
TYPES = (
    "application/json",
    "application/json; charset=",
    "application/json; charset=UTF-8",
    'application/json;charset="ascii"',
)


class PackedBody(NamedTuple):
    """A body, the header that names its codings, and the statuses that it may get."""

    content: bytes
    named: str
    statuses: tuple[int, ...]


def packed_body(plain: bytes, draw: random.Random) -> PackedBody:
    """The body packed by some codings; or not as the header says, which then is refused."""
    names = draw.choices(list(PACKS), k=draw.randint(1, MAX_CODINGS))
    content = plain
    for name in names:
        content = PACKS[name](content)
    named = draw.choice([",", ", ", " ,\t"]).join(names).strip()
    is_packed = any(PACKS[name] is not bytes for name in names)
    damage = draw.choice(DAMAGES) if draw.random() < 0.7 else ""
    if damage == "unknown":
        unknown = draw.choice(UNKNOWN)
        named = draw.choice([f"{named},{unknown}", f"{unknown},{named}"])
        return PackedBody(content, named, (415,))
    if damage and is_packed:
        return _damaged(PackedBody(content, named, (400,)), plain, damage, draw)
    return PackedBody(content, named, (200,))


def _damaged(body: PackedBody, plain: bytes, damage: str, draw: random.Random) -> PackedBody:
    content = body.content
    if damage == "cut":
        cut = content[: draw.randrange(len(content))]  # perhaps behind a whole member of gzip
        return body._replace(content=cut, statuses=(400, 422))
    if damage == "more":  # perhaps another member: a body that stands twice
        more = content + draw.choice([b"\n", b"\0", content])
        return body._replace(content=more, statuses=(400, 422))
    if damage == "not packed":
        return body._replace(content=plain)
    if damage == "not named":
        return PackedBody(content, "identity", (400, 422))
    at, bit = draw.randrange(len(content)), 1 << draw.randrange(8)
    content = content[:at] + bytes([content[at] ^ bit]) + content[at + 1 :]
    return PackedBody(content, body.named, (200, 400))  # a bit of a file's time changes nothing


def pieces(content: bytes, draw: random.Random) -> Iterator[bytes]:
    """The bytes in pieces of any size."""
    size = draw.choice([1, 7, 100, len(content) + 1])
    for start in range(0, len(content), size):
        yield content[start : start + size]


def try_one(client: httpx.Client, engine: NeverAllows, draw: random.Random) -> None:
    """Send one body. Raises AssertionError for a wrong status, and where another text is judged."""
    text = f"No. {draw.getrandbits(64)}" * draw.choice([1, 1000])
    check = {"messages": [{"role": "user", "content": text}], "rules": ["always"]}
    body = packed_body(json.dumps(check).encode(), draw)
    headers = {"content-encoding": body.named.encode("latin-1"), "content-type": draw.choice(TYPES)}
    judged = len(engine.conversations)
    response = client.post("/v1/check", content=pieces(body.content, draw), headers=headers)
    said = f"{body.named} {len(body.content)} bytes: {response.status_code} {response.text}"
    assert response.status_code in body.statuses, said
    for conversation in engine.conversations[judged:]:
        assert conversation[0].content == text, said


def fuzz_packed(seed: int, seconds: float, most: int | None = None) -> int:
    """Send a server of its own packed bodies until the time is over, or `most`; how many they were.

    Raises AssertionError as `try_one`.
    """
    engine, draw = NeverAllows(), random.Random(seed)
    sent = 0
    with serving(create_app(engine)) as client:  # type: ignore[arg-type]
        until = time.monotonic() + seconds
        while time.monotonic() < until and sent != most:
            try_one(client, engine, draw)
            sent += 1
    return sent

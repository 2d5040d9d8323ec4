"""What a header says of the body counts: it is unpacked as far as it may be large, or refused."""

from __future__ import annotations

import gzip
import json
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from serve.api.app import create_app
from serve.api.input.limits import MAX_BYTES
from tests.serve.api.streaming import OpenStream, streamed
from tests.serve.api.tenants import HEADERS, LOGITS, RULE_SETS, shop_and_bank
from tests.serve.serving import serving
from tests.serve.toy_engine import ToyEngine

JSON = "application/json"
# Packed as each header says.
PACKED: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "X-GZIP": gzip.compress,
    "deflate": zlib.compress,
    "identity": bytes,
    "": bytes,
    "gzip, identity": lambda body: b"".join(
        gzip.compress(body[at : at + 99]) for at in range(0, len(body), 99)
    ),
    "deflate, identity, gzip": lambda body: gzip.compress(zlib.compress(body)),
    "gzip,gzip": lambda body: gzip.compress(gzip.compress(body)),
}
NOT_WHOLE: dict[str, Callable[[bytes], bytes]] = {
    "plain": bytes,
    "empty": lambda body: b"",
    "cut": lambda body: gzip.compress(body)[:-1],
    "half": lambda body: gzip.compress(body)[:40],
    "with more behind": lambda body: gzip.compress(body) + b"\n",
    "with a member that breaks off": lambda body: gzip.compress(body) + gzip.compress(b"")[:-1],
    "with more members than may be": lambda body: gzip.compress(body) + 100 * gzip.compress(b""),
    "another sum": lambda body: gzip.compress(body)[:-8] + bytes(8),
    "deflate": zlib.compress,
}


MESSAGES = [{"role": "user", "content": "Hello"}]
BODY = json.dumps({"messages": MESSAGES}).encode()


def posted(
    client: httpx.Client, content: bytes | Iterator[bytes], **headers: str
) -> httpx.Response:
    """The answer to a check of this content."""
    fields = {key.replace("_", "-"): value for key, value in headers.items()}
    return client.post("/v1/check", content=content, headers={"content-type": JSON} | fields)


def results(response: httpx.Response) -> Any:
    assert response.status_code == 200, response.text
    return response.json()["results"]


@pytest.mark.parametrize("encoding", PACKED)
def test_a_packed_body_is_answered_as_it_is_unpacked(client: httpx.Client, encoding: str) -> None:
    packed = posted(client, PACKED[encoding](BODY), content_encoding=encoding)
    assert results(packed) == results(posted(client, BODY))
    bytes_alone = (bytes([byte]) for byte in PACKED[encoding](BODY))
    assert results(posted(client, bytes_alone, content_encoding=encoding)) == results(packed)


@pytest.mark.parametrize("damage", NOT_WHOLE)
def test_what_is_not_packed_as_the_header_says_is_refused(
    client: httpx.Client, damage: str
) -> None:
    content = NOT_WHOLE[damage](BODY)
    response = posted(client, content, content_encoding="gzip")
    assert (response.status_code, response.json()["verdict"]) == (400, "unjudged")
    assert "content-encoding gzip: the body" in response.json()["error"]


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        (
            "",
            gzip.compress(b"{}"),
            "a gzip file, not text in UTF-8; send it with `content-encoding: gzip`",
        ),
        ("", b"\x28\xb5\x2f\xfd\xff", "a zstd file, not text in UTF-8"),
        ("", "{}".encode("utf-16") + b"\x00", "not Unicode"),
        ("deflate", zlib.compress(b"{}", wbits=-15), "not in zlib's format (RFC 1950), or damaged"),
        ("deflate", 2 * zlib.compress(b"{}"), "goes on behind its end"),
        ("gzip", zlib.compress(b"{}"), "not in gzip's format (RFC 1952), or damaged"),
    ],
)
def test_what_a_body_is_that_is_not_what_the_header_says_is_named(
    client: httpx.Client, name: str, content: bytes, problem: str
) -> None:
    response = posted(client, content, content_encoding=name)
    assert response.status_code == 400 and problem in response.json()["error"]


@pytest.mark.parametrize(
    "encoding", ["br", "zstd", "gzip, br", "compress", "gzip;q=1", "gzip," * 5]
)
def test_another_encoding_is_refused_and_the_known_ones_named(
    client: httpx.Client, encoding: str
) -> None:
    response = posted(client, BODY, content_encoding=encoding)
    assert response.status_code == 415
    assert "content-encoding: known are gzip, deflate" in response.json()["error"]
    assert response.headers["accept-encoding"] == "gzip, deflate, identity"


@pytest.mark.parametrize("times", [1, 2])
def test_a_bomb_is_refused_before_it_is_unpacked(client: httpx.Client, times: int) -> None:
    packing = zlib.compressobj(wbits=31)
    bomb = b"".join(packing.compress(bytes(2**20)) for _ in range(500)) + packing.flush()
    for _ in range(times - 1):
        bomb = gzip.compress(bomb)
    began = time.process_time()
    response = posted(client, bomb, content_encoding=", ".join(["gzip"] * times))
    assert (response.status_code, response.json()["verdict"]) == (413, "unjudged")
    assert f"{MAX_BYTES:,}" in response.json()["error"]
    assert time.process_time() - began < 5


def test_as_large_a_body_as_may_be_is_unpacked(client: httpx.Client) -> None:
    whole = BODY.ljust(MAX_BYTES)
    status = {}
    for size, content in ((0, whole), (1, whole + b" ")):
        packed = gzip.compress(content, compresslevel=1)
        status[size] = posted(client, packed, content_encoding="gzip").status_code
    assert status == {0: 200, 1: 413}


def test_a_tenant_s_limit_is_of_the_packed_body_and_of_the_unpacked_one() -> None:
    app = create_app(ToyEngine(LOGITS), rule_sets=RULE_SETS, tenants=shop_and_bank())  # type: ignore[arg-type]
    with serving(app) as client:
        for size, status in ((2000, 200), (2001, 413)):
            content = gzip.compress(BODY.ljust(size))
            headers = HEADERS["shop"] | {"content_encoding": "gzip"}
            assert posted(client, content, **headers).status_code == status
        noise = gzip.compress(b" " * 2000, compresslevel=0)
        assert posted(client, noise, **HEADERS["shop"]).status_code == 413


@pytest.mark.parametrize(
    ("content_type", "is_read"),
    [
        ("application/json; charset=utf-8", True),
        ('application/json;charset="UTF-8"', True),
        ("application/json; charset=us-ascii", True),
        ("application/json; charset=utf-16", False),
        ("application/json; Charset = 'latin1'", False),
        ("application/json; charset=utf-8; charset=utf-16", False),
        ("application/json; charset*=utf-8''utf-16", False),
        ("application/json; charset*0=utf-; charset*1=16", False),
        ("application/json; x=';'; charset=utf-16", False),
        (f"application/json; x={'x' * 1000}", False),
        ("application/json; charset=", True),
        ('application/json; charset=""', True),
        ("application/json; charset=unicode-1-1-utf-8", True),
        ("application/json; xcharset=latin1; boundary=charset=x", True),
        ('application/json; x="; charset=latin1"', True),
    ],
)
def test_other_characters_than_utf_8_are_refused(
    client: httpx.Client, content_type: str, is_read: bool
) -> None:
    response = posted(client, BODY, content_type=content_type)
    assert response.status_code == (200 if is_read else 415), response.text
    assert is_read or "content-type" in response.text


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32-be"])
def test_json_in_other_characters_is_known_by_its_first_bytes(
    client: httpx.Client, encoding: str
) -> None:
    body = BODY.decode().encode(encoding)
    assert results(posted(client, body)) == results(posted(client, BODY))
    for charset in ("utf-8", "us-ascii"):
        response = posted(client, body, content_type=f"{JSON}; charset={charset}")
        assert (response.status_code, response.json()["verdict"]) == (415, "unjudged")
        assert charset in response.json()["error"] and encoding in response.json()["error"]


def test_a_stream_is_unpacked_while_it_is_written(client: httpx.Client) -> None:
    packing = zlib.compressobj(wbits=31)

    def packed(line: dict[str, Any]) -> bytes:
        content = packing.compress(json.dumps(line).encode() + b"\n")
        return content + packing.flush(zlib.Z_SYNC_FLUSH)

    async def use(stream: OpenStream) -> None:
        stream.write(packed({"append": "The sea is wide."}))
        assert (await stream.read())["verdict"] == "allow"
        stream.write(b"no such code")
        (last,) = await stream.rest()
        assert last["release"] == "" and "content-encoding gzip" in last["judgement"]["error"]

    opening = packed({"messages": MESSAGES, "rules": ["fine"]})
    streamed(client, opening, use, {"content-encoding": "gzip"})

"""What a header says of the body counts: it is unpacked as far as it may be large, or refused."""

from __future__ import annotations

import gzip
import json
import time
import zlib
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from httpx import Client

from serve.api.input.limits import MAX_BYTES
from tests.serve.api.streaming import OpenStream, streamed
from tests.serve.api.tenants import HEADERS, LOGITS, RULE_SETS, shop_and_bank
from tests.serve.serving import Serve
from tests.serve.toy_engine import ToyEngine

JSON = "application/json"
MESSAGES = [{"role": "user", "content": "Hello"}]
BODY = json.dumps({"messages": MESSAGES}).encode()
WHOLE = gzip.compress(BODY)
# What each header says, and the body so packed.
PACKED = {
    "gzip": WHOLE,
    "X-GZIP": WHOLE,
    "deflate": zlib.compress(BODY),
    "identity": BODY,
    "": BODY,
    "gzip, identity": b"".join(gzip.compress(BODY[at : at + 99]) for at in range(0, len(BODY), 99)),
    "deflate, identity, gzip": gzip.compress(zlib.compress(BODY)),
    "gzip,gzip": gzip.compress(WHOLE),
}
# Of each body what its header says of it, and how the answer names it.
WRONG = {
    "plain": ("gzip", BODY, "content-encoding gzip: the body"),
    "empty": ("gzip", b"", "breaks off before its end"),
    "cut": ("gzip", WHOLE[:-1], "breaks off before its end"),
    "half": ("gzip", WHOLE[:40], "breaks off before its end"),
    "with more behind": ("gzip", WHOLE + b"\n", "content-encoding gzip: the body"),
    "a member that breaks off": ("gzip", WHOLE + gzip.compress(b"")[:-1], "breaks off"),
    "more members than may be": ("gzip", WHOLE + 100 * gzip.compress(b""), "more than 100 members"),
    "another sum": ("gzip", WHOLE[:-8] + bytes(8), "content-encoding gzip: the body"),
    "zlib for gzip": ("gzip", zlib.compress(BODY), "not in gzip's format (RFC 1952), or damaged"),
    "bare for zlib": (
        "deflate",
        zlib.compress(b"{}", wbits=-15),
        "not in zlib's format (RFC 1950), or damaged",
    ),
    "zlib with more behind": ("deflate", 2 * zlib.compress(b"{}"), "goes on behind its end"),
    "gzip unsaid": (
        "",
        WHOLE,
        "a gzip file, not text in UTF-8; send it with `content-encoding: gzip`",
    ),
    "zstd unsaid": ("", b"\x28\xb5\x2f\xfd\xff", "a zstd file, not text in UTF-8"),
    "half a character": ("", "{}".encode("utf-16") + b"\x00", "not Unicode"),
}


def posted(client: Client, content: bytes | Iterator[bytes], **headers: str) -> httpx.Response:
    fields = {key.replace("_", "-"): value for key, value in headers.items()}
    return client.post("/v1/check", content=content, headers={"content-type": JSON} | fields)


def results(response: httpx.Response) -> Any:
    assert response.status_code == 200, response.text
    return response.json()["results"]


@pytest.mark.parametrize("encoding", PACKED)
def test_a_packed_body_is_answered_as_it_is_unpacked(client: Client, encoding: str) -> None:
    packed = posted(client, PACKED[encoding], content_encoding=encoding)
    assert results(packed) == results(posted(client, BODY))
    bytes_alone = (bytes([byte]) for byte in PACKED[encoding])
    assert results(posted(client, bytes_alone, content_encoding=encoding)) == results(packed)


@pytest.mark.parametrize("fault", WRONG)
def test_a_body_that_is_not_what_the_header_says_is_named(client: Client, fault: str) -> None:
    encoding, content, problem = WRONG[fault]
    response = posted(client, content, content_encoding=encoding)
    assert (response.status_code, response.json()["verdict"]) == (400, "unjudged")
    assert problem in response.json()["error"]


@pytest.mark.parametrize(
    "encoding", ["br", "zstd", "gzip, br", "compress", "gzip;q=1", "gzip," * 5]
)
def test_another_encoding_is_refused_and_known_ones_named(client: Client, encoding: str) -> None:
    response = posted(client, BODY, content_encoding=encoding)
    assert response.status_code == 415
    assert "content-encoding: known are gzip, deflate" in response.json()["error"]
    assert response.headers["accept-encoding"] == "gzip, deflate, identity"


@pytest.mark.parametrize("times", [1, 2])
def test_a_bomb_is_refused_before_it_is_unpacked(client: Client, times: int) -> None:
    packing = zlib.compressobj(wbits=31)
    bomb = b"".join(packing.compress(bytes(2**20)) for _ in range(200)) + packing.flush()
    for _ in range(times - 1):
        bomb = gzip.compress(bomb)
    began = time.process_time()
    response = posted(client, bomb, content_encoding=", ".join(["gzip"] * times))
    assert (response.status_code, response.json()["verdict"]) == (413, "unjudged")
    assert f"{MAX_BYTES:,}" in response.json()["error"]
    assert time.process_time() - began < 5


def test_as_large_a_body_as_may_be_is_unpacked(client: Client) -> None:
    whole = BODY.ljust(MAX_BYTES)
    status = {}
    for size, content in ((0, whole), (1, whole + b" ")):
        packed = gzip.compress(content, compresslevel=1)
        status[size] = posted(client, packed, content_encoding="gzip").status_code
    assert status == {0: 200, 1: 413}


def test_a_tenant_s_limit_is_of_the_packed_body_and_of_the_unpacked_one(serve: Serve) -> None:
    client = serve(ToyEngine(LOGITS), rule_sets=RULE_SETS, tenants=shop_and_bank())
    shop = HEADERS["shop"] | {"content_encoding": "gzip"}
    noise = gzip.compress(b" " * 2000, compresslevel=0)
    for content, status in (
        (gzip.compress(BODY.ljust(2000)), 200),
        (gzip.compress(BODY.ljust(2001)), 413),
        (noise, 413),
    ):
        assert posted(client, content, **shop).status_code == status


@pytest.mark.parametrize(
    ("parameters", "is_read"),
    [
        ("charset=utf-8", True),
        ('charset="UTF-8"', True),
        ("charset=us-ascii", True),
        ("charset=utf-16", False),
        ("Charset = 'latin1'", False),
        ("charset=utf-8; charset=utf-16", False),
        ("charset*=utf-8''utf-16", False),
        ("charset*0=utf-; charset*1=16", False),
        ("x=';'; charset=utf-16", False),
        (f"x={'x' * 1000}", False),
        ("charset=", True),
        ('charset=""', True),
        ("charset=unicode-1-1-utf-8", True),
        ("xcharset=latin1; boundary=charset=x", True),
        ('x="; charset=latin1"', True),
    ],
)
def test_no_charset_but_utf_8_is_read(client: Client, parameters: str, is_read: bool) -> None:
    response = posted(client, BODY, content_type=f"{JSON}; {parameters}")
    assert response.status_code == (200 if is_read else 415), response.text
    assert is_read or "content-type" in response.text


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32-be"])
def test_json_in_utf_16_or_32_is_known_by_its_first_bytes(client: Client, encoding: str) -> None:
    body = BODY.decode().encode(encoding)
    assert results(posted(client, body)) == results(posted(client, BODY))
    for charset in ("utf-8", "us-ascii"):
        response = posted(client, body, content_type=f"{JSON}; charset={charset}")
        assert (response.status_code, response.json()["verdict"]) == (415, "unjudged")
        assert charset in response.json()["error"] and encoding in response.json()["error"]


def test_a_stream_is_unpacked_while_it_is_written(client: Client) -> None:
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

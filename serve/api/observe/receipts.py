"""Receipts: lines of JSON that can be proved later, each with the hash of the one before it.

    {..., "number": 7, "previous": "<hash>", "hash": "<SHA-256>", "signature": "<Ed25519>"}

`hash` is of the line's bytes before `, "hash"`, `signature` of the hash's digits. Knows nothing of
what the lines say.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from guard.conversation.example import Message
from guard.errors import GuardError
from guard.files.strict_json import read_json

LINE = re.compile(
    rb'(?P<body>\{.*), "hash": "(?P<hash>[0-9a-f]{64})"(, "signature": "(?P<signature>[^"]*)")?\}'
)
CONTENT = b"centurion: the content of receipts"  # what the derived key is for
TAILS_BYTES = (2**14, 2**18, 2**22)  # of a file, in which its last receipt is looked for
MAKE_KEY = "`openssl genpkey -algorithm ed25519 -out key.pem` makes one"


class ChainEnd(NamedTuple):
    """The last receipt of a chain: its number, from 1, and its hash."""

    number: int = 0
    hash: str = ""


@dataclass(frozen=True)
class ReceiptKey:
    """An Ed25519 key. The `private` half signs and hashes content; `public` verifies."""

    public: Ed25519PublicKey
    private: Ed25519PrivateKey | None

    @classmethod
    def read(cls, path: Path, *, may_be_public: bool = False) -> ReceiptKey:
        """Of a PEM file. Raises GuardError for any other one, and for a key with a password."""
        try:
            content = path.read_bytes()
            if b"PUBLIC KEY" in content:
                key: object = serialization.load_pem_public_key(content)
            else:
                key = serialization.load_pem_private_key(content, password=None)
        except OSError as error:
            problem = f"the key cannot be read: {error.strerror}"
            raise GuardError(problem, where=path, remedy=MAKE_KEY) from None
        except (TypeError, ValueError, UnsupportedAlgorithm):  # whose words may quote it
            problem = "not a key in PEM without a password"
            raise GuardError(problem, where=path, remedy=MAKE_KEY) from None
        if isinstance(key, Ed25519PrivateKey):
            return cls(key.public_key(), key)
        if isinstance(key, Ed25519PublicKey) and may_be_public:
            return cls(key, None)
        problem = "receipts take an Ed25519 private key"
        got = type(key).__name__.strip("_")
        raise GuardError(problem, where=path, got=got, remedy=MAKE_KEY)

    def sign(self, text: str) -> str:
        assert self.private is not None
        return base64.b64encode(self.private.sign(text.encode())).decode()

    def has_signed(self, text: str, signature: str) -> bool:
        try:
            self.public.verify(base64.b64decode(signature, validate=True), text.encode())
        except (InvalidSignature, ValueError):
            return False
        return True

    @cached_property
    def _content_key(self) -> bytes:
        assert self.private is not None
        derived = HKDF(algorithm=hashes.SHA256(), length=32, salt=None, info=CONTENT)
        return derived.derive(self.private.private_bytes_raw())

    def content_hash(self, messages: Sequence[Message]) -> str:
        """A keyed hash of a conversation: without the key nobody can try what it may have been."""
        turns = [[message.role, message.content] for message in messages]
        text = json.dumps(turns, ensure_ascii=False, separators=(",", ":"))
        return hmac.digest(self._content_key, text.encode(), "sha256").hex()


class Receipt(NamedTuple):
    """A line as it stands in a file: what is hashed and what it says, its hash and signature."""

    body: bytes
    content: dict[str, Any]
    hash: str
    signature: str  # empty without one

    @classmethod
    def parse(cls, line: bytes) -> Receipt | None:
        """None for what is no whole line of a chain."""
        parts = LINE.fullmatch(line)
        if parts is None:
            return None
        try:
            content = read_json(parts["body"] + b"}")
        except (ValueError, RecursionError):
            return None
        if type(content.get("number")) is not int or type(content.get("previous")) is not str:
            return None
        signature = (parts["signature"] or b"").decode("ascii", "replace")
        return cls(parts["body"], content, parts["hash"].decode(), signature)

    @property
    def end(self) -> ChainEnd:
        return ChainEnd(self.content["number"], self.hash)


def sealed(
    content: Mapping[str, Any], before: ChainEnd, key: ReceiptKey | None
) -> tuple[bytes, ChainEnd]:
    """The line that follows `before`, and the chain's end with it."""
    linked = {**content, "number": before.number + 1, "previous": before.hash}
    body = json.dumps(linked, ensure_ascii=False, allow_nan=False)[:-1]
    digest = hashlib.sha256(body.encode()).hexdigest()
    line = f'{body}, "hash": "{digest}"'
    if key is not None:
        line += f', "signature": "{key.sign(digest)}"'
    return f"{line}}}\n".encode(), ChainEnd(before.number + 1, digest)


def chain_end(file: FileIO) -> ChainEnd | None:
    """The last whole receipt of a file; None if it has none. Raises GuardError where the end of a
    long file has none.
    """
    size = os.fstat(file.fileno()).st_size
    if not size or os.pread(file.fileno(), 1, 0) != b"{":  # say, one that was compressed
        return None
    for window in TAILS_BYTES:
        first, *lines = os.pread(file.fileno(), window, max(0, size - window)).split(b"\n")
        if window >= size:
            lines.insert(0, first)  # else it is the end of one
        for line in reversed(lines):
            if receipt := Receipt.parse(line):
                return receipt.end
        if window >= size:
            return None
    problem, remedy = "its last lines are no receipts", "Move the file away, or name another one"
    raise GuardError(f"no audit log: {problem}", where=str(file.name), remedy=remedy)

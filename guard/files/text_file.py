"""A file of text in UTF-8; where it is another file than its name says, what it is."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

from guard.errors import GuardError

GZIP = b"\x1f\x8b"
# The first bytes of what is no text in UTF-8 -> what begins so.
SIGNATURES = {
    GZIP: "a gzip file",
    b"PK\x03\x04": "a zip archive, as .xlsx is",
    b"\xd0\xcf\x11\xe0": "an old Excel file",
    b"PAR1\x15": "a Parquet file",
    b"\xfd7zXZ": "an xz file",
    b"\x28\xb5\x2f\xfd": "a zstd file",
    b"\xff\xfe": "UTF-16 or UTF-32 text",
    b"\xfe\xff": "UTF-16 text",
}
SAVE = "Save it as text in UTF-8"


def read_text(path: Path) -> str:
    """The file's text, unpacked where its name ends in .gz."""
    try:
        content = path.read_bytes()
        if problem := unlike_its_name(path.name, content):
            raise GuardError(problem, where=path, remedy="Rename it")
        if path.name.endswith(".gz"):
            content = gzip.decompress(content)
        if problem := no_text(content):
            raise GuardError(problem, where=path, remedy=SAVE)
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        where = f"{path}:{len((error.object[: error.start] + b'.').splitlines())}"
        got = wrong_byte(error)
        raise GuardError("not UTF-8 text", where=where, got=got, remedy=SAVE) from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        problem = f"not a readable gzip file: {error}"
        raise GuardError(problem, where=path, remedy="Compress it again") from error
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
        raise GuardError(problem, where=path, remedy="Name a file that can be read") from error


def unlike_its_name(name: str, head: bytes) -> str:
    """What is wrong where a file's name does not say whether it is packed; else empty."""
    if head.startswith(GZIP) and not name.endswith(".gz"):
        return "a gzip file, though its name does not end in .gz"
    if head and not head.startswith(GZIP) and name.endswith(".gz"):
        return "not a readable gzip file, though its name ends in .gz"
    return ""


def no_text(head: bytes) -> str:
    """What begins with these bytes, where that is no text in UTF-8; else empty."""
    for signature, kind in SIGNATURES.items():
        if head.startswith(signature):
            return f"{kind}, not text in UTF-8"
    if b"\0" in head[:2]:
        return "UTF-16 text or a binary file, not text in UTF-8"
    return ""


def wrong_byte(error: UnicodeDecodeError) -> str:
    """The byte that is not UTF-8, and the character that it is where Windows wrote the text."""
    byte = error.object[error.start : error.start + 1]
    return f"byte 0x{byte.hex()}, in Windows-1252 {byte.decode('cp1252', 'replace')!r}"

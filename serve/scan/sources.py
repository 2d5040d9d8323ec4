"""Stored conversations, one at a time, however many there are: files and folders.

`guard/conversation/row.py` says what a row has. One that cannot be read says why and is not left
out. Knows nothing of rules.
"""

from __future__ import annotations

import contextlib
import gzip
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from glob import glob
from io import BufferedReader
from pathlib import Path
from typing import Any

from guard.arguments import names_listed
from guard.conversation.example import Message
from guard.conversation.row import conversation_of
from guard.errors import GuardError
from guard.files.strict_json import in_words, read_json
from guard.files.text_file import no_text, unlike_its_name, wrong_byte

PARQUET_ROWS = 256  # that are in memory at once
MAX_LINE_BYTES = 64 * 2**20


@dataclass(frozen=True)
class StoredConversation:
    """A row: its source and number there, from 0, its `id` if it has one, and its conversation, or
    the `problem` that it has none.

    `read_bytes`: of its file, as it lies on the disk, so many are read by now.
    """

    source: str
    number: int
    id: str
    messages: tuple[Message, ...]
    problem: str = ""
    read_bytes: int = 0


RawRow = tuple[Any, str, int]  # its fields, what is wrong with it, and the bytes read by now


def names_of(files: str) -> list[str]:
    """What a command line names: names and patterns separated by blanks, quoted as in a shell.

    Raises GuardError for a quote that is not closed.
    """
    try:
        return shlex.split(files)
    except ValueError as error:
        remedy = """Quote a name with blanks or a quote in it: FILES='"bob\'s logs/*.jsonl"'"""
        raise GuardError(f"FILES: {error}", got=files, remedy=remedy) from error


def find_sources(selection: Sequence[str]) -> list[str]:
    """The files of patterns, folders and names, each once, in order.

    Raises GuardError for what names none, a name that is no text, or a file whose first row cannot
    be read.
    """
    sources: dict[str, str] = {}  # by what they are, however they are spelt
    for name in names_listed(selection, "files"):
        files = _files(name)
        if not files:
            endings = f"Known endings: {', '.join(READERS)}"
            raise GuardError("no file of stored conversations", got=name, remedy=endings)
        for file in files:
            if _escaped(file) != file:
                problem = "the file's name is not UTF-8, so no verdict could name it"
                raise GuardError(problem, got=_escaped(file), remedy="Rename it")
            next(read_source(file), None)
            sources.setdefault(str(Path(file).resolve()), file)
    if not sources:
        raise GuardError("no files are named", remedy='FILES="logs/*.jsonl more.parquet"')
    return list(sources.values())


def state_of(source: str) -> tuple[int, int]:
    """Its bytes on the disk, and the time of its last change."""
    status = Path(source).stat()
    return status.st_size, status.st_mtime_ns


def read_source(source: str) -> Iterator[StoredConversation]:
    """The conversations of one source. Raises GuardError where it cannot be read, or no further."""
    for number, (fields, problem, read_bytes) in enumerate(_raw_rows(source)):
        messages: tuple[Message, ...] = ()
        if not problem:
            try:
                messages = _conversation(fields)
            except GuardError as error:
                problem = str(error)
        stated = fields if isinstance(fields, dict) else {}
        name = "" if stated.get("id") is None else _escaped(str(stated["id"]))
        yield StoredConversation(source, number, name, messages, _escaped(problem), read_bytes)


def _conversation(fields: Any) -> tuple[Message, ...]:
    if not isinstance(fields, dict):
        remedy = "Write one JSON object per line: messages, or prompt and response, or text"
        raise GuardError("a row must be an object", got=repr(fields)[:60], remedy=remedy)
    return conversation_of(fields)


def _files(name: str) -> list[str]:
    """The readable files that a name, a folder or a pattern means."""
    if Path(name).is_dir():
        paths = sorted(path for path in Path(name).rglob("*") if not _is_hidden(path, Path(name)))
        files = [str(path) for path in paths if path.is_file() and _ending(str(path))]
    elif Path(name).is_file():
        files = [name]
    else:
        matches = sorted(glob(name, recursive=True))  # noqa: PTH207 - a Path's takes no root
        files = [path for path in matches if Path(path).is_file()]
    return [path for path in files if _ending(path)]


def _is_hidden(path: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(folder).parts)


def _ending(source: str) -> str:
    return next((ending for ending in READERS if source.endswith(ending)), "")


def _escaped(text: str) -> str:
    """A text of a row, which may be no Unicode, as one that can be written."""
    return text.encode("utf-8", "backslashreplace").decode()


def _raw_rows(source: str) -> Iterator[RawRow]:
    """What its reader reads. Raises GuardError for whatever keeps that from going on."""
    try:
        yield from READERS[_ending(source)](source)
    except GuardError:
        raise
    except Exception as error:  # of many libraries
        problem = f"not readable: {' '.join(str(error).split())}"
        remedy = "Restore it, or leave it out of FILES="
        raise GuardError(problem, where=source, remedy=remedy) from error


def _json_lines(source: str) -> Iterator[RawRow]:
    with contextlib.ExitStack() as stack:
        raw = stack.enter_context(Path(source).open("rb"))
        lines: BufferedReader | gzip.GzipFile = raw
        problem = unlike_its_name(source, raw.peek())
        if source.endswith(".gz"):
            lines = stack.enter_context(gzip.GzipFile(fileobj=raw))
        if problem := problem or no_text(lines.peek(1)):
            raise ValueError(problem)
        while line := lines.readline(MAX_LINE_BYTES):
            if _is_cut(line):
                while _is_cut(lines.readline(MAX_LINE_BYTES)):  # the rest of it is no row
                    pass
                yield None, f"a line of more than {MAX_LINE_BYTES:,} bytes", raw.tell()
                continue
            # An old Mac ends its lines in \r alone, so all of them are one.
            for row in [line] if line.endswith(b"\n") else line.split(b"\r"):
                if row.strip():
                    fields, problem = _parsed(row)
                    yield fields, problem, raw.tell()


def _is_cut(piece: bytes) -> bool:
    """Whether a piece of a line is as long as may be, and its line longer."""
    return len(piece) == MAX_LINE_BYTES and not piece.endswith(b"\n")


def _parsed(line: bytes) -> tuple[Any, str]:
    """The value of a line, or what is wrong with it."""
    try:
        return read_json(line), ""
    except UnicodeDecodeError as error:
        return None, f"not valid JSON: not UTF-8 text, {wrong_byte(error)}"
    except (ValueError, RecursionError) as error:
        return None, f"not valid JSON: {in_words(error)}"


def _parquet(source: str) -> Iterator[RawRow]:
    import pyarrow.parquet  # takes a moment to import, and only this source needs it

    file = pyarrow.parquet.ParquetFile(source)
    names = file.schema_arrow.names
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        got, remedy = ", ".join(repeated), "Give every column a name of its own"
        raise GuardError("columns of one name", where=source, got=got, remedy=remedy)
    size, _ = state_of(source)
    read, rows = 0, max(1, file.metadata.num_rows)
    for batch in file.iter_batches(batch_size=PARQUET_ROWS):
        for fields in batch.to_pylist():
            read += 1
            yield fields, "", size * read // rows


READERS: dict[str, Callable[[str], Iterator[RawRow]]] = {
    ".jsonl": _json_lines,
    ".jsonl.gz": _json_lines,
    ".ndjson": _json_lines,
    ".parquet": _parquet,
}

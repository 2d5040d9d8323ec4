"""The rows of a JSON-lines or CSV file, as they are."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from guard.conversation.row import CONVERSATION_FIELDS
from guard.errors import GuardError
from guard.files.strict_json import in_words, read_json
from guard.files.text_file import read_text

TOO_DEEP = "nested too deeply"
DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}  # and their names


@dataclass(frozen=True)
class SourceRow:
    """One row without its empty fields, and where it stands."""

    where: str
    fields: dict[str, Any]
    problem: str = ""  # why it could not be read at all


class BadRow(GuardError):
    """What is wrong with one row, with the remedy; collected, then raised together."""


def local_files(source: str) -> list[Path]:
    """The file that a source is read from, if it is one."""
    return [path for path in [Path(source)] if path.is_file()]


def is_readable(source: str) -> bool:
    return Path(source).name.endswith(tuple(FILE_READERS))


def read_rows(source: str) -> Iterator[SourceRow]:
    """The rows of a file, by its ending. Raises GuardError."""
    path = Path(source)
    if path.is_dir():
        raise GuardError("a folder, not a file", where=source, remedy="Name a file in it")
    if not is_readable(source):
        remedy = f"Known: {', '.join(FILE_READERS)}"
        raise GuardError("cannot read this kind of file", where=source, remedy=remedy)
    if not path.is_file():
        remedy = "Check its name, or name where the rows are now"
        raise GuardError("no such file", where=source, remedy=remedy)
    ending = next(ending for ending in FILE_READERS if path.name.endswith(ending))
    text = read_text(path)
    if "\n" not in text:  # the lines of an old Mac end in \r alone
        text = text.replace("\r", "\n")
    yield from FILE_READERS[ending](text, source)


def _json_lines(text: str, source: str) -> Iterator[SourceRow]:
    if text.lstrip().startswith("["):
        problem = "one JSON list, not an object a line"
        remedy = f"Write each object on a line of its own: jq -c '.[]' {source} > rows.jsonl"
        raise GuardError(problem, where=source, remedy=remedy)
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{source}:{number}"
        try:
            fields = read_json(line)
        except (ValueError, RecursionError) as error:
            problem = f"not valid JSON ({in_words(error)}): one object per line"
            yield SourceRow(where, {}, problem)
            continue
        if isinstance(fields, dict):
            yield SourceRow(where, without_nulls(fields))
        else:
            yield SourceRow(where, {}, f"must be an object, got {type(fields).__name__}")


def without_nulls(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _csv(text: str, source: str) -> Iterator[SourceRow]:
    # A cell may be as long as its file.
    csv.field_size_limit(max(csv.field_size_limit(), len(text)))
    delimiter = _delimiter(text)
    reader = csv.reader(io.StringIO(text), delimiter=delimiter, strict=True)
    names: list[str] = []
    while True:
        # The line the row begins on: a quoted cell may hold line breaks.
        where = f"{source}:{reader.line_num + 1}"
        try:
            cells = next(reader, None)
        except csv.Error as error:
            problem = f"not valid CSV ({error}): check the quotes from here on"
            yield SourceRow(where, {}, problem)
            return
        if cells is None:
            return
        if not cells:  # a blank line
            continue
        if not names:
            names = _column_names(cells, where)
        elif len(cells) > len(names):
            sign, columns = DELIMITERS[delimiter], ", ".join(names)[:200]
            problem = f"more cells than columns: put text with {sign} in quotes"
            yield SourceRow(where, {}, f"{problem} (columns, by {sign}: {columns})")
        else:
            pairs = zip(names, cells, strict=False)
            yield SourceRow(where, {name: cell for name, cell in pairs if cell})


def _delimiter(text: str) -> str:
    """The first that gives a column of the conversation, else the one with most columns."""
    columns: dict[str, int] = {}
    for delimiter in DELIMITERS:
        rows = csv.reader(io.StringIO(text), delimiter=delimiter)
        header = next((cells for cells in rows if cells), [])
        if any(cell.strip() in CONVERSATION_FIELDS for cell in header):
            return delimiter
        columns[delimiter] = len(header)
    return max(columns, key=columns.__getitem__)


def _column_names(cells: list[str], where: str) -> list[str]:
    names = [cell.strip() for cell in cells]
    if names[0].startswith("{"):
        problem = "objects of JSON, not the columns of a table"
        raise GuardError(problem, where=where, remedy="Name it .jsonl")
    repeated = [name for name, count in Counter(names).items() if name and count > 1]
    if repeated:
        remedy = "Give every column a name of its own"
        raise GuardError("columns of one name", where=where, got=", ".join(repeated), remedy=remedy)
    return names


FILE_READERS: dict[str, Callable[[str, str], Iterator[SourceRow]]] = {
    ".jsonl": _json_lines,
    ".jsonl.gz": _json_lines,
    ".csv": _csv,
    ".csv.gz": _csv,
}

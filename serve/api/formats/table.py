"""All wire formats by their names: those of this folder, and the user's own.

A user's own format is a file in the folder `formats` of CENTURION_HOME. Knows nothing of what the
formats say.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path

from starlette.routing import Route

from guard.errors import GuardError
from guard.files.own_module import imported
from guard.home import HOME
from serve.api.access import FEEDBACK
from serve.api.formats import (
    agentgateway,
    check,
    detectors,
    litellm,
    moderations,
    openai_chat,
    stream,
    turns,
)
from serve.api.wire_format import WireFormat

SHIPPED: Mapping[str, WireFormat] = {
    "check": check.FORMAT,
    "turns": turns.FORMAT,
    "stream": stream.FORMAT,
    "openai_chat": openai_chat.FORMAT,
    "moderations": moderations.FORMAT,
    "detectors": detectors.FORMAT,
    "litellm": litellm.FORMAT,
    "agentgateway": agentgateway.FORMAT,
}
# The first parts of the server's own paths, but of FEEDBACK.
RESERVED = ("healthz", "readyz", "health", "metrics", "admin", "docs", "redoc", "openapi.json")


@functools.cache
def wire_formats() -> dict[str, WireFormat]:
    """All formats that this process serves. Raises GuardError for a faulty file of the user's."""
    return all_formats(HOME / "formats")


def all_formats(folder: Path) -> dict[str, WireFormat]:
    """The shipped formats, and the FORMAT of each Python file in the folder, by the file's name;
    one whose name begins with "_" is what others import.

    Raises GuardError for a file without one, or with the name or a path of another format.
    """
    formats = dict(SHIPPED)
    for file in sorted(folder.glob("*.py")):
        if file.name.startswith("_"):
            continue
        wire_format = _loaded(file)
        paths = [request.path for request in (*wire_format.requests, *wire_format.replies)]
        paths += [route.path for route in wire_format.router.routes if isinstance(route, Route)]
        for name, earlier in formats.items():
            if name == file.stem:
                raise _taken(file, f"the name {name}")
            for path in filter(earlier.has_path, paths):
                raise _taken(file, f"the path {path} of {name}")
        for path in paths:
            if path == FEEDBACK or path.split("/")[1] in (*RESERVED, ""):
                raise _taken(file, f"the path {path}")
        formats[file.stem] = wire_format
    return formats


def _loaded(file: Path) -> WireFormat:
    wire_format = getattr(imported(file, "a wire format"), "FORMAT", None)
    if not isinstance(wire_format, WireFormat):
        remedy = "Give it one, a WireFormat of serve/api/wire_format.py; or call the file _NAME.py"
        raise GuardError("a file of formats has no FORMAT", where=file, remedy=remedy)
    return wire_format


def _taken(file: Path, got: str) -> GuardError:
    problem = "a wire format has the name or a path of another one, or of the server's own"
    remedy = "Rename the file, or choose another path"
    return GuardError(problem, where=file, got=got, remedy=remedy)

"""A Python file of the user's own, imported by its path."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from guard.errors import GuardError


def imported(file: Path, kind: str) -> ModuleType:
    """The module in a file of this `kind`, which can import files beside it. Raises GuardError for
    whatever its code raises.
    """
    if not file.is_file():
        raise GuardError("no such file", where=file, remedy=f"Name {kind}")
    name = f"own_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file.resolve())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where pydantic looks for the types that it names
    sys.path.append(str(file.resolve().parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        problem = f"{kind} cannot be imported: {type(error).__name__}: {error}"
        raise GuardError(problem, where=file, remedy="Correct it") from error
    return module

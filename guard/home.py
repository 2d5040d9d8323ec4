"""Where a user's own files are: in HOME, a folder that is laid out as the checkout.

Its rules, recipes and plans stand beside those of the checkout, and one of the same name wins; what
is written goes there. It is named by CENTURION_HOME, and is the checkout itself by default.
"""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).parent.parent  # the checkout
HOME = Path(os.environ.get("CENTURION_HOME") or ROOT).expanduser().absolute()


def own_or_shipped(path: Path) -> Path:
    """A path in HOME, or the same in the checkout where only that exists."""
    shipped = _shipped(path)
    if shipped.exists() and not path.exists():
        return shipped
    return path


def yaml_files(folder: Path) -> list[Path]:
    """The YAML files of a folder of HOME and of the same in the checkout, by name, in order."""
    files: dict[str, Path] = {}
    for source in (_shipped(folder), folder):
        files |= {path.name: path for path in source.glob("*.yaml")}
    return [files[name] for name in sorted(files)]


def _shipped(path: Path) -> Path:
    if not path.is_relative_to(HOME):
        return path
    return ROOT / path.relative_to(HOME)

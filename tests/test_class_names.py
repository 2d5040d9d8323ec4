"""One class name, one meaning: no name is defined in two source files."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parent.parent
STAGES = ("guard", "data", "train", "eval", "serve")


def names_in_two_files(root: Path) -> dict[str, list[str]]:
    """The files of every class name, without leading underscores, that stands in more than one."""
    files: dict[str, set[str]] = defaultdict(set)
    for path in (path for stage in STAGES for path in (root / stage).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                files[node.name.lstrip("_")].add(str(path.relative_to(root)))
    return {name: sorted(paths) for name, paths in files.items() if len(paths) > 1}


def test_no_class_name_is_defined_in_two_files() -> None:
    assert names_in_two_files(ROOT) == {}


def test_a_planted_duplicate_is_found_whatever_its_underscores(tmp_path: Path) -> None:
    for file, name in (("guard/a.py", "Row"), ("serve/api/b.py", "_Row"), ("eval/c.py", "Column")):
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).write_text(f"class {name}:\n    pass\n")
    assert names_in_two_files(tmp_path) == {"Row": ["guard/a.py", "serve/api/b.py"]}

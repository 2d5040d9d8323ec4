"""The repository as a whole.

Nothing of one machine is in it, every file of a kind is valid, every command explains itself, and
tests mirror the folders.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from guard.rule import load_rule, rule_names
from tests.long_files import LONG_FILES_S

ROOT = Path(__file__).parent.parent
HEAVY = ("torch", "vllm", "transformers", "peft", "trl", "datasets")
# Folders of tests that mirror no folder of the source.
OF_THE_WHOLE = {"serve/fuzz": "the server by its own OpenAPI", "serve/gpu_path": "vLLM as on a GPU"}
# Written so that this file does not match itself.
REGISTRY_HOSTS = [
    rf"\b{host}\.org\b" for host in ("pypi", "pythonhosted", r"download\.pytorch", "anaconda")
]
MACHINE_PATHS = [
    rf"(?<![\w.~}}]){folder}/"
    for folder in ("/" + "root", "/" + "work", "/home/" + r"\w+", "/opt/" + "(?:wheels|pypi)")
]


def repository_files() -> list[Path]:
    """What is tracked or would be: everything that .gitignore does not name."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    paths = (ROOT / name for name in listed.stdout.split("\0"))
    return sorted(path for path in paths if path.is_file())


def entries() -> list[str]:
    """Every module that is run as `python -m`."""
    modules = []
    for stage in ("data", "train", "eval", "serve"):
        for path in (ROOT / stage).rglob("*.py"):
            if 'if __name__ == "__main__":' in path.read_text(encoding="utf-8"):
                module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
                modules.append(module.removesuffix(".__main__"))
    return sorted(modules)


def test_no_file_names_a_package_registry_or_a_path_of_one_machine() -> None:
    pattern = re.compile("|".join([*REGISTRY_HOSTS, *MACHINE_PATHS]).encode())
    found = []
    for path in repository_files():
        content = path.read_bytes()
        if b"\0" not in content[:8192]:  # text
            found += [f"{path}: {match[0].decode()}" for match in pattern.finditer(content)]
    assert found == []


def test_every_shipped_rule_loads() -> None:
    names = rule_names("all")
    assert {"medical_advice", "pii_leak", "jailbreak_attempt", "refund_promise"} <= set(names)
    assert all(load_rule(name).violates for name in names)


@pytest.mark.slow
@pytest.mark.parametrize("module", entries())
def test_every_command_explains_itself_before_it_imports_anything_heavy(module: str) -> None:
    asks_for_help = (
        "import runpy, sys\n"
        f"sys.argv = ['{module}', '--help']\n"
        "try:\n"
        f"    runpy.run_module('{module}', run_name='__main__')\n"
        "except SystemExit as ended:\n"
        f"    heavy = [name for name in {HEAVY} if name in sys.modules]\n"
        "    sys.exit(ended.code or (f'imported {heavy}' if heavy else 0))\n"
        "sys.exit('did not exit')\n"
    )
    command = [sys.executable, "-c", asks_for_help]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"python -m {module}" in done.stdout or module in done.stdout
    assert "--" in done.stdout


def test_the_entries_are_found() -> None:
    found = {"data.build", "train.run", "eval.run", "serve.bench", "serve.up", "serve.doctor"}
    assert found <= set(entries())


def folders_without_a_source(root: Path) -> set[str]:
    """The folders with tests under `root`/tests that are no folder of the source."""
    folders = {path.parent.relative_to(root / "tests") for path in root.glob("tests/**/test_*.py")}
    return {folder.as_posix() for folder in folders if not (root / folder).is_dir()}


def test_tests_mirror_the_folders_and_the_files_that_are_begun_first_exist(tmp_path: Path) -> None:
    assert folders_without_a_source(ROOT) == set(OF_THE_WHOLE)
    assert [name for name in LONG_FILES_S if not (ROOT / name).is_file()] == []
    for file in ("guard/a.py", "tests/guard/test_b.py", "tests/gone/test_a.py"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    assert folders_without_a_source(tmp_path) == {"gone"}

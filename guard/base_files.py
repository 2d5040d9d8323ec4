"""Where the files of a base are, and what pins them. `where` names the recipe in errors."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

from guard.errors import GuardError
from guard.home import own_or_shipped

REQUIRED_FILES = ("config.json", "tokenizer.json")  # of a local base, besides its weights
# The suffixes of what transformers and vLLM read of a base: weights and their index, configurations
# also of pooling, a tokenizer, a chat template, code.
READ_SUFFIXES = (".safetensors", ".json", ".txt", ".model", ".jinja", ".py")
# Records beside a base that nothing which answers reads: of how it was made, and a rule's card.
RECORDS = ("provenance.json", "card.json")
IN_PACKAGE = "package:"  # begins a base that an installed package carries

FileState = tuple[int, int, int, int]


def folder_or_hub_id(base: str, home: Path, where: str) -> str:
    local = found_path(base, home, where)
    if local.is_dir() or base.startswith(IN_PACKAGE):
        return str(local)
    if base.startswith((".", "/", "~")) or base.count("/") > 1:
        remedy = "Name a folder, such as /models/qwen3 or recipes/models/tiny, or ORG/NAME"
        problem = "neither a folder nor a hub id"
        raise GuardError(problem, where=f"{where}: base", got=base, remedy=remedy)
    return base


def found_path(base: str, home: Path, where: str) -> Path:
    """Where the folder or the file is that a path or `package:MODULE/PATH` names."""
    if not base.startswith(IN_PACKAGE):
        return own_or_shipped(home / Path(base).expanduser())
    module, _, folder = base.removeprefix(IN_PACKAGE).partition("/")
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        problem = "the package that carries the base is not installed"
        raise GuardError(problem, where=f"{where}: base", got=module, remedy="Run `make setup`")
    return Path(spec.submodule_search_locations[0], folder)


def hub_commit(path: str, revision: str | None, where: str) -> str | None:
    """The hub commit to load the base at, the same for the whole process; None for a folder."""
    if Path(path).is_dir():
        return None
    with hub_errors("no folder has this name, and no commit of the base is known", path, where):
        return _commit(path, revision)


def downloaded_base(path: str, commit: str | None, where: str) -> Path:
    if commit is None:
        return Path(path)
    from huggingface_hub import snapshot_download

    patterns = [f"*{suffix}" for suffix in READ_SUFFIXES]
    with hub_errors("the base cannot be downloaded", path, where):
        return Path(snapshot_download(path, revision=commit, allow_patterns=patterns))


@contextlib.contextmanager
def hub_errors(problem: str, got: str, where: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        remedy = "Check base, revision, network and disk, or download the base first"
        problem = f"{problem}: {error}"
        raise GuardError(problem, where=f"{where}: base", got=got, remedy=remedy) from error


def folder_digest(folder: Path, where: str) -> str:
    """SHA-256 over all files of a local base that decide what it computes."""
    for name in REQUIRED_FILES:
        if not (folder / name).is_file():
            remedy = f"A base's folder holds {', '.join(REQUIRED_FILES)} and the weights: "
            remedy += "complete it, or name another base"
            raise GuardError(f"the base has no {name}", where=where, got=folder, remedy=remedy)
    if not any(folder.glob("*.safetensors")):
        problem = "the base has no weights in safetensors, by which it is told from others"
        remedy = "Save it again with transformers' save_pretrained, which writes "
        remedy += "model.safetensors; rules that were trained on it are to be trained again then"
        raise GuardError(problem, where=where, got=folder, remedy=remedy)
    files: list[tuple[str, FileState]] = []
    for path in sorted(folder.rglob("*")):
        below = path.relative_to(folder)
        is_hidden = any(part.startswith(".") for part in below.parts)
        is_read = path.suffix in READ_SUFFIXES and path.name not in RECORDS
        if is_read and not is_hidden and path.is_file():
            files.append((str(below), _state_of(path)))
    return _digest(folder, tuple(files))


def file_digest(path: Path) -> str:
    return _digest(path.parent, ((path.name, _state_of(path)),))


def _state_of(path: Path) -> FileState:
    """What changes when a file is written again, even with its old time of modification."""
    status = path.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


@functools.cache
def _digest(folder: Path, files: tuple[tuple[str, FileState], ...]) -> str:
    """SHA-256 over names and contents; the states tell a file that was written again."""
    digest = hashlib.sha256()
    for name, _ in files:
        content = hashlib.sha256((folder / name).read_bytes()).hexdigest()
        digest.update(f"{name} {content}\n".encode())
    return digest.hexdigest()


@functools.cache
def _commit(base: str, revision: str | None) -> str:
    """The commit that a branch or tag names now, or without a network when last downloaded."""
    if revision and re.fullmatch("[0-9a-f]{40}", revision):
        return revision
    from huggingface_hub import hf_hub_download

    config = hf_hub_download(base, "config.json", revision=revision)
    return Path(config).parent.name  # the cache has a folder for every commit

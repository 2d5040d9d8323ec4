"""A base that is made once from another and kept: from a GGUF file, of a decoder's first layers, or
with rounded weights. It is a folder like any other base's, in the user's cache, and found by the
content that it was made from. A process that is cut off leaves nothing; the next one begins anew.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from filelock import FileLock
from tqdm import tqdm

from guard.base_files import file_digest, found_path, hub_errors
from guard.base_weights import Tensor, tensors_of, write_tensors
from guard.errors import GuardError

GGUF = "gguf:"  # begins a base that a GGUF file holds
MADE_BY = 1  # counts up when what is made of the same file changes
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "centurion" / "bases"
COPIED = (".json", ".txt", ".model", ".jinja")  # suffixes of what a base has besides weights
WEIGHTS_INDEX = "model.safetensors.index.json"

Content = tuple[dict[str, Any], list[Tensor]]  # configuration and weights
Change = Callable[[dict[str, Any], list[Tensor]], Content]


def gguf_file(base: str, revision: str | None, home: Path, where: str) -> Path:
    """The file that `gguf:` names: one in a package, by a path, or of a hub repository."""
    named = base.removeprefix(GGUF)
    path = found_path(named, home, where)
    if not path.is_file() and re.fullmatch(r"[^./~:][^/:]*/[^/]+/[^/]+", named):
        path = _downloaded(named, revision, where)
    if not path.is_file():
        remedy = "Name a file: gguf:FOLDER/FILE.gguf, gguf:package:MODULE/FILE.gguf, or "
        remedy += "gguf:ORG/NAME/FILE.gguf of the hub"
        raise GuardError("no such GGUF file", where=f"{where}: base", got=base, remedy=remedy)
    return path


def _downloaded(named: str, revision: str | None, where: str) -> Path:
    from huggingface_hub import hf_hub_download

    repository, _, name = named.rpartition("/")
    with hub_errors("the GGUF file cannot be had", named, where):
        return Path(hf_hub_download(repository, name, revision=revision))


def made_from_gguf(path: Path, layers: int | None, where: str) -> Path:
    def fill(folder: Path) -> None:
        from guard.gguf_file import GgufFile

        source = GgufFile(path)
        for name, content in source.other_files().items():
            (folder / name).write_text(content, encoding="utf-8")
        _write(folder, *_first(layers, where, source.config(), list(source.tensors())))

    return _made(path.stem, file_digest(path), layers, fill)


def first_layers(base: Path, digest: str, layers: int, where: str) -> Path:
    """The folder with the first `layers` of a base in safetensors, its final norm and its head.
    `digest` tells the base from every other one.
    """
    return remade(base, base.name, digest, partial(_first, layers, where), layers)


def remade(base: Path, name: str, digest: str, change: Change, layers: int | None = None) -> Path:
    """The folder of a base in safetensors whose configuration and weights are changed."""

    def fill(folder: Path) -> None:
        for path in base.iterdir():
            if path.suffix in COPIED and path.name not in ("config.json", WEIGHTS_INDEX):
                shutil.copyfile(path, folder / path.name)
        config = json.loads((base / "config.json").read_text(encoding="utf-8"))
        _write(folder, *change(config, list(tensors_of(base))))

    return _made(name, digest, layers, fill)


def _made(name: str, digest: str, layers: int | None, fill: Callable[[Path], None]) -> Path:
    """The kept folder, which `fill` fills if this process is the first one to need it."""
    key = hashlib.sha256(f"{digest} {layers} {MADE_BY}".encode()).hexdigest()[:16]
    cut = f"-{layers}-layers" if layers else ""
    folder = CACHE / f"{name}{cut}-{key}"
    if folder.is_dir():
        return folder
    CACHE.mkdir(parents=True, exist_ok=True)
    part = folder.with_name(f"{folder.name}.part")
    with FileLock(folder.with_name(f"{folder.name}.lock")):
        if not folder.is_dir():  # nobody made it while this process waited
            shutil.rmtree(part, ignore_errors=True)  # of a process that was killed
            part.mkdir()
            try:
                fill(part)
                part.rename(folder)
            except OSError as error:
                problem = f"the base cannot be made: {error.strerror}"
                remedy = "Free some of the disk, or set XDG_CACHE_HOME to a folder on another"
                raise GuardError(problem, where=folder, remedy=remedy) from error
            finally:
                shutil.rmtree(part, ignore_errors=True)
    return folder


def _first(
    layers: int | None, where: str, config: dict[str, Any], tensors: list[Tensor]
) -> Content:
    """What is left of a base with the first `layers`, all of them without a number."""
    if layers is None:
        return config, tensors
    numbers = [tensor.layer for tensor in tensors if tensor.layer is not None]
    most = 1 + max(numbers, default=-1)
    if layers > most:
        problem = "the base has fewer layers, or none called model.layers.N"
        remedy = f"State 1 to {most}, or leave out `layers`"
        raise GuardError(problem, where=f"{where}: layers", got=layers, remedy=remedy)
    config = config | {"num_hidden_layers": layers}
    if config.get("layer_types"):
        config["layer_types"] = config["layer_types"][:layers]
    return config, [tensor for tensor in tensors if (tensor.layer or 0) < layers]


def _write(folder: Path, config: dict[str, Any], tensors: list[Tensor]) -> None:
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    total = sum(tensor.size for tensor in tensors)
    title = f"making {folder.name.removesuffix('.part')}"
    with tqdm(total=total, desc=title, unit="B", unit_scale=True, disable=None) as bar:
        write_tensors(folder / "model.safetensors", tensors, bar.update)

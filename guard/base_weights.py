"""Weights in safetensors, one at a time: reading those of a folder, writing a file of them. A base
of many gigabytes passes through without being in memory.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from guard.errors import GuardError

TYPES = ("F32", "F16", "BF16")  # as safetensors calls them; others need tables beside them
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


@dataclass(frozen=True)
class Tensor:
    """One tensor of `size` bytes, row-major and little-endian, which `read` gives."""

    name: str
    dtype: str  # as safetensors calls it
    shape: tuple[int, ...]
    size: int
    read: Callable[[], bytes]

    @property
    def layer(self) -> int | None:
        """The layer that it belongs to, from 0 on; None for the rest of the model."""
        match = _LAYER.match(self.name)
        if match is None:
            return None
        return int(match[1])


def tensors_of(folder: Path) -> Iterator[Tensor]:
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        for name, stated in header.items():
            if stated["dtype"] not in TYPES:
                problem, remedy = "weights of this type are not copied", f"Use {', '.join(TYPES)}"
                where = f"{path}: {name}"
                raise GuardError(problem, where=where, got=stated["dtype"], remedy=remedy)
            begin, end = stated["data_offsets"]
            read = partial(_bytes_of, path, 8 + length + begin, end - begin)
            yield Tensor(name, stated["dtype"], tuple(stated["shape"]), end - begin, read)


def _bytes_of(path: Path, begin: int, size: int) -> bytes:
    with path.open("rb") as file:
        file.seek(begin)
        return file.read(size)


def write_tensors(path: Path, tensors: Sequence[Tensor], progress: Callable[[int], Any]) -> None:
    """One safetensors file; `progress` is told the bytes of each tensor written."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        span = [offset, offset + tensor.size]
        stated = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": span}
        header[tensor.name] = stated
        offset += tensor.size
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    with path.open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for tensor in tensors:
            content = tensor.read()
            assert len(content) == tensor.size, tensor.name
            file.write(content)
            progress(tensor.size)

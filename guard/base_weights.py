"""Weights in safetensors, one at a time: reading those of a folder, writing a file of them. A base
of many gigabytes passes through without being in memory.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from guard.errors import GuardError

# safetensors' names of types, and bytes of a value.
TYPES = {"float32": ("F32", 4), "float16": ("F16", 2), "bfloat16": ("BF16", 2)}
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


@dataclass(frozen=True)
class Tensor:
    """One tensor that `read` gives the bytes of, row-major and little-endian."""

    name: str
    dtype: str  # a key of TYPES
    shape: tuple[int, ...]
    read: Callable[[], bytes]

    @property
    def layer(self) -> int | None:
        """The layer that it belongs to, from 0 on; None for the rest of the model."""
        match = _LAYER.match(self.name)
        return int(match[1]) if match else None

    @property
    def size(self) -> int:
        size = TYPES[self.dtype][1]
        for length in self.shape:
            size *= length
        return size


def tensors_of(folder: Path) -> Iterator[Tensor]:
    """The tensors of all `*.safetensors` of a folder."""
    dtypes = {short: name for name, (short, _) in TYPES.items()}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        for name, stated in header.items():
            if name == "__metadata__":
                continue
            if stated["dtype"] not in dtypes:
                remedy = f"Use a base of {', '.join(TYPES)}"
                raise GuardError(
                    "weights of this type are not copied",
                    where=f"{path}: {name}",
                    got=stated["dtype"],
                    remedy=remedy,
                )
            begin, end = (8 + length + offset for offset in stated["data_offsets"])

            def read(path: Path = path, begin: int = begin, end: int = end) -> bytes:
                with path.open("rb") as file:
                    file.seek(begin)
                    return file.read(end - begin)

            yield Tensor(name, dtypes[stated["dtype"]], tuple(stated["shape"]), read)


def write_tensors(path: Path, tensors: Sequence[Tensor], progress: Callable[[int], Any]) -> None:
    """One safetensors file; `progress` is told the bytes of each tensor written."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        end = offset + tensor.size
        header[tensor.name] = {
            "dtype": TYPES[tensor.dtype][0],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    with path.open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for tensor in tensors:
            content = tensor.read()
            assert len(content) == tensor.size, tensor.name
            file.write(content)
            progress(tensor.size)

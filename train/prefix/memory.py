"""How much memory this process may still take. Knows nothing of its use."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil

CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class _GroupFiles:
    """The file names of a version of control groups."""

    limit: str
    usage: str
    inactive_file: str  # a line of memory.stat


_VERSION_2 = _GroupFiles("memory.max", "memory.current", "inactive_file")
_VERSION_1 = _GroupFiles("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def free_memory(cgroups: Path = CGROUPS, membership: Path = Path("/proc/self/cgroup")) -> int:
    """The bytes of host memory that are free on the machine and within the limits of the process's
    control groups (containers, services).

    Pages of files that the kernel can drop count as free. Both versions of control groups are read;
    a limit that cannot be read does not count.
    """
    free = int(psutil.virtual_memory().available)
    return max(0, min([free, *_left_in_groups(cgroups, membership)]))


def _left_in_groups(cgroups: Path, membership: Path) -> list[int]:
    bytes_left: list[int] = []
    for line in _text(membership).splitlines():
        _, _, controllers_and_path = line.partition(":")
        controllers, separator, path = controllers_and_path.partition(":")
        if not separator:
            continue
        if controllers == "":
            bytes_left += _left_up_to(cgroups, path, _VERSION_2)
        elif "memory" in controllers.split(","):
            bytes_left += _left_up_to(cgroups / "memory", path, _VERSION_1)
    return bytes_left


def _left_up_to(root: Path, path: str, files: _GroupFiles) -> list[int]:
    """The bytes left in a group and in those above it, whose limits hold for it too."""
    bytes_left: list[int] = []
    folder = root / path.lstrip("/")
    for group in (folder, *folder.parents):
        limit = _text(group / files.limit).strip()
        usage = _text(group / files.usage).strip()
        if limit.isdigit() and usage.isdigit():
            stat = dict(line.split() for line in _text(group / "memory.stat").splitlines())
            bytes_left.append(int(limit) - int(usage) + int(stat.get(files.inactive_file, 0)))
        if group == root:
            break
    return bytes_left


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""

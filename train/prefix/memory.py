"""How much memory this process may still take. Knows nothing of what for."""

from __future__ import annotations

from pathlib import Path

import psutil

CGROUPS = Path("/sys/fs/cgroup")


def free_memory(cgroups: Path = CGROUPS, own: Path = Path("/proc/self/cgroup")) -> int:
    """Bytes of host memory that are free, on the machine and within the limits of the process's control groups (containers, services).

    Pages of files that the kernel can drop count as free. Both versions of control groups; what cannot be read sets no limit.
    """
    return max(0, min([int(psutil.virtual_memory().available), *_left_in_groups(cgroups, own)]))


def _left_in_groups(cgroups: Path, own: Path) -> list[int]:
    lines = [line.split(":", 2) for line in _text(own).splitlines()]
    left = []
    for _, controllers, path in (line for line in lines if len(line) == 3):
        if controllers == "":  # version 2
            root, limit, usage, inactive = cgroups, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            root, limit, usage, inactive = (
                cgroups / "memory",
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_inactive_file",
            )
        else:
            continue
        folder = root / path.lstrip("/")
        for group in (folder, *folder.parents):  # a group's limit holds for those within it
            if (most := _text(group / limit).strip()).isdigit() and (
                used := _text(group / usage).strip()
            ).isdigit():
                stat = dict(line.split() for line in _text(group / "memory.stat").splitlines())
                left.append(int(most) - int(used) + int(stat.get(inactive, 0)))
            if group == root:
                break
    return left


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""

"""Where the figures of several evaluations come from, said once where they agree."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


def distinct(values: Iterable[str]) -> str:
    """One value where all agree, else each once."""
    return " / ".join(dict.fromkeys(values))


def distinct_versions(evaluated_with: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Versions by package; more than one where evaluations were made with different ones."""
    by_package: dict[str, list[str]] = {}
    for versions in evaluated_with:
        for package, version in versions.items():
            by_package.setdefault(package, []).append(version)
    return {package: distinct(versions) for package, versions in by_package.items()}

"""Starts an engine that lacks an optimisation, in a process of its own. Knows nothing of clocks."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path

from guard.recipe import Recipe
from serve.bench.ablation.ablations import Ablation, Traffic
from serve.engine import GuardEngine
from serve.engine.backends.start import start_decoder


def start_engine(
    recipe: Recipe, folders: Mapping[str, Path], traffic: Traffic, ablation: Ablation
) -> GuardEngine:
    """Start the engine. It switches seams off for the whole process: start no other one there."""
    switch_off(ablation.seams_off)
    return GuardEngine(
        recipe,
        folders,
        start_backend=functools.partial(start_decoder, needs_seams=False),
        slots_first=ablation.slots_first,
        **(traffic.engine | dict(ablation.engine)),
    )


def switch_off(names: Sequence[str]) -> None:
    """Put vLLM's own functions back at the seams whose targets end with these names.

    Raises RuntimeError if one cannot be put back.
    """
    import serve.engine.backends.environment  # noqa: F401 - before vLLM

    # isort: split
    from vllm.plugins import load_general_plugins
    from vllm_alora import seams
    from vllm_alora.seam import is_installed, uninstall

    load_general_plugins()
    for name in names:
        (seam,) = [seam for seam in seams() if _path(seam.target).endswith(f".{name}")]
        uninstall(seam)
        if is_installed(seam):
            raise RuntimeError(f"{name} could not be switched off")


def _path(target: str) -> str:
    """A seam's target with dots only, and a dot in front."""
    return f".{target.replace(':', '.')}"

"""Starts an engine that lacks an optimisation, in a process of its own. Knows nothing of clocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from guard.recipe import Recipe
from serve.bench.ablation.ablations import Ablation, Traffic
from serve.engine import GuardEngine, ScoreRequest


class FcfsEngine(GuardEngine):
    """A guard engine that submits a call's rules first come, first served."""

    def _order(self, requests: Sequence[ScoreRequest]) -> Sequence[int]:
        return range(len(requests))


def start_engine(
    recipe: Recipe, folders: Mapping[str, Path], traffic: Traffic, ablation: Ablation
) -> GuardEngine:
    """The engine. It switches seams off for the whole process: start no other one in it."""
    from serve.engine import decoder

    switch_off(ablation.seams_off)
    vars(decoder)["patched"] = dict  # an engine of the product starts with all seams only
    kind = GuardEngine
    if not ablation.slots_first:
        kind = FcfsEngine
    return kind(recipe, folders, **traffic.engine, **ablation.engine)


def switch_off(names: Sequence[str]) -> None:
    """Put vLLM's own functions back at the seams whose targets end with these names.

    Raises RuntimeError if one stays.
    """
    from vllm.plugins import load_general_plugins
    from vllm_alora import seams
    from vllm_alora.seam import is_installed, uninstall

    load_general_plugins()
    for name in names:
        (seam,) = (
            seam for seam in seams() if f".{seam.target.replace(':', '.')}".endswith(f".{name}")
        )
        uninstall(seam)
        if is_installed(seam):
            raise RuntimeError(f"{name} could not be switched off")

"""Activated LoRA (aLoRA) for vLLM: one prefill with base weights, shared by every adapter.

An aLoRA's weights act only from its invocation tokens on (the last occurrence, from the first token
of it). So every block before it holds the base model's K/V, and a hundred adapters on one
conversation need that conversation computed once.

vLLM loads this plugin in every one of its processes and calls `register`. Importing this package
imports nothing, because vLLM only logs a plugin that fails to import and serves on without it; an
exception inside `register` stops the process. Knows nothing of rules, prompts or verdicts. Depends
on vLLM and on what vLLM itself depends on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .seam import Seam

MODULES = (
    *("admit", "arrival", "handover", "kv.block_hash", "kv.resident", "kv.allocation"),
    *("kv.partial_block_seams", "kv.partial_block_copies", "kv.followers", "kv.block_counts"),
    *("kv.cascade", "token_map", "low_rank.sgmv", "low_rank.compiled", "low_rank.launch_grid"),
    *("answers", "embedding", "states", "weights.placed", "weights.prefetch", "weights.slots"),
)


def register() -> None:
    """Patch this process, all seams or none. Raises SeamError if this vLLM is another one."""
    from .seam import install

    install(seams())


def patched() -> dict[str, bool]:
    """Whether vLLM is patched, for every seam, as `module:Class.function`. Raises SeamError."""
    from .seam import is_installed

    return {seam.target: is_installed(seam) for seam in seams()}


def seams() -> list[Seam]:
    """All seams, in the order in which a request meets them."""
    from importlib import import_module

    from .seam import Seam

    all_seams: list[Seam] = []
    for name in MODULES:
        module = import_module(f".{name}", __name__)
        all_seams += [value for value in vars(module).values() if isinstance(value, Seam)]
    return all_seams

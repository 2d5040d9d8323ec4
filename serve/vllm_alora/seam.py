"""A seam: one function of vLLM, wrapped by one function of ours. Knows nothing of what the wrappers
do.

    @seam("vllm.package.module:Class.function", "self request")
    def function(original, self, request): ...

The parameter names are those of the function the wrapper was written for. They are checked before
anything is patched, so a vLLM that changed under us is a clear stop instead of a wrong answer.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

MARK = "__alora_seam__"

Wrapper = Callable[..., Any]


class SeamError(RuntimeError):
    """The installed vLLM is not the one a seam was written for."""


@dataclass(frozen=True)
class Seam:
    """A patched function of vLLM: its place, the names that its parameters must have, and its
    wrapper. `wrapper` is called with the original function first, then with the call's own
    arguments.
    """

    target: str
    parameters: tuple[str, ...]
    wrapper: Wrapper


def seam(target: str, parameters: str) -> Callable[[Wrapper], Seam]:
    """Declare the wrapper of `target`: "module:function" or "module:Class.function"."""
    return lambda wrapper: Seam(target, tuple(parameters.split()), wrapper)


def setting(vllm_config: Any, name: str, default: Any = None) -> Any:
    """What `EngineArgs.additional_config` says under this name of ours."""
    config = vllm_config.additional_config
    return config.get(name, default) if isinstance(config, dict) else default


def install(seams: Iterable[Seam]) -> None:
    """Check every seam, then patch those that are not. Raises SeamError before any patch."""
    wanted = list(seams)
    targets = [patch.target for patch in wanted]
    twice = sorted({target for target in targets if targets.count(target) > 1})
    if twice:  # one would undo the other
        raise SeamError(f"two seams for one function: {', '.join(twice)}")
    pending = [(patch, _checked(patch)) for patch in wanted if not is_installed(patch)]
    for patch, original in pending:
        _patch(patch, original)


def is_installed(patch: Seam) -> bool:
    """Whether this process's vLLM is patched there. Raises SeamError if it does not exist."""
    return hasattr(_function(_find(patch)[2]), MARK)


def _checked(patch: Seam) -> Any:
    """What the seam wraps. Raises SeamError if its parameters have other names."""
    original = _find(patch)[2]
    parameters = tuple(inspect.signature(_function(original)).parameters)
    if parameters != patch.parameters:
        raise SeamError(
            f"vllm_alora: {patch.target} has changed: written for ({', '.join(patch.parameters)}), "
            f"found ({', '.join(parameters)}). Install the vLLM version this plugin was written "
            "for, or adapt this seam (docs/alora_on_vllm.md)"
        )
    return original


def _patch(patch: Seam, original: Any) -> None:
    function = _function(original)

    @functools.wraps(function)
    def patched(*args: Any, **kwargs: Any) -> Any:
        return patch.wrapper(function, *args, **kwargs)

    setattr(patched, MARK, patch.target)
    holder, name, _ = _find(patch)
    _put(holder, name, original, patched)


def _put(holder: Any, name: str, old: Any, new: Wrapper) -> None:
    if inspect.isclass(holder):
        is_classmethod = isinstance(old, classmethod)
        setattr(holder, name, classmethod(new) if is_classmethod else new)
        return
    # `from module import function` made further holders of it.
    for module in list(sys.modules.values()):
        is_vllm = getattr(module, "__name__", "").startswith("vllm")
        if is_vllm and getattr(module, name, None) is old:
            setattr(module, name, new)


def _find(patch: Seam) -> tuple[Any, str, Any]:
    """The module or class that holds the function, its name there, and the function itself. Which
    may be a classmethod object. Raises SeamError if there is none.
    """
    module_name, _, path = patch.target.partition(":")
    *classes, name = path.split(".")
    try:
        holder: Any = importlib.import_module(module_name)
        for class_name in classes:
            holder = getattr(holder, class_name)
        return holder, name, inspect.getattr_static(holder, name)
    except (ImportError, AttributeError) as error:
        raise SeamError(
            f"vllm_alora: this vLLM has no {patch.target} ({error}). "
            "Install the version this plugin was written for"
        ) from error


def _function(attribute: Any) -> Any:
    if isinstance(attribute, classmethod):
        return attribute.__func__
    return attribute

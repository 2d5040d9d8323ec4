"""A seam: one function of vLLM, wrapped by one function of ours. Knows nothing of what the wrappers do.

    @seam("vllm.package.module:Class.function", "self request")
    def function(original, self, request): ...

The parameter names are those of the function the wrapper was written for. They are checked before anything is patched, so a
vLLM that changed under us is a clear stop instead of a wrong answer.
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
    """Where vLLM is patched, what that function's parameters must be called, and what stands in for it.

    `wrapper` is called with the original function first, then with the call's own arguments.
    """

    target: str
    parameters: tuple[str, ...]
    wrapper: Wrapper


def seam(target: str, parameters: str) -> Callable[[Wrapper], Seam]:
    """Declare the decorated function as the wrapper of `target` ("module:function" or "module:Class.function")."""
    return lambda wrapper: Seam(target, tuple(parameters.split()), wrapper)


def install(seams: Iterable[Seam]) -> None:
    """Check every seam, then patch every one that is not patched yet. Raises SeamError before anything is patched."""
    pending = [(one, _checked(one)) for one in seams if not is_installed(one)]
    for one, original in pending:
        _patch(one, original)


def is_installed(one: Seam) -> bool:
    """Whether this process's vLLM is patched at `one`. Raises SeamError if there is no such place."""
    return hasattr(_function(_find(one)[2]), MARK)


def uninstall(one: Seam) -> None:
    """Put vLLM's own function back: to measure what the seam brings. An engine without all seams does not serve."""
    holder, name, found = _find(one)
    if is_installed(one):
        _put(holder, name, found, _function(found).__wrapped__)


def _checked(one: Seam) -> Any:
    original = _find(one)[2]
    found = tuple(inspect.signature(_function(original)).parameters)
    if found != one.parameters:
        raise SeamError(
            f"vllm_alora: {one.target} has changed: written for ({', '.join(one.parameters)}), found ({', '.join(found)}). "
            "Install the vLLM version this plugin was written for, or adapt this seam (docs/alora_on_vllm.md)"
        )
    return original


def _patch(one: Seam, original: Any) -> None:
    function = _function(original)

    @functools.wraps(function)
    def patched(*args: Any, **kwargs: Any) -> Any:
        return one.wrapper(function, *args, **kwargs)

    setattr(patched, MARK, one.target)
    holder, name, _ = _find(one)
    _put(holder, name, original, patched)


def _put(holder: Any, name: str, old: Any, new: Wrapper) -> None:
    if inspect.isclass(holder):
        setattr(holder, name, classmethod(new) if isinstance(old, classmethod) else new)
        return
    for module in list(
        sys.modules.values()
    ):  # `from module import function` made further holders of it
        if (
            getattr(module, "__name__", "").startswith("vllm")
            and getattr(module, name, None) is old
        ):
            setattr(module, name, new)


def _find(one: Seam) -> tuple[Any, str, Any]:
    """The module or class that holds the function, the function's name there, and the function (or classmethod) itself."""
    module_name, _, path = one.target.partition(":")
    *classes, name = path.split(".")
    try:
        holder: Any = importlib.import_module(module_name)
        for part in classes:
            holder = getattr(holder, part)
        return holder, name, inspect.getattr_static(holder, name)
    except (ImportError, AttributeError) as error:
        raise SeamError(
            f"vllm_alora: this vLLM has no {one.target} ({error}). Install the version this plugin was written for"
        ) from error


def _function(found: Any) -> Any:
    return found.__func__ if isinstance(found, classmethod) else found

"""A seam fits exactly its function, and a vLLM that changed is a stop before any patch."""

from __future__ import annotations

import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import vllm_alora
from pytest import MonkeyPatch
from vllm_alora import seam as machinery
from vllm_alora.seam import Seam, SeamError, install, is_installed, seam

pytestmark = pytest.mark.slow


@pytest.fixture
def package(monkeypatch: MonkeyPatch) -> types.ModuleType:
    """A stand-in for vLLM: a function that two modules hold."""

    def double(number: int) -> int:
        return 2 * number

    module, holder = types.ModuleType("vllm_toy"), types.ModuleType("vllm_toy.holder")
    module.double = holder.double = double  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm_toy", module)
    monkeypatch.setitem(sys.modules, "vllm_toy.holder", holder)
    return module


@seam("vllm_toy:double", "number")
def plus_one(original: Callable[[int], int], number: int) -> int:
    return original(number) + 1


def test_a_function_is_replaced_wherever_it_is_held(package: Any) -> None:
    """Wrapped once, however often it is patched."""
    for _ in range(2):
        install([plus_one])
        assert is_installed(plus_one)
    assert package.double(3) == sys.modules["vllm_toy.holder"].double(3) == 7  # type: ignore[attr-defined]


def test_what_does_not_fit_is_a_stop_before_any_patch(package: Any) -> None:
    """A renamed parameter, a lost function, or two seams for one, of which one would undo the other
    one's work.
    """
    renamed = seam("vllm_toy:double", "amount")(lambda *_: 0)
    lost = seam("vllm_toy:treble", "number")(lambda *_: 0)
    for other, problem in (
        (renamed, "two seams for one function"),
        (lost, "this vLLM has no vllm_toy:treble"),
    ):
        with pytest.raises(SeamError, match=problem):
            install([plus_one, other])
        assert package.double(3) == 6
    with pytest.raises(SeamError, match=r"written for \(amount\), found \(number\)"):
        install([renamed])


def test_every_seam_fits_the_installed_vllm() -> None:
    vllm_alora.register()
    vllm_alora.register()
    patched = vllm_alora.patched()
    assert len(patched) == 52 and all(patched.values())


@pytest.mark.parametrize("one", vllm_alora.seams(), ids=lambda one: one.target)
def test_every_seam_stops_at_a_changed_signature(one: Seam, monkeypatch: MonkeyPatch) -> None:
    holder, name, _ = machinery._find(one)
    monkeypatch.setattr(holder, name, lambda changed: None)
    with pytest.raises(SeamError, match="has changed"):
        vllm_alora.register()


def test_importing_the_plugin_imports_nothing_of_vllm() -> None:
    code = "import sys, vllm_alora; assert not {'vllm', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_module_with_seams_is_registered() -> None:
    root = Path(str(vllm_alora.__file__)).parent
    with_seams = [path for path in root.rglob("*.py") if "\n@seam(" in path.read_text()]
    files = {".".join(path.relative_to(root).with_suffix("").parts) for path in with_seams}
    assert files == set(vllm_alora.MODULES)

"""What is installed: the interpreter, the pinned packages, the large libraries, and the plugin.
Knows nothing of how the plugin works; its own check says whether it is in order.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from guard.home import ROOT
from guard.machine.device import installed_device
from guard.machine.provenance import versions
from serve.doctor.finding import Finding

SETUP = ROOT / "setup"
ENTRY_POINT = "vllm.general_plugins"
PLUGINS = ("vllm_alora", "vllm_encoder")
SET_UP_AGAIN = "rm .venv/setup-*.stamp, then `make setup`"
# A name to import from each large library. The model class is what a wrong torchvision breaks.
IMPORTS = {
    "torch": "Tensor",
    "transformers": "Qwen3ForCausalLM",
    "peft": "LoraConfig",
    "trl": "SFTTrainer",
    "vllm": "LLM",
}


def interpreter() -> Iterator[Finding]:
    """The Python that runs this, which must be the checkout's own."""
    remedy = None
    if Path(sys.prefix).resolve() != (ROOT / ".venv").resolve():
        remedy = "Run `make doctor`, or .venv/bin/python -m serve.doctor"
    yield Finding("python", f"{versions()['python']} in {sys.prefix}", remedy)


def packages() -> Iterator[Finding]:
    """Versions, and every pinned package that is missing or another version."""
    listed = [f"{name} {version}" for name, version in versions().items() if name != "python"]
    yield Finding("packages", ", ".join(listed))
    for name, pinned in _pins():
        installed = installed_version(name)
        if installed != pinned:
            text = f"{name} is {installed or 'missing'}, pinned is {pinned}"
            yield Finding("packages", text, SET_UP_AGAIN)


def imports() -> Iterator[Finding]:
    """Whether the large libraries import at all."""
    for module, name in IMPORTS.items():
        try:
            getattr(importlib.import_module(module), name)
        # A broken installation raises anything: OSError, RuntimeError, AttributeError, …
        except Exception as error:
            text = f"{module}.{name}: {type(error).__name__}: {error}"
            yield Finding("imports", text, "rm -rf .venv, then `make setup`")


def plugin() -> Iterator[Finding]:
    """Whether vLLM will find the plugin, whether it is this checkout's, and all seams patched."""
    points = importlib.metadata.entry_points(group=ENTRY_POINT)
    installed = [point.value for point in points]
    missing = [name for name in PLUGINS if f"{name}:register" not in installed]
    if missing:
        text = f"not installed, so vLLM does not load it: {', '.join(missing)}"
        yield Finding("plugin", text, SET_UP_AGAIN)
        return
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and "alora" not in allowed.split(","):
        text = f"VLLM_PLUGINS={allowed} keeps vLLM from loading it"
        yield Finding("plugin", text, "Unset VLLM_PLUGINS or add alora")
    try:
        yield from _seams()
    # A seam that no longer fits says so itself; anything else is as much a reason not to serve.
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        yield Finding("plugin", text, "Install the pinned vLLM: `make setup`")


def _seams() -> Iterator[Finding]:
    import vllm_alora

    folder = Path(vllm_alora.__file__).resolve().parent
    if folder != ROOT / "serve" / "vllm_alora":
        remedy = "The checkout was moved: rm -rf .venv, then `make setup`"
        yield Finding("plugin", f"vllm_alora comes from {folder}", remedy)
    vllm_alora.register()
    for seam, is_patched in vllm_alora.patched().items():
        if is_patched:
            yield Finding("plugin", f"patched  {seam}")
        else:
            yield Finding("plugin", f"NOT patched  {seam}", "Report this: register() left it out")


def installed_version(distribution: str) -> str | None:
    """The version of a package; None if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _pins() -> list[tuple[str, str]]:
    """Name and version of every unconditional pin of this device's environment."""
    device_file = f"{installed_device()}.txt"
    pins = []
    for path in (SETUP / "common.txt", SETUP / device_file):
        for line in path.read_text(encoding="utf-8").splitlines():
            match = re.fullmatch(r"([\w.-]+)==(\S+)", line)
            if match:
                pins.append((match[1], match[2]))
    return pins

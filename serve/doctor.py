"""`make doctor`: what is installed, what runs here and what is broken, each problem with its remedy.

Knows nothing of how the plugin works or what the adapters say; it asks their own checks.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.metadata
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from guard.card import load_card
from guard.errors import GuardError, exits_cleanly
from guard.layout import ROOT, Runs
from guard.method import METHODS
from guard.prompt import PromptBuilder
from guard.provenance import hardware, versions
from guard.recipe import MODELS, load_recipe
from guard.rule import RULES, load_rule
from serve.engine.adapter import Requirements

SETUP = ROOT / "setup"
ENTRY_POINT = "vllm.general_plugins"
# Built for CUDA where pip finds them; beside torch for CPU they fail on import, and then transformers imports no model.
BREAK_CPU_TORCH = ("torchvision", "torchaudio", "torchcodec")


@dataclass(frozen=True)
class Finding:
    """One line of the report. A `remedy` makes it a problem."""

    subject: str
    text: str
    remedy: str | None = None


def interpreter() -> Iterator[Finding]:
    """The Python that runs this, which must be the checkout's own."""
    here = Path(sys.prefix).resolve() == (ROOT / ".venv").resolve()
    yield Finding(
        "python",
        f"{versions()['python']} in {sys.prefix}",
        None if here else "Run `make doctor`, or .venv/bin/python -m serve.doctor",
    )


def packages() -> Iterator[Finding]:
    """Versions, and every pinned package that is missing or another version."""
    yield Finding(
        "packages",
        ", ".join(f"{name} {version}" for name, version in versions().items() if name != "python"),
    )
    for name, pinned in _pins():
        found = _version(name)
        if found != pinned:
            yield Finding(
                "packages",
                f"{name} is {found or 'missing'}, pinned is {pinned}",
                "rm .venv/setup-*.stamp, then `make setup`",
            )


def device() -> Iterator[Finding]:
    """The hardware, and whether torch was built for it."""
    seen = hardware()
    yield Finding("hardware", seen)
    torch_is_for = "cuda" if _is_cuda_build() else "cpu"
    gpu = not seen.endswith("no GPU")
    remedy = None
    if torch_is_for == "cuda" and not gpu:
        remedy = "There is no GPU: `make setup DEVICE=cpu`"
    yield Finding(
        "device",
        torch_is_for
        + (
            ", although there is a GPU: `make setup DEVICE=cuda` uses it"
            if gpu and torch_is_for == "cpu"
            else ""
        ),
        remedy,
    )
    for name in () if torch_is_for == "cuda" else BREAK_CPU_TORCH:
        if found := _version(name):
            yield Finding(
                "device",
                f"{name} {found} breaks transformers beside torch for CPU",
                f".venv/bin/python -m pip uninstall -y {name}",
            )


def preload() -> Iterator[Finding]:
    """What the environment loads before Python. Never a problem: vLLM runs without, and a gain has to be measured."""
    libraries = os.environ.get("LD_PRELOAD", "").replace(":", " ").split()
    for name, part in (("tcmalloc", "tcmalloc"), ("Intel OpenMP", "libiomp5")):
        loaded = [library for library in libraries if part in library]
        yield Finding("preload", f"{name}: {loaded[0] if loaded else 'not in LD_PRELOAD'}")


def imports() -> Iterator[Finding]:
    """Whether the large libraries import at all. The model class is what a wrong torchvision breaks."""
    for module, name in (
        ("torch", "Tensor"),
        ("transformers", "Qwen3ForCausalLM"),
        ("peft", "LoraConfig"),
        ("trl", "SFTTrainer"),
        ("vllm", "LLM"),
    ):
        try:
            getattr(importlib.import_module(module), name)
        except Exception as error:  # a broken installation raises anything: OSError, RuntimeError, AttributeError, …
            yield Finding(
                "imports",
                f"{module}.{name}: {type(error).__name__}: {error}",
                "rm -rf .venv, then `make setup`",
            )


def plugin() -> Iterator[Finding]:
    """Whether vLLM will find the plugin, whether it is this checkout's, and whether every seam is patched once it is loaded."""
    if not any(
        point.value == "vllm_alora:register"
        for point in importlib.metadata.entry_points(group=ENTRY_POINT)
    ):
        yield Finding(
            "plugin",
            "vllm_alora is not installed, so vLLM does not load it",
            "rm .venv/setup-*.stamp, then `make setup`",
        )
        return
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and "alora" not in allowed.split(","):
        yield Finding(
            "plugin",
            f"VLLM_PLUGINS={allowed} keeps vLLM from loading it",
            "Unset VLLM_PLUGINS or add alora",
        )
    try:
        import vllm_alora

        folder = Path(vllm_alora.__file__).resolve().parent
        if folder != ROOT / "serve" / "vllm_alora":
            yield Finding(
                "plugin",
                f"vllm_alora comes from {folder}",
                "The checkout was moved: rm -rf .venv, then `make setup`",
            )
        vllm_alora.register()
        for seam, is_patched in vllm_alora.patched().items():
            yield Finding(
                "plugin",
                f"{'patched' if is_patched else 'NOT patched'}  {seam}",
                None if is_patched else "Report this: register() left it out",
            )
    except Exception as error:  # a seam that no longer fits says so itself; anything else is as much a reason not to serve
        yield Finding(
            "plugin", f"{type(error).__name__}: {error}", "Install the pinned vLLM: `make setup`"
        )


def recipes() -> Iterator[Finding]:
    """Whether every model and rule file loads, and whether a base in the checkout has weights and a tokenizer for the prompts."""
    for path in sorted(MODELS.glob("*.yaml")):
        try:
            recipe = load_recipe(path.stem, MODELS)
            folder = Path(recipe.base_path)
            if folder.is_dir():
                PromptBuilder.from_base(recipe.base_path, answer_prefix=recipe.answer_prefix)
            has_weights = not folder.is_dir() or any(folder.glob("*.safetensors"))
            yield Finding(
                "recipes",
                f"{path.stem}: {recipe.base}, {recipe.context_tokens:,} tokens of context"
                + ("" if has_weights else ", but no weights"),
                None
                if has_weights
                else f"Restore it: `git checkout {recipe.base}`, if it came with the checkout",
            )
        except GuardError as error:
            yield Finding("recipes", str(error), "Mend the file")
    for path in sorted(RULES.glob("*.yaml")):
        try:
            yield Finding("rules", f"{path.stem}: {load_rule(path.stem, RULES).title}")
        except GuardError as error:
            yield Finding("rules", str(error), "Mend the file")


def adapters() -> Iterator[Finding]:
    """Every trained adapter: whether it may be served, and whether its rule still says what it was trained on."""
    root = Runs().root
    requirements = functools.cache(lambda model: Requirements.of(load_recipe(model)))
    folders = sorted(
        path for method in METHODS for path in root.glob(f"*/*/{method}*") if path.is_dir()
    )
    for part in sorted(path for method in METHODS for path in root.glob(f"*/*/.{method}*.part")):
        yield Finding(
            "adapters",
            f"{part.relative_to(root)}: unfinished; `make train RULE={part.parent.name}` resumes it",
        )
    for folder in folders:
        name = str(folder.relative_to(root))
        try:
            card = requirements(load_card(folder).model).admit(name, folder).card
            is_current = (
                load_rule(card.rule, RULES).text(load_recipe(card.model).rule_turn)
                == card.rule_text
            )
            state = (
                "ready"
                if is_current
                else f"ready for its rule as it was; `{card.retrain}` follows the change"
            )
            yield Finding("adapters", f"{name}: {state}")
        except GuardError as error:
            yield Finding(
                "adapters",
                str(error),
                f"rm -r {folder}, then `make train RULE={folder.parent.name}`",
            )
    if not folders:
        yield Finding("adapters", "none yet; `make all RULE=medical_advice` trains the first two")


# In the order of the report: what a later check needs is checked before it.
CHECKS: dict[str, Callable[[], Iterator[Finding]]] = {
    "interpreter": interpreter,
    "packages": packages,
    "device": device,
    "preload": preload,
    "imports": imports,
    "plugin": plugin,
    "recipes": recipes,
    "adapters": adapters,
}


def report(checks: dict[str, Callable[[], Iterator[Finding]]]) -> list[Finding]:
    """Print every finding as it is made; return the problems."""
    problems = []
    for check in checks.values():
        for finding in check():
            print(
                f"{'PROBLEM' if finding.remedy else '     ok'}  {finding.subject:<9} {finding.text}",
                flush=True,
            )
            if finding.remedy:
                print(f"{'':9}{'':<9} -> {finding.remedy}", flush=True)
                problems.append(finding)
    return problems


def _is_cuda_build() -> bool:
    return "+cpu" not in (_version("torch") or "+cpu")


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _pins() -> list[tuple[str, str]]:
    """Name and version of every unconditional pin of this device's environment."""
    files = (SETUP / "common.txt", SETUP / f"{'cuda' if _is_cuda_build() else 'cpu'}.txt")
    lines = [line for path in files for line in path.read_text(encoding="utf-8").splitlines()]
    return [
        (match[1], match[2]) for line in lines if (match := re.fullmatch(r"([\w.-]+)==(\S+)", line))
    ]


@exits_cleanly
def main() -> None:
    """Check everything; exit 1 if something is broken."""
    argparse.ArgumentParser(prog="python -m serve.doctor", description=__doc__).parse_args()
    problems = report(CHECKS)
    print(f"\n{len(problems)} problem(s)" if problems else "\nno problems")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()

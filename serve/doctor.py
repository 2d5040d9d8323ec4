"""`make doctor`: what is installed, what runs here, what is broken; each problem with its remedy.

Knows nothing of how the plugin works or what the weights answer; their own checks say whether they
are in order.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.metadata
import os
import platform
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from guard.card import check_rule, load_card
from guard.errors import GuardError, exits_cleanly
from guard.layout import ROOT, Runs
from guard.machine.device import installed_device, missing_for_compiling
from guard.machine.provenance import (
    gpu_driver,
    gpu_memory_gib,
    hardware,
    host_memory_gib,
    versions,
)
from guard.method import METHODS
from guard.prompt.builders import prompt_builder
from guard.recipe import MODELS, Recipe, load_recipe
from guard.rule import RULES, load_rule
from serve.engine.adapter import Requirements

SETUP = ROOT / "setup"
LEAST_DRIVER = 580  # of CUDA 13.0, which the pins of setup/cuda.txt are built for
LEAST_GLIBC = (2, 31)  # of their wheels
ENTRY_POINT = "vllm.general_plugins"
PLUGINS = ("vllm_alora", "vllm_encoder")
# Built for CUDA where pip finds them; beside torch for CPU they fail on import, and then
# transformers imports no model.
BREAK_CPU_TORCH = ("torchvision", "torchaudio", "torchcodec")
# Libraries that make vLLM faster on a CPU, and a part of their files' names.
PRELOADS = {"tcmalloc": "tcmalloc", "Intel OpenMP": "libiomp5"}
# A name to import from each large library. The model class is what a wrong torchvision breaks.
IMPORTS = {
    "torch": "Tensor",
    "transformers": "Qwen3ForCausalLM",
    "peft": "LoraConfig",
    "trl": "SFTTrainer",
    "vllm": "LLM",
}


@dataclass(frozen=True)
class Finding:
    """One line of the report. A `remedy` makes it a problem."""

    subject: str
    text: str
    remedy: str | None = None


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
        installed = _version(name)
        if installed != pinned:
            yield Finding(
                "packages",
                f"{name} is {installed or 'missing'}, pinned is {pinned}",
                "rm .venv/setup-*.stamp, then `make setup`",
            )


def device() -> Iterator[Finding]:
    """The hardware, and whether torch was built for it."""
    description = hardware()
    has_gpu = not description.endswith("no GPU")
    yield Finding("hardware", description)
    if installed_device() == "cuda":
        yield from _cuda_build(has_gpu)
    else:
        yield from _cpu_build(has_gpu)


def _cuda_build(has_gpu: bool) -> Iterator[Finding]:
    if not has_gpu:
        yield Finding("device", "cuda", "There is no GPU: `make setup DEVICE=cpu`")
        return
    driver = gpu_driver()
    remedy = None
    if int(driver.partition(".")[0] or 0) < LEAST_DRIVER:
        remedy = f"The pinned packages are of CUDA 13.0: install driver {LEAST_DRIVER} or newer"
    yield Finding("device", f"cuda, driver {driver or 'unknown'}", remedy)
    library, version = platform.libc_ver()
    remedy = None
    if library == "glibc" and tuple(map(int, version.split("."))) < LEAST_GLIBC:
        wanted = ".".join(map(str, LEAST_GLIBC))
        remedy = f"The pinned wheels need glibc {wanted}: use a newer Linux, or a container of one"
    yield Finding("device", f"{library or 'libc unknown'} {version}".rstrip(), remedy)


def _cpu_build(has_gpu: bool) -> Iterator[Finding]:
    text = "cpu"
    if has_gpu:
        text += ", although there is a GPU: `make setup DEVICE=cuda` uses it"
    yield Finding("device", text)
    missing = missing_for_compiling()
    if missing is not None:  # no problem: what is not compiled is served all the same, slower
        yield Finding("device", f"not compiled (slower): {missing} is missing")
    for name in BREAK_CPU_TORCH:
        installed = _version(name)
        if installed is not None:
            yield Finding(
                "device",
                f"{name} {installed} breaks transformers beside torch for CPU",
                f".venv/bin/python -m pip uninstall -y {name}",
            )


def preload() -> Iterator[Finding]:
    """What the environment loads before Python.

    Never a problem: vLLM runs without, and a gain has to be measured.
    """
    libraries = os.environ.get("LD_PRELOAD", "").replace(":", " ").split()
    for name, part in PRELOADS.items():
        paths = [library for library in libraries if part in library]
        yield Finding("preload", f"{name}: {(paths or ['not in LD_PRELOAD'])[0]}")


def imports() -> Iterator[Finding]:
    """Whether the large libraries import at all."""
    for module, name in IMPORTS.items():
        try:
            getattr(importlib.import_module(module), name)
        # A broken installation raises anything: OSError, RuntimeError, AttributeError, …
        except Exception as error:
            yield Finding(
                "imports",
                f"{module}.{name}: {type(error).__name__}: {error}",
                "rm -rf .venv, then `make setup`",
            )


def plugin() -> Iterator[Finding]:
    """Whether vLLM will find the plugin, whether it is this checkout's, and all seams patched."""
    points = importlib.metadata.entry_points(group=ENTRY_POINT)
    installed = [point.value for point in points]
    missing = [name for name in PLUGINS if f"{name}:register" not in installed]
    if missing:
        yield Finding(
            "plugin",
            f"not installed, so vLLM does not load it: {', '.join(missing)}",
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
        yield from _seams()
    # A seam that no longer fits says so itself; anything else is as much a reason not to serve.
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        yield Finding("plugin", text, "Install the pinned vLLM: `make setup`")


def _seams() -> Iterator[Finding]:
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
        if is_patched:
            yield Finding("plugin", f"patched  {seam}")
        else:
            yield Finding("plugin", f"NOT patched  {seam}", "Report this: register() left it out")


def recipes() -> Iterator[Finding]:
    """Whether every model and rule file loads, and whether a local base is whole."""
    for path in sorted(MODELS.glob("*.yaml")):
        try:
            yield _recipe(path.stem)
        except GuardError as error:
            yield Finding("recipes", str(error), "Correct the file")
    for path in sorted(RULES.glob("*.yaml")):
        try:
            yield Finding("rules", f"{path.stem}: {load_rule(path.stem, RULES).title}")
        except GuardError as error:
            yield Finding("rules", str(error), "Correct the file")


def _recipe(name: str) -> Finding:
    """One recipe, and whether a base in the checkout has weights and a tokenizer."""
    recipe = load_recipe(name, MODELS)
    text = f"{name}: {recipe.base}, {recipe.context_tokens:,} tokens of context"
    folder = Path(recipe.base_path)
    if not folder.is_dir():
        return Finding("recipes", text)
    prompt_builder(recipe)
    if any(folder.glob("*.safetensors")):
        return Finding("recipes", text)
    remedy = f"Restore it: `git checkout {recipe.base}`, if it came with the checkout"
    return Finding("recipes", f"{text}, but no weights", remedy)


def memory(model: str) -> Iterator[Finding]:
    """Whether this machine has the memory that `model` is served in, before it is downloaded."""
    try:
        recipe = load_recipe(model, MODELS)
    except GuardError as error:
        yield Finding("memory", str(error), "Name a recipe of recipes/models: MODEL=tiny")
        return
    missing = _missing_memory(recipe)
    if missing:
        remedy = "Use a larger machine, or lower the recipe's serving_memory"
        yield Finding("memory", f"{model}: {missing}", remedy)
    else:
        yield Finding("memory", f"{model}: enough for what its recipe states")


def _missing_memory(recipe: Recipe) -> str:
    """What this machine lacks of the memory that the recipe states; empty where it lacks nothing.

    Known before the base is downloaded. What the recipe does not state counts as nothing.
    """
    memory = recipe.serving_memory
    device_gib = (memory.weights_gib or 0.0) + (memory.device_gib or 0.0)
    host_gib = memory.host_gib or 0.0
    here = {"GPU": gpu_memory_gib(), "host": host_memory_gib()}
    wanted = {"GPU": device_gib, "host": host_gib}
    if installed_device() == "cpu":
        wanted = {"host": device_gib + host_gib}
    lacking = [
        f"serving needs {gib:.1f} GiB of {kind} memory; this machine has {here[kind]:.1f}"
        for kind, gib in wanted.items()
        if gib > here[kind]
    ]
    return "; ".join(lacking)


def weights() -> Iterator[Finding]:
    """All that is trained, by any method: whether it may be served, and is of today's rule."""
    root = Runs().root
    folders: list[Path] = []
    unfinished: list[Path] = []
    for method in METHODS:
        for name in (method, f"{method}-seed*"):  # as guard.layout names them
            folders += [path for path in root.glob(f"*/*/{name}") if path.is_dir()]
            unfinished += root.glob(f"*/*/.{name}.part")
    for part in sorted(unfinished):
        command = _train_command(part.with_name(part.name.removeprefix(".").removesuffix(".part")))
        yield Finding("weights", f"{part.relative_to(root)}: unfinished; `{command}` resumes it")
    requirements = functools.cache(lambda model: Requirements.of(load_recipe(model)))
    for folder in sorted(folders):
        yield _weights(folder, str(folder.relative_to(root)), requirements)
    if not folders:
        yield Finding("weights", "none yet; `make all RULE=medical_advice` trains the first")


def _weights(folder: Path, name: str, requirements: Callable[[str], Requirements]) -> Finding:
    """One folder of weights. What is wrong elsewhere, as a base that is not reachable, leaves them
    valid: only of a folder that is broken itself the remedy is always another training.
    """
    try:
        card = load_card(folder)
    except GuardError as error:
        command = f"{_train_command(folder)} FORCE=1"
        return _problem(error, f"{error.remedy}. What trains it again: `{command}`")
    try:
        return _trained(folder, name, requirements(card.model))
    except GuardError as error:
        return _problem(error, error.remedy)


def _problem(error: GuardError, remedy: str | None) -> Finding:
    """The error's line without its own remedy, and this one."""
    line = GuardError(error.problem, where=error.where, got=error.got)
    return Finding("weights", str(line), remedy or "Correct it")


def _train_command(folder: Path) -> str:
    """What trains the weights of a folder, which lies as `guard.layout` says."""
    method, _, seed = folder.name.partition("-seed")
    rule, model = folder.parent.name, folder.parent.parent.name
    command = f"make train RULE={rule} MODEL={model} METHOD={method}"
    if seed:
        command += f" SEEDS={seed}"
    return command


def _trained(folder: Path, name: str, requirements: Requirements) -> Finding:
    """Weights with a card. Raises GuardError if they may not be served."""
    card = requirements.admit(name, folder).card
    check_rule(card, folder.parent.name, folder)
    rule, recipe = load_rule(card.rule, RULES), load_recipe(card.model)
    if (rule.text(recipe.rule_turn), recipe.reads(rule)) == (card.rule_text, card.reads):
        return Finding("weights", f"{name}: ready")
    state = f"ready for its rule as it was; `{card.retrain}` follows the change"
    return Finding("weights", f"{name}: {state}")


# In the order of the report: what a later check needs is checked before it.
FINDERS: dict[str, Callable[[], Iterator[Finding]]] = {
    "interpreter": interpreter,
    "packages": packages,
    "device": device,
    "preload": preload,
    "imports": imports,
    "plugin": plugin,
    "recipes": recipes,
    "weights": weights,
}


def report(checks: dict[str, Callable[[], Iterator[Finding]]]) -> list[Finding]:
    """Print every finding as it is made; return the problems."""
    problems = []
    for check in checks.values():
        for finding in check():
            if finding.remedy is None:
                print(f"     ok  {finding.subject:<9} {finding.text}", flush=True)
                continue
            print(f"PROBLEM  {finding.subject:<9} {finding.text}", flush=True)
            print(f"{'':18} -> {finding.remedy}", flush=True)
            problems.append(finding)
    return problems


def _version(distribution: str) -> str | None:
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


@exits_cleanly
def main() -> None:
    """Check everything; exit 1 if something is broken."""
    parser = argparse.ArgumentParser(prog="python -m serve.doctor", description=__doc__)
    model = "the recipe that this machine's memory is compared with (default: tiny)"
    parser.add_argument("--model", default="tiny", help=model)
    of_model = {"memory": functools.partial(memory, parser.parse_args().model)}
    problems = report(FINDERS | of_model)
    if problems:
        print(f"\n{len(problems)} problem(s)")
        sys.exit(1)
    print("\nno problems")


if __name__ == "__main__":
    main()

"""What this machine has: its hardware, its drivers, its memory. Knows nothing of what is installed
beside torch.
"""

from __future__ import annotations

from collections.abc import Iterator

from guard.errors import GuardError
from guard.machine.device import installed_device, missing_for_compiling
from guard.machine.provenance import gpu_driver, gpu_memory_gib, hardware, host_memory_gib
from guard.recipe import MODELS, Recipe, ServingMemory, load_recipe
from serve.doctor.finding import Finding

LEAST_DRIVER = 580  # of CUDA 13.0, which the pins of setup/cuda.txt are built for


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


def _cpu_build(has_gpu: bool) -> Iterator[Finding]:
    text = "cpu"
    if has_gpu:
        text += ", although there is a GPU: `make setup DEVICE=cuda` uses it"
    yield Finding("device", text)
    missing = missing_for_compiling()
    if missing is not None:  # no problem: what is not compiled is served too, but slower
        yield Finding("device", f"not compiled (slower): {missing} is missing")


def memory(model: str) -> Iterator[Finding]:
    """Whether this machine has the memory that `model` is served in, before it is downloaded."""
    try:
        recipe = load_recipe(model, MODELS)
    except GuardError as error:
        yield Finding("memory", str(error), "Correct it, or name another one: MODEL=tiny")
        return
    missing = _missing_memory(recipe)
    if missing:
        remedy = "Use a larger machine, or lower the recipe's serving_memory"
        yield Finding("memory", f"{model}: {missing}", remedy)
    elif recipe.serving_memory == ServingMemory():
        yield Finding("memory", f"{model}: its recipe states no memory")
    else:
        yield Finding("memory", f"{model}: enough for what its recipe states")


def _missing_memory(recipe: Recipe) -> str:
    """What this machine lacks of the memory that the recipe states; empty where it lacks nothing.
    Known before the base is downloaded. What the recipe does not state counts as nothing.
    """
    memory = recipe.serving_memory
    device_gib = (memory.weights_gib or 0.0) + (memory.device_gib or 0.0)
    host_gib = memory.host_gib or 0.0
    available_gib = {"GPU": gpu_memory_gib(), "host": host_memory_gib()}
    needed_gib = {"GPU": max(device_gib, memory.gpu_gib or 0.0), "host": host_gib}
    if installed_device() == "cpu":
        needed_gib = {"host": device_gib + host_gib}
    lacking = [
        f"serving needs {gib:.1f} GiB of {kind} memory; this machine has {available_gib[kind]:.1f}"
        for kind, gib in needed_gib.items()
        if gib > available_gib[kind]
    ]
    return "; ".join(lacking)

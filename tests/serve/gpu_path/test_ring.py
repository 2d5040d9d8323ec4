"""The quick part of the ring in every run, in a process of its own: vLLM's kernels, interpreted,
and what vLLM derives from a recipe's sizes on a GPU.

All of it: `make test-gpu-path`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from guard.machine.device import installed_device

HERE = Path(__file__).parent
PLUGIN = "tests.serve.gpu_path.interpreted"
QUICK = [str(HERE / "ring_kernels.py"), str(HERE / "ring_sizes.py")]


@pytest.mark.slow
@pytest.mark.skipif(installed_device() != "cpu", reason="a CPU environment interprets kernels")
def test_vllms_kernels_give_what_a_loop_gives_and_its_sizes_are_the_recipe_s() -> None:
    environment = {name: value for name, value in os.environ.items() if "PYTEST" not in name}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n0", "-p", PLUGIN, *QUICK],
        cwd=HERE.parents[2],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert "15 passed" in done.stdout

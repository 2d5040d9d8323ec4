"""vLLM's own kernels in their own process: the quick part of `make test-gpu-path`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from guard.machine.device import installed_device

HERE = Path(__file__).parent
INTERPRETED = ["-p", "tests.serve.gpu_path.interpreted"] if installed_device() == "cpu" else []


@pytest.mark.slow
@pytest.mark.skipif(
    installed_device() != "cpu" and not torch.cuda.is_available(), reason="no GPU is seen"
)
def test_vllms_kernels_give_what_a_loop_gives() -> None:
    environment = {name: value for name, value in os.environ.items() if "PYTEST" not in name}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n0", *INTERPRETED, str(HERE / "ring_kernels.py")],
        cwd=HERE.parents[2],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert "7 passed" in done.stdout

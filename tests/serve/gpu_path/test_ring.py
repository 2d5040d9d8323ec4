"""vLLM's own kernels in their own process: the quick part of `make test-gpu-path`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from guard.machine.device import installed_device
from guard.recipe import load_recipe

NEW_TOKENS = 34  # of a rule on a new conversation, its title included
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
    assert "6 passed" in done.stdout


def test_a_step_of_the_gpu_s_recipe_has_room_for_5000_tokens_and_100_rules() -> None:
    """vLLM's own sizes would cut it, and start no graph that is large enough for fifty rules."""
    of_4b = load_recipe("qwen3-4b").engine
    assert of_4b["max_num_batched_tokens"] >= 5000 + 100 * NEW_TOKENS
    assert of_4b["max_num_seqs"] >= 100

"""vLLM's environment is set where nothing else has said otherwise, and before vLLM is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

NAMES = (
    "VLLM_ENABLE_V1_MULTIPROCESSING",
    "OMP_NUM_THREADS",
    "VLLM_LOGGING_LEVEL",
    "VLLM_USE_FLASHINFER_SAMPLER",
)


@pytest.mark.parametrize("said", [{}, {"OMP_NUM_THREADS": "7", "VLLM_LOGGING_LEVEL": "INFO"}])
def test_one_process_has_a_thread_a_core_unless_the_shell_differs(said: dict[str, str]) -> None:
    code = (
        "import json, os, sys, serve.engine.backends.environment;"
        f"print(json.dumps([*map(os.environ.get, {NAMES}), 'vllm' in sys.modules]))"
    )
    inherited = {name: value for name, value in os.environ.items() if name not in NAMES}
    command, environment = [sys.executable, "-c", code], inherited | said
    found = json.loads(subprocess.check_output(command, env=environment, text=True))
    expected = dict(zip(NAMES, ("0", str(len(os.sched_getaffinity(0))), "ERROR", "0"), strict=True))
    assert found == [*(expected | said).values(), False]

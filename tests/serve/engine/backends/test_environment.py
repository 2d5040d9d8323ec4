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


def settings(**environment: str) -> dict[str, str]:
    """What a new process has of NAMES after the import, and whether vLLM was imported."""
    code = (
        "import json, os, sys, serve.engine.backends.environment;"
        f"print(json.dumps({{name: os.environ[name] for name in {NAMES}}}"
        " | {'vllm': str('vllm' in sys.modules)}))"
    )
    inherited = {name: value for name, value in os.environ.items() if name not in NAMES}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=inherited | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    read: dict[str, str] = json.loads(done.stdout)
    return read


@pytest.mark.parametrize("said", [{}, {"OMP_NUM_THREADS": "7", "VLLM_LOGGING_LEVEL": "INFO"}])
def test_one_process_with_a_thread_for_every_core_unless_the_shell_says_otherwise(
    said: dict[str, str],
) -> None:
    assert (
        settings(**said)
        == {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))),
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_USE_FLASHINFER_SAMPLER": "0",
            "vllm": "False",
        }
        | said
    )

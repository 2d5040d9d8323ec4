"""Which test files take longest: they are begun first. Tests only.

xdist alone begins those with most tests, and these have few: all but one process would wait for the
last of them. A file that is missing here costs time, and nothing else.
"""

from __future__ import annotations

# About how many seconds on a quiet core.
LONG_FILES_S: dict[str, float] = {
    "tests/serve/vllm_encoder/test_bert.py": 150,
    "tests/serve/cluster/test_start.py": 70,
    "tests/serve/vllm_alora/test_parity.py": 70,
    "tests/serve/cluster/test_ray_pool.py": 65,
    "tests/serve/vllm_alora/low_rank/test_compiled.py": 60,
    "tests/serve/bench/test_gpu_check.py": 120,
    "tests/test_repository.py": 60,
    "tests/serve/scan/test_replay.py": 35,
    "tests/serve/test_up.py": 30,
    "tests/serve/engine/test_dispatch.py": 30,
    "tests/serve/engine/test_engine.py": 30,
    "tests/serve/engine/test_head.py": 30,
    "tests/deploy/test_nemo.py": 30,
    "tests/deploy/test_litellm.py": 30,
    "tests/serve/fuzz/test_run.py": 20,
    "tests/serve/gpu_path/test_ring.py": 20,
    "tests/test_makefile.py": 20,
}

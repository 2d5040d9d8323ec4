"""What vLLM reads of its environment when it is imported. Import this before it. In its defaults
vLLM runs in processes of its own, on one thread each, and logs what it does.
"""

from __future__ import annotations

import logging
import os

from guard.machine.device import usable_cores

# In this process, because a verdict is a single step, so two processes would have nothing to do at
# the same time; and because an error in the engine is then an exception to its caller and not a
# dead process.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
# Without it vLLM sets torch to one thread: it expects the model on a GPU, or in processes that set
# their own.
os.environ.setdefault("OMP_NUM_THREADS", str(len(usable_cores())))
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
# A verdict is not sampled: nothing of FlashInfer's is needed for it on a GPU.
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
# vLLM warns before it has read its own setting.
logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"].upper())
# Triton is of no use on a CPU, and nothing here asks for it.
logging.getLogger("torch._library.triton").setLevel(logging.ERROR)

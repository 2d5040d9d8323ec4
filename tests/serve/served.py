"""A vLLM engine in this process, asked for next-token log-probabilities. Tests only; the product's
engine is serve.engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from tests.serve.adapters import BASE, LINEARS, peft_logits

BLOCK = 32
MAX_SEQS = 128
MAX_STEP_TOKENS = 8192
# The token ids whose log-probabilities are compared: 50 all over the vocabulary.
SAMPLED_IDS = list(range(5, 16384, 331))


@dataclass(frozen=True)
class Answer:
    """One request's log-probabilities of SAMPLED_IDS, and its prompt's tokens that were cached."""

    log_probs: torch.Tensor
    cached_tokens: int


class Served:
    """An LLM with some verbs for tests. Each adapter folder has one adapter id for good."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self._ids: dict[str, int] = {}

    @classmethod
    def start(cls, **overrides: Any) -> Served:
        from vllm import LLM

        settings: dict[str, Any] = {
            "dtype": "float32",
            "enforce_eager": True,  # it starts in seconds
            "block_size": BLOCK,
            "enable_lora": True,
            "max_loras": MAX_SEQS,
            "max_lora_rank": 16,
            "lora_target_modules": LINEARS,
            "max_num_seqs": MAX_SEQS,
            "max_num_batched_tokens": MAX_STEP_TOKENS,
            "max_model_len": 2048,
            "max_logprobs": len(SAMPLED_IDS) + 1,
            "enable_prefix_caching": True,
            "skip_tokenizer_init": True,
            "disable_log_stats": True,
            "async_scheduling": False,
            "seed": 0,
        }
        return cls(LLM(BASE, **(settings | overrides)))

    def request(self, folder: str | None) -> Any:
        """The LoRARequest for an adapter folder, or None for the base."""
        from vllm.lora.request import LoRARequest

        if folder is None:
            return None
        adapter_id = self._ids.setdefault(folder, len(self._ids) + 1)
        return LoRARequest(f"adapter {adapter_id}", adapter_id, folder)

    def ask(self, prompts: Sequence[Sequence[int]], folders: Sequence[str | None]) -> list[Answer]:
        return self.ask_requests(prompts, [self.request(folder) for folder in folders])

    def ask_one(self, prompt: Sequence[int], folder: str | None) -> Answer:
        return self.ask([prompt], [folder])[0]

    def ask_requests(
        self, prompts: Sequence[Sequence[int]], requests: Sequence[Any]
    ) -> list[Answer]:
        """Answer all prompts at once, with these LoRARequests."""
        from vllm import SamplingParams

        params = SamplingParams(
            max_tokens=1, temperature=0.0, logprob_token_ids=SAMPLED_IDS, detokenize=False
        )
        inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        answers = []
        for output in self.llm.generate(
            inputs, params, lora_request=list(requests), use_tqdm=False
        ):
            (log_probs,) = output.outputs[0].logprobs
            sampled = torch.tensor([log_probs[token].logprob for token in SAMPLED_IDS])
            answers.append(Answer(sampled, output.num_cached_tokens))
        return answers

    def limit_step(self, tokens: int) -> None:
        """Compute at most this many tokens in a step: longer prompts are prefilled in chunks."""
        self.scheduler.max_num_scheduled_tokens = tokens

    def reset(self) -> None:
        """Forget all cached blocks and lift the limit on a step."""
        self.limit_step(self.scheduler.scheduler_config.max_num_batched_tokens)
        assert self.llm.reset_prefix_cache()

    def close(self) -> None:
        """Stop, and leave the process's communication groups, which others need."""
        with mock.patch("vllm.v1.engine.core.cleanup_dist_env_and_memory"):
            self.llm.llm_engine.engine_core.shutdown()

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def core(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def scheduler(self) -> Any:
        return self.core.scheduler

    @property
    def runner(self) -> Any:
        return self.core.model_executor.driver_worker.worker.model_runner


def reference(
    prompt: Sequence[int], folder: str | None, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """PEFT's log-probabilities of SAMPLED_IDS after `prompt`, [50]."""
    return peft_logits(prompt, folder, dtype).log_softmax(-1)[SAMPLED_IDS]

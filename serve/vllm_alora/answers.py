"""Seams: the output layer computes the tokens that can be answered, not the vocabulary.

A verdict is the difference of two logits. An engine that is only asked for verdicts says so
(`ANSWERS`): then two columns are computed, and the larger one is the answer. Its
"log-probabilities" are logits, right up to a constant. Runner V1 on a CPU, with one worker and an
output layer that is neither quantised nor adapted; elsewhere nothing changes. Remove when vLLM
computes logits for the tokens that are asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.platforms import current_platform
from vllm.v1.outputs import LogprobsTensors, SamplerOutput

from .seam import seam, setting

# In EngineArgs.additional_config: the ids of the only tokens that this engine is asked for.
ANSWERS = "vllm_alora_answers"


def _answers_of(vllm_config: Any) -> list[int]:
    """The ids of the tokens that can be answered; none where all of them can be."""
    is_whole = vllm_config.parallel_config.world_size == 1
    # Installing Triton for CPUs selects runner V2, whose sampler knows nothing of two columns.
    is_v1 = current_platform.is_cpu() and not vllm_config.use_v2_model_runner
    if not (is_whole and is_v1):
        return []
    return list(setting(vllm_config, ANSWERS, ()))


@seam(
    "vllm.model_executor.layers.logits_processor:LogitsProcessor.__init__",
    "self vocab_size org_vocab_size scale logits_as_input soft_cap",
)
def logits_processor_init(
    original: Callable[..., None], self: Any, *args: Any, **kwargs: Any
) -> None:
    """Remember which tokens can be answered: the configuration is not at hand later."""
    original(self, *args, **kwargs)
    self.answers = _answers_of(get_current_vllm_config())


@seam(
    "vllm.model_executor.layers.logits_processor:LogitsProcessor._get_logits",
    "self hidden_states lm_head embedding_bias skip_gather",
)
def get_logits(
    original: Callable[..., Any],
    self: Any,
    hidden_states: torch.Tensor,
    lm_head: Any,
    embedding_bias: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """The answers' logits, [rows, answers], of hidden states [rows, size], in `head_dtype`."""
    if (
        self.answers
        and embedding_bias is None
        and isinstance(lm_head.quant_method, UnquantizedEmbeddingMethod)
    ):
        dtype = self.head_dtype or hidden_states.dtype
        answers = torch.tensor(self.answers, device=hidden_states.device)
        columns = lm_head.quant_method.embedding(lm_head, answers).to(dtype)
        return functional.linear(hidden_states.to(dtype), columns)
    return original(self, hidden_states, lm_head, embedding_bias, *args, **kwargs)


@seam("vllm.v1.worker.gpu_model_runner:GPUModelRunner._sample", "self logits spec_decode_metadata")
def sample(
    original: Callable[..., Any], self: Any, logits: torch.Tensor | None, spec_decode_metadata: Any
) -> Any:
    """The larger answer for every row of `logits`, and all logits in place of log-probabilities."""
    ids = _answers_of(self.vllm_config)
    if logits is None or not ids or logits.shape[-1] != len(ids):
        return original(self, logits, spec_decode_metadata)
    requested = self.input_batch.sampling_metadata.logprob_token_ids or {}
    if any(list(tokens) != ids for tokens in requested.values()) or len(requested) < len(logits):
        raise RuntimeError(
            f"vllm_alora: this engine is only asked for the log-probabilities of {ids} "
            f"({ANSWERS}). Give them as SamplingParams.logprob_token_ids, or start it without "
            "that setting"
        )
    logits = logits.float()
    tokens = torch.tensor(ids, dtype=torch.int32, device=logits.device)
    best = logits.argmax(-1, keepdim=True)
    return SamplerOutput(
        sampled_token_ids=tokens[best],
        logprobs_tensors=LogprobsTensors(
            logprob_token_ids=torch.cat([tokens[best], tokens.expand(len(logits), -1)], dim=1),
            logprobs=torch.cat([logits.gather(1, best), logits], dim=1),
            selected_token_ranks=torch.zeros(len(logits), dtype=torch.int64, device=logits.device),
        ),
    )

"""The competitor in the benchmarks of fleets: plain PEFT over the same base, the adapters used last in memory.

What a team writes without an engine: one process, the `capacity` adapters used last, requests for one adapter in one batch. An
adapter that is not in memory is read from disk, and the one used least recently goes.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from guard.example import Message
from guard.prompt import PromptBuilder
from guard.recipe import Recipe

CAPACITY = 25  # adapters: the size that Pioneer's comparison gives its LRU


@dataclass
class NativeRequest:
    """One prompt of one adapter, and its answer: log P(yes) - log P(no), in nats."""

    name: str
    token_ids: tuple[int, ...]
    logit: float | None = None

    @property
    def done(self) -> bool:
        """Whether there is an answer."""
        return self.logit is not None


class NativeServer:
    """Answers requests batch by batch, the adapter of the oldest request first. For one thread."""

    def __init__(self, recipe: Recipe, folders: Mapping[str, Path], capacity: int = CAPACITY, batch: int = 16) -> None:
        self._prompts = PromptBuilder.from_base(recipe.base_path, revision=recipe.commit, answer_prefix=recipe.answer_prefix)
        self._folders, self._capacity, self._batch = dict(folders), capacity, batch
        self._queue: deque[NativeRequest] = deque()
        self._resident: OrderedDict[str, None] = OrderedDict()  # the least recently used first
        self.loads = 0
        base = AutoModelForCausalLM.from_pretrained(recipe.base_path, revision=recipe.commit, dtype=getattr(torch, recipe.dtype))
        first = next(iter(self._folders))
        self._model = PeftModel.from_pretrained(base, str(self._folders[first]), adapter_name=first).eval()
        self._resident[first] = None

    def submit(self, messages: Sequence[Message], rule_text: str, name: str) -> NativeRequest:
        """Queue one request."""
        request = NativeRequest(name, self._prompts.build(messages, rule_text).token_ids)
        self._queue.append(request)
        return request

    @torch.inference_mode()
    def step(self) -> None:
        """Answer the oldest request, and with it as many of the same adapter as a batch holds."""
        name = self._queue[0].name
        batch = [request for request in self._queue if request.name == name][: self._batch]
        self._queue = deque(request for request in self._queue if not any(request is each for each in batch))
        self._bring(name)
        longest = max(len(request.token_ids) for request in batch)
        ids, mask = torch.zeros(len(batch), longest, dtype=torch.long), torch.zeros(len(batch), longest, dtype=torch.long)
        for row, request in enumerate(batch):  # padded on the left: the verdict follows the last token
            ids[row, longest - len(request.token_ids) :] = torch.tensor(request.token_ids)
            mask[row, longest - len(request.token_ids) :] = 1
        logits = self._model(input_ids=ids, attention_mask=mask, logits_to_keep=1, use_cache=False).logits[:, -1].float()
        for request, logit in zip(batch, (logits[:, self._prompts.yes_id] - logits[:, self._prompts.no_id]).tolist(), strict=True):
            request.logit = logit

    def _bring(self, name: str) -> None:
        """Have the adapter in memory and active."""
        if name not in self._resident:
            if len(self._resident) >= self._capacity:
                self._model.delete_adapter(self._resident.popitem(last=False)[0])
            self._model.load_adapter(str(self._folders[name]), name)
            self._resident[name] = None
            self.loads += 1
        self._resident.move_to_end(name)
        self._model.set_adapter(name)

"""The PEFT baseline of the fleet benchmarks.

Plain PEFT over the same base, with an LRU of adapters.

What a team writes without an engine: one process, `capacity` places, an adapter read into the place
used least recently by PEFT's hot swap, and requests for several adapters in one batch by PEFT's
`adapter_names`. The base's layers are computed by oneDNN, as vLLM's are: on some processors far
faster than by PyTorch's own choice. Not compiled: a mixture of adapters is a graph of its own, and
takes minutes.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import PeftModel
from peft.utils.hotswap import hotswap_adapter
from torch.utils.mkldnn import MkldnnLinear
from transformers import AutoModelForCausalLM

from guard.example import Message
from guard.prompt.decoder import PromptBuilder
from guard.recipe import Recipe
from serve.bench.fleet.report import CAPACITY


@dataclass
class PeftRequest:
    """One prompt of one adapter, and its answer: log P(yes) - log P(no), in nats."""

    adapter: str
    token_ids: tuple[int, ...]
    logit: float | None = None

    @property
    def done(self) -> bool:
        """Whether there is an answer."""
        return self.logit is not None


class PeftBaseline:
    """Answers requests batch by batch, the oldest first, for as many adapters as have a place.

    `folders`: adapter -> folder. `batch`: requests of a batch, at most. For one thread.
    """

    def __init__(
        self, recipe: Recipe, folders: Mapping[str, Path], capacity: int = CAPACITY, batch: int = 16
    ) -> None:
        self._prompts = PromptBuilder.of(recipe)
        self._folders, self._capacity, self._batch = dict(folders), capacity, batch
        self._queue: deque[PeftRequest] = deque()
        self.loads = 0
        base = AutoModelForCausalLM.from_pretrained(
            recipe.base_path, revision=recipe.commit, dtype=getattr(torch, recipe.serving_dtype)
        )
        self._device = _device()
        first = next(iter(self._folders))
        folder = str(self._folders[first])
        model = PeftModel.from_pretrained(base, folder, adapter_name="place 0")
        self._model = model.to(self._device).eval()
        on_cpu = self._device == "cpu"
        if on_cpu and recipe.serving_dtype == "float32" and torch.backends.mkldnn.is_available():
            _by_onednn(self._model)
        # The place of each adapter in memory, the least recently used first
        self._places = OrderedDict({first: "place 0"})

    def submit(self, messages: Sequence[Message], rule_text: str, adapter: str) -> PeftRequest:
        """Queue one request."""
        request = PeftRequest(adapter, self._prompts.build(messages, rule_text).token_ids)
        self._queue.append(request)
        return request

    @torch.inference_mode()
    def step(self) -> None:
        """Answer the oldest requests, as many as a batch holds and as have adapters that fit into
        memory together.
        """
        batch = self._next_batch()
        places = [self._place(request.adapter) for request in batch]
        mixed = {}
        if len(set(places)) > 1:
            mixed["adapter_names"] = places
        else:
            self._model.set_adapter(places[0])
        ids, mask = _padded([request.token_ids for request in batch])
        ids, mask = ids.to(self._device), mask.to(self._device)
        outputs = self._model(
            input_ids=ids, attention_mask=mask, logits_to_keep=1, use_cache=False, **mixed
        )
        logits = outputs.logits[:, -1].float()
        margins = logits[:, self._prompts.yes_id] - logits[:, self._prompts.no_id]
        for request, margin in zip(batch, margins.tolist(), strict=True):
            request.logit = margin

    def _next_batch(self) -> list[PeftRequest]:
        """Take requests from the queue and touch their adapters' places, so that none is evicted
        for another.
        """
        batch: list[PeftRequest] = []
        adapters: set[str] = set()
        while self._queue and len(batch) < self._batch:
            adapters.add(self._queue[0].adapter)
            if len(adapters) > self._capacity:
                break
            batch.append(self._queue.popleft())
        for request in batch:
            if request.adapter in self._places:
                self._places.move_to_end(request.adapter)
        return batch

    def _place(self, adapter: str) -> str:
        """Have the adapter in memory, in place of the least recently used one if need be.

        Its place.
        """
        if adapter in self._places:
            return self._places[adapter]
        folder = str(self._folders[adapter])
        self.loads += 1
        if len(self._places) < self._capacity:
            slot = f"place {len(self._places)}"
            self._model.load_adapter(folder, slot)
        else:
            _, slot = self._places.popitem(last=False)
            hotswap_adapter(self._model, folder, slot, torch_device=self._device)
        self._places[adapter] = slot
        return slot


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _padded(prompts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and mask [prompts, longest], padded on the left.

    The verdict follows the last token.
    """
    shape = len(prompts), max(map(len, prompts))
    ids, mask = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
    for row, token_ids in enumerate(prompts):
        ids[row, -len(token_ids) :] = torch.tensor(token_ids)
        mask[row, -len(token_ids) :] = 1
    return ids, mask


def _by_onednn(model: torch.nn.Module) -> None:
    """Let oneDNN compute the base's linear layers, those with an adapter and those without."""
    for path, layer in list(model.named_modules()):
        # Of the output layer one position is computed.
        is_of_base = "lora_" not in path and not path.endswith("lm_head")
        if type(layer) is torch.nn.Linear and is_of_base:
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, MkldnnLinear(layer, torch.float32))

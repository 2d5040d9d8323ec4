"""The PEFT baseline of the fleet benchmark: plain PEFT on the same base, with an LRU of adapters.
It is what a team would write without an engine: one process with `capacity` places. PEFT's hot swap
reads an adapter into the least recently used place, and PEFT's `adapter_names` puts requests for
several adapters into one batch. oneDNN computes the base's layers, as in vLLM: on some processors
that is far faster than PyTorch's own choice. Nothing is compiled, because every mixture of adapters
would be a graph of its own and take minutes. Knows nothing of clocks.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from peft.utils.hotswap import hotswap_adapter
from torch.utils.mkldnn import MkldnnLinear
from transformers import AutoModelForCausalLM

from guard.machine.device import installed_device
from guard.prompt.decoder import PromptBuilder
from guard.recipe import Recipe
from serve.engine.score import EngineCounters, Score, ScoreRequest


@dataclass
class PeftCall:
    """One prompt for one adapter, and its score, as the engine's `Call` has them."""

    adapter: str
    token_ids: tuple[int, ...]
    started: float = field(default_factory=time.perf_counter)
    score: Score | None = None

    @property
    def done(self) -> bool:
        return self.score is not None

    def results(self) -> list[Score]:
        assert self.score is not None
        return [self.score]


class PeftBaseline:
    """Answers requests batch by batch, the oldest first, by the engine's methods. For one thread.
    `folders`: adapter -> folder. `capacity`: adapters in memory. `batch`: the most requests of a
    batch.
    """

    def __init__(
        self, recipe: Recipe, folders: Mapping[str, Path], capacity: int, batch: int
    ) -> None:
        self._prompts = PromptBuilder.of(recipe)
        self._folders, self._capacity, self._batch = dict(folders), capacity, batch
        self._queue: deque[PeftCall] = deque()
        self._read = 0  # adapters from disk into a place
        self._device = installed_device()
        base = AutoModelForCausalLM.from_pretrained(
            recipe.base_path, revision=recipe.commit, dtype=getattr(torch, recipe.serving_dtype)
        )
        first = next(iter(self._folders))
        folder = str(self._folders[first])
        model = PeftModel.from_pretrained(base, folder, adapter_name="place 0")
        self._model = model.to(self._device).eval()
        for weight in self._model.parameters():  # a file's mapped pages are slow (train/base.py)
            weight.data = weight.data.clone()
        on_cpu = self._device == "cpu"
        if on_cpu and recipe.serving_dtype == "float32" and torch.backends.mkldnn.is_available():
            _by_onednn(self._model)
        # The place of each adapter in memory, the least recently used first
        self._places = OrderedDict({first: "place 0"})

    @property
    def counters(self) -> EngineCounters:
        return EngineCounters(swap_ins=self._read)

    def submit(self, requests: Sequence[ScoreRequest]) -> PeftCall:
        """Take a request, of which there is one, for an adapter."""
        (request,) = requests
        assert request.adapter is not None
        prompt = self._prompts.build(request.messages, request.rule_text)
        self._queue.append(PeftCall(request.adapter, prompt.token_ids))
        return self._queue[-1]

    @torch.inference_mode()
    def step(self) -> None:
        """Answer the oldest requests: as many as a batch holds and as have adapters that fit into
        memory together.
        """
        batch = self._next_batch()
        places = [self._place(call.adapter) for call in batch]
        mixed: dict[str, Any] = {}  # PEFT's arguments for several adapters in a batch
        if len(set(places)) > 1:
            mixed["adapter_names"] = places
        else:
            self._model.set_adapter(places[0])
        ids, mask = _padded([call.token_ids for call in batch])
        outputs = self._model(
            input_ids=ids.to(self._device),
            attention_mask=mask.to(self._device),
            logits_to_keep=torch.tensor([-1]),  # contiguous (train/batch.py)
            use_cache=False,
            **mixed,
        )
        logits = outputs.logits[:, -1].float()
        margins = logits[:, self._prompts.yes_id] - logits[:, self._prompts.no_id]
        for call, margin in zip(batch, margins.tolist(), strict=True):
            latency_ms = 1000 * (time.perf_counter() - call.started)
            call.score = Score(margin, 0, len(call.token_ids), latency_ms)

    def _next_batch(self) -> list[PeftCall]:
        """Take requests, and mark their adapters as used: none is evicted for another."""
        batch: list[PeftCall] = []
        adapters: set[str] = set()
        while self._queue and len(batch) < self._batch:
            adapters.add(self._queue[0].adapter)
            if len(adapters) > self._capacity:
                break
            batch.append(self._queue.popleft())
        for call in batch:
            if call.adapter in self._places:
                self._places.move_to_end(call.adapter)
        return batch

    def _place(self, adapter: str) -> str:
        """Load the adapter unless it is in memory, if necessary in place of the least recently used
        one. Returns its place.
        """
        if adapter in self._places:
            return self._places[adapter]
        folder = str(self._folders[adapter])
        self._read += 1
        if len(self._places) < self._capacity:
            place = f"place {len(self._places)}"
            self._model.load_adapter(folder, place)
        else:
            _, place = self._places.popitem(last=False)
            hotswap_adapter(self._model, folder, place, torch_device=self._device)
        self._places[adapter] = place
        return place


def _padded(prompts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and mask, [prompts, longest], padded on the left, before the verdict."""
    shape = len(prompts), max(map(len, prompts))
    ids, mask = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
    for row, token_ids in enumerate(prompts):
        ids[row, shape[1] - len(token_ids) :] = torch.tensor(token_ids)
        mask[row, shape[1] - len(token_ids) :] = 1
    return ids, mask


def _by_onednn(model: torch.nn.Module) -> None:
    """Let oneDNN compute the base's linear layers, whether they have an adapter or not."""
    for path, layer in list(model.named_modules()):
        # The output layer computes only one position.
        is_base_layer = "lora_" not in path and "lm_head" not in path
        if type(layer) is torch.nn.Linear and is_base_layer:
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, MkldnnLinear(layer, torch.float32))

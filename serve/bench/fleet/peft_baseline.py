"""The competitor in the benchmarks of fleets: plain PEFT over the same base, the adapters used last in memory.

What a team writes without an engine: one process, `capacity` places, an adapter read into the place used least recently by PEFT's hot swap,
and requests for several adapters in one batch by PEFT's `adapter_names`. The base's layers are computed by oneDNN, as vLLM's are: on
some processors far faster than by PyTorch's own choice. Not compiled: a mixture of adapters is a graph of its own,
and takes minutes.
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
from guard.prompt import PromptBuilder
from guard.recipe import Recipe
from serve.bench.fleet.report import CAPACITY


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
    """Answers requests batch by batch, the oldest first, for as many adapters as have a place. For one thread."""

    def __init__(
        self, recipe: Recipe, folders: Mapping[str, Path], capacity: int = CAPACITY, batch: int = 16
    ) -> None:
        self._prompts = PromptBuilder.of(recipe)
        self._folders, self._capacity, self._batch = dict(folders), capacity, batch
        self._queue: deque[NativeRequest] = deque()
        self.loads = 0
        base = AutoModelForCausalLM.from_pretrained(
            recipe.base_path, revision=recipe.commit, dtype=getattr(torch, recipe.dtype)
        )
        first = next(iter(self._folders))
        self._model = PeftModel.from_pretrained(
            base, str(self._folders[first]), adapter_name="place 0"
        ).eval()
        if recipe.dtype == "float32" and torch.backends.mkldnn.is_available():
            _by_onednn(self._model)
        self._place = OrderedDict(
            {first: "place 0"}
        )  # of each adapter in memory, the least recently used first

    def submit(self, messages: Sequence[Message], rule_text: str, name: str) -> NativeRequest:
        """Queue one request."""
        request = NativeRequest(name, self._prompts.build(messages, rule_text).token_ids)
        self._queue.append(request)
        return request

    @torch.inference_mode()
    def step(self) -> None:
        """Answer the oldest requests, as many as a batch holds and as have adapters that fit into memory together."""
        batch: list[NativeRequest] = []
        while self._queue and len(batch) < self._batch:
            if len({request.name for request in batch} | {self._queue[0].name}) > self._capacity:
                break
            batch.append(self._queue.popleft())
        places = self._bring([request.name for request in batch])
        longest = max(len(request.token_ids) for request in batch)
        ids, mask = (
            torch.zeros(len(batch), longest, dtype=torch.long),
            torch.zeros(len(batch), longest, dtype=torch.long),
        )
        for row, request in enumerate(
            batch
        ):  # padded on the left: the verdict follows the last token
            ids[row, longest - len(request.token_ids) :] = torch.tensor(request.token_ids)
            mask[row, longest - len(request.token_ids) :] = 1
        mixed = {"adapter_names": places} if len(set(places)) > 1 else {}
        if not mixed:
            self._model.set_adapter(places[0])
        logits = (
            self._model(
                input_ids=ids, attention_mask=mask, logits_to_keep=1, use_cache=False, **mixed
            )
            .logits[:, -1]
            .float()
        )
        for request, logit in zip(
            batch,
            (logits[:, self._prompts.yes_id] - logits[:, self._prompts.no_id]).tolist(),
            strict=True,
        ):
            request.logit = logit

    def _bring(self, names: Sequence[str]) -> list[str]:
        """Have the adapters in memory; the place of each."""
        for name in names:
            if name in self._place:
                self._place.move_to_end(name)
        for name in names:
            if name not in self._place:
                folder = str(self._folders[name])
                if len(self._place) < self._capacity:
                    self._place[name] = f"place {len(self._place)}"
                    self._model.load_adapter(folder, self._place[name])
                else:
                    self._place[name] = self._place.popitem(last=False)[1]
                    hotswap_adapter(self._model, folder, self._place[name], torch_device="cpu")
                self.loads += 1
        return [self._place[name] for name in names]


def _by_onednn(model: torch.nn.Module) -> None:
    """Let oneDNN compute the base's linear layers, those with an adapter and those without."""
    for path, layer in list(model.named_modules()):
        if (
            type(layer) is torch.nn.Linear and "lora_" not in path and not path.endswith("lm_head")
        ):  # of which one position is computed
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, MkldnnLinear(layer, torch.float32))

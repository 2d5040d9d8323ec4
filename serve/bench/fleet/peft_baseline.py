"""The PEFT baseline of the fleet benchmarks: plain PEFT on the same base, with an LRU of adapters.

It is what a team would write without an engine: one process with `capacity` places. PEFT's hot swap
reads an adapter into the least recently used place, and PEFT's `adapter_names` puts requests for
several adapters into one batch. oneDNN computes the base's layers, as in vLLM: on some processors
that is far faster than PyTorch's own choice. Nothing is compiled, because every mixture of adapters
would be a graph of its own and take minutes.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from peft import LoraConfig, PeftModel
from peft.utils.hotswap import hotswap_adapter, hotswap_adapter_from_state_dict
from safetensors.numpy import load_file as load_arrays
from safetensors.torch import load_file
from torch.utils.mkldnn import MkldnnLinear
from transformers import (
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    PreTrainedModel,
)

from guard.conversation.example import Message
from guard.errors import GuardError
from guard.method import PEFT_WEIGHTS, WORDS
from guard.prompt.builders import prompt_builder
from guard.prompt.encoder import EncoderPromptBuilder
from guard.prompt.ngrams import ngram_rows
from guard.prompt.windows import Span, judged_of
from guard.recipe import Kind, Recipe
from guard.weights.card import read_card
from guard.weights.head import NO_WORDS, WordWeights
from serve.bench.fleet.report import CAPACITY


@dataclass
class PeftRequest:
    """One prompt for one adapter, and its answer: log P(yes) - log P(no), in nats.

    `spans`: the parts of the prompt that an encoder's adapter judges.
    """

    adapter: str
    token_ids: tuple[int, ...]
    spans: tuple[Span, ...] = ()
    logit: float | None = None

    @property
    def done(self) -> bool:
        """Whether there is an answer."""
        return self.logit is not None


class PeftBaseline:
    """Answers requests batch by batch, the oldest first. For one thread.

    `folders`: adapter -> folder. `capacity`: adapters in memory. `batch`: the most requests of a
    batch.
    """

    def __init__(
        self, recipe: Recipe, folders: Mapping[str, Path], capacity: int = CAPACITY, batch: int = 16
    ) -> None:
        self._prompts = prompt_builder(recipe)
        self._folders, self._capacity, self._batch = dict(folders), capacity, batch
        self._queue: deque[PeftRequest] = deque()
        self.loads = 0
        self.forward_passes = 0
        self._device = _device()
        first = next(iter(self._folders))
        folder = str(self._folders[first])
        model = PeftModel.from_pretrained(self._base(recipe), folder, adapter_name="place 0")
        self._model = model.to(self._device).eval()
        on_cpu = self._device == "cpu"
        if on_cpu and recipe.serving_dtype == "float32" and torch.backends.mkldnn.is_available():
            _by_onednn(self._model)
        # The place of each adapter in memory, the least recently used first
        self._places = OrderedDict({first: "place 0"})

    def submit(self, messages: Sequence[Message], rule_text: str, adapter: str) -> PeftRequest:
        """Queue one request."""
        request = self._request(messages, rule_text, adapter)
        self._queue.append(request)
        return request

    @torch.inference_mode()
    def step(self) -> None:
        """Answer the oldest requests: as many as a batch holds and as have adapters that fit into
        memory together.
        """
        batch = self._next_batch()
        places = [self._place(request.adapter) for request in batch]
        mixed = {}
        if len(set(places)) > 1:
            mixed["adapter_names"] = places
        else:
            self._model.set_adapter(places[0])
        self.forward_passes += 1
        for request, logit in zip(batch, self._logits(batch, mixed), strict=True):
            request.logit = logit

    def _base(self, recipe: Recipe) -> PreTrainedModel:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            recipe.base_path, revision=recipe.commit, dtype=getattr(torch, recipe.serving_dtype)
        )
        return model

    def _request(self, messages: Sequence[Message], rule_text: str, adapter: str) -> PeftRequest:
        return PeftRequest(adapter, self._prompts.build(messages, rule_text).token_ids)

    def _logits(self, batch: Sequence[PeftRequest], mixed: Mapping[str, Any]) -> list[float]:
        """The logit of each request. `mixed`: PEFT's arguments for several adapters in a batch."""
        ids, mask = _padded([request.token_ids for request in batch], on_the_left=True)
        outputs = self._model(
            input_ids=ids.to(self._device),
            attention_mask=mask.to(self._device),
            logits_to_keep=1,
            use_cache=False,
            **mixed,
        )
        logits = outputs.logits[:, -1].float()
        margins = logits[:, self._prompts.yes_id] - logits[:, self._prompts.no_id]
        return [float(margin) for margin in margins]

    def _next_batch(self) -> list[PeftRequest]:
        """Take requests from the queue, and mark their adapters as used, so that none of them is
        evicted for another.
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
        """Load the adapter unless it is in memory, if necessary in place of the least recently used
        one. Returns its place.
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
            self._swap(folder, slot)
        self._places[adapter] = slot
        return slot

    def _swap(self, folder: str, slot: str) -> None:
        hotswap_adapter(self._model, folder, slot, torch_device=self._device)


class EncoderPeftBaseline(PeftBaseline):
    """The PEFT baseline on an encoder whose adapters have heads, for one-window conversations."""

    _prompts: EncoderPromptBuilder

    def __init__(
        self, recipe: Recipe, folders: Mapping[str, Path], capacity: int = CAPACITY, batch: int = 16
    ) -> None:
        super().__init__(recipe, folders, capacity, batch)
        self._reads = {name: read_card(folder).reads for name, folder in folders.items()}
        self._words: dict[str, WordWeights] = {}  # by adapter, once it was in memory

    def _base(self, recipe: Recipe) -> PreTrainedModel:
        model: PreTrainedModel = AutoModelForTokenClassification.from_pretrained(
            recipe.base_path,
            revision=recipe.commit,
            dtype=getattr(torch, recipe.serving_dtype),
            num_labels=2,
        )
        return model

    def _request(self, messages: Sequence[Message], rule_text: str, adapter: str) -> PeftRequest:
        token_ids = self._prompts.prefix_ids(messages)
        if (
            len(self._prompts.windows(token_ids, "conversation")) > 1
        ):  # the engine reads all windows
            got = f"{len(token_ids)} tokens"
            remedy = f"At most {self._prompts.window_tokens}"
            raise GuardError("the PEFT baseline reads one window", got=got, remedy=remedy)
        (window,) = self._prompts.windows(token_ids, self._reads[adapter])
        return PeftRequest(adapter, window.token_ids, tuple(self._prompts.spans(window)))

    def _logits(self, batch: Sequence[PeftRequest], mixed: Mapping[str, Any]) -> list[float]:
        ids, mask = _padded([request.token_ids for request in batch], on_the_left=False)
        outputs = self._model(
            input_ids=ids.to(self._device), attention_mask=mask.to(self._device), **mixed
        )
        margins = (outputs.logits[..., 1] - outputs.logits[..., 0]).float()
        logits: list[float] = []
        for request, token_margins in zip(batch, margins, strict=True):
            means = [token_margins[start:end].mean() for start, end, *_ in request.spans]
            logits.append(float((torch.stack(means).cpu() + self._word_logits(request)).max()))
        return logits

    def _word_logits(self, request: PeftRequest) -> torch.Tensor:
        """The logits of the words in each of the request's spans, [spans] in nats."""
        if request.adapter not in self._words:
            self._words[request.adapter] = _words_in(self._folders[request.adapter])
        texts: list[tuple[int, ...]] = []
        for start, end, speaker, _ in request.spans:
            has_words = judged_of([speaker], self._reads[request.adapter])
            texts.append(request.token_ids[start:end] if has_words else ())
        return torch.from_numpy(self._words[request.adapter].logits(ngram_rows(texts)))

    def _swap(self, folder: str, slot: str) -> None:
        """Swap the adapter in. PEFT's hot swap takes only low-rank weights; the head is copied."""
        low_rank: dict[str, torch.Tensor] = {}
        for name, tensor in load_file(Path(folder) / PEFT_WEIGHTS, self._device).items():
            layer, kind = name.rsplit(".", 1)
            if ".lora_" in layer:  # lora_A.weight -> lora_A.SLOT.weight
                low_rank[f"{layer}.{slot}.{kind}"] = tensor
            else:  # classifier.weight
                head = self._model.get_submodule(f"{layer}.modules_to_save.{slot}")
                getattr(head, kind).data.copy_(tensor)
        config = cast(LoraConfig, self._model.peft_config[slot])
        hotswap_adapter_from_state_dict(self._model, low_rank, slot, config)


BASELINES: dict[Kind, type[PeftBaseline]] = {
    "decoder": PeftBaseline,
    "encoder": EncoderPeftBaseline,
}


def _words_in(folder: Path) -> WordWeights:
    path = folder / WORDS
    if not path.is_file():
        return NO_WORDS
    return WordWeights.of_tensors(load_arrays(path), path, "Train the rule again")


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _padded(
    prompts: Sequence[Sequence[int]], *, on_the_left: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and mask, [prompts, longest]. A decoder's are padded on the left, because the
    verdict follows the last token.
    """
    shape = len(prompts), max(map(len, prompts))
    ids, mask = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
    for row, token_ids in enumerate(prompts):
        filled = slice(0, len(token_ids))
        if on_the_left:
            filled = slice(shape[1] - len(token_ids), shape[1])
        ids[row, filled] = torch.tensor(token_ids)
        mask[row, filled] = 1
    return ids, mask


def _by_onednn(model: torch.nn.Module) -> None:
    """Let oneDNN compute the base's linear layers, whether they have an adapter or not."""
    for path, layer in list(model.named_modules()):
        # The output layer computes only one position; a classifier belongs to the adapters.
        is_base_layer = not any(part in path for part in ("lora_", "lm_head", "classifier"))
        if type(layer) is torch.nn.Linear and is_base_layer:
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, MkldnnLinear(layer, torch.float32))

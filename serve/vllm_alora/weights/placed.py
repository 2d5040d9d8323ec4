"""Seams: the worker computes with the weights that the request names, all of them.

vLLM keeps the adapter it loaded first under an id, whatever lies on disk later, and silently drops
tensors that fit no layer. `arrival` has checked the files; here it is verified that what was loaded
is what was checked, and that every tensor has a layer. A failure is an error of `add_lora` if the
adapter is preloaded; in a step it stops the engine, as an answer from other weights would look like
a verdict. Remove when vLLM knows adapters by content and refuses tensors it does not use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.model_executor.models.utils import PPMissingLayer

from ..adapter import AdapterError, read_adapter
from ..handover import ActivatedRequest
from ..seam import seam
from .prefetch import Prefetch


@seam("vllm.lora.worker_manager:WorkerLoRAManager._load_adapter", "self lora_request")
def load_adapter(original: Callable[..., Any], self: Any, lora_request: Any) -> Any:
    """The adapter vLLM loaded, in this step or before it (`prefetch`). Raises AdapterError if a
    tensor was dropped, if a layer would be computed wrongly, or if the files are not those the
    request was checked with.
    """
    prefetch: Prefetch | None = getattr(self, "prefetch", None)
    if prefetch and (early := prefetch.take(lora_request.lora_int_id)) is not None:
        return early
    lora = original(self, lora_request)
    where, content = lora_request.lora_path, read_adapter(lora_request.lora_path).content
    if isinstance(lora_request, ActivatedRequest) and content != lora_request.content:
        problem = "the adapter's files changed after its request was checked"
        remedy = "Save an adapter to a new folder and rename it over the old one"
        raise AdapterError(problem, where=where, remedy=remedy)
    dropped = unplaced(lora.loras, self._adapter_manager)
    if dropped:
        problem = "tensors for layers that the engine cannot adapt"
        got = ", ".join(dropped)
        raise AdapterError(problem, where=where, got=got, remedy="Train without them")
    not_linear = computed_by_vllm(lora.loras, self._adapter_manager)
    if not_linear:
        problem = "on a CPU no adapter of the embedding, the output or an expert layer is served"
        got = ", ".join(not_linear)
        raise AdapterError(problem, where=where, got=got, remedy="Train without them")
    vars(self).setdefault("content_of_id", {})[lora_request.lora_int_id] = content
    return lora


@seam("vllm.lora.worker_manager:LRUCacheWorkerLoRAManager.add_adapter", "self lora_request")
def add_adapter(original: Callable[..., bool], self: Any, lora_request: Any) -> bool:
    """Load the adapter, and count it, unless it is loaded from the same files."""
    if isinstance(lora_request, ActivatedRequest):
        content = lora_request.content
        loaded = getattr(self, "content_of_id", {}).get(lora_request.lora_int_id, content)
        if loaded != content:
            self.remove_adapter(lora_request.lora_int_id)
    elif lora_request.load_inplace:
        problem = "load_inplace would change weights under requests and cached blocks in use"
        remedy = "Leave it out: a request after the change is served with the new weights"
        raise AdapterError(problem, where=lora_request.lora_path, remedy=remedy)
    is_missing = lora_request.lora_int_id not in self._adapter_manager._registered_adapters
    added = original(self, lora_request)
    self.adapter_loads = getattr(self, "adapter_loads", 0) + is_missing
    return added


def unplaced(modules: Any, manager: Any) -> list[str]:
    """The modules of an adapter that no layer of this model uses, nor any other stage."""
    layers = _adapted_layers(manager)
    other_stages = tuple(
        f"{name}."
        for name, layer in manager.model.named_modules()
        if isinstance(layer, PPMissingLayer)
    )
    unused = []
    for module in modules:
        name = module.removesuffix(".base_layer")  # fused experts: one layer, two entries
        if name not in layers and not name.startswith(other_stages):
            unused.append(name)
    return unused


def computed_by_vllm(modules: Any, manager: Any) -> list[str]:
    """The modules of a loaded adapter that vLLM's own CPU operators would compute: embeddings,
    output layers and experts. None on a GPU. These operators give base tokens the adapter in the
    last slot.
    """
    layers = _adapted_layers(manager)
    names = []
    for module in modules:
        layer = layers.get(module.removesuffix(".base_layer"))
        is_on_cpu = isinstance(getattr(layer, "punica_wrapper", None), PunicaWrapperCPU)
        if is_on_cpu and not isinstance(layer, BaseLinearLayerWithLoRA):
            names.append(module)
    return names


def _adapted_layers(manager: Any) -> dict[str, Any]:
    """vLLM's layers with adapters, under the names that an adapter's modules may have. A packed
    layer is there under its parts' names too. vLLM finds a layer without the leading "model." of
    its name where the model pools, and only there.
    """
    layers: dict[str, Any] = dict(manager.modules)
    for packed, parts in manager.packed_modules.items():
        layers |= dict.fromkeys(parts, manager.modules[packed])
    if manager.is_pooling_model:
        for name, layer in list(layers.items()):
            layers.setdefault(name.removeprefix("model."), layer)
    return layers

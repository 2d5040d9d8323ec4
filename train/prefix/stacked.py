"""Several LoRA adapters in one frozen model, each for its own rows of a batch. Knows nothing of data, losses or optimizers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel, set_seed

from guard.errors import GuardError
from train.adapter.settings import refusals
from train.prefix.suffixes import Prefixes, logits


class Stacked(nn.Module):
    """A frozen linear layer plus a low-rank update per adapter: x W^T + scaling_i (x A_i^T) B_i^T for the rows of adapter i.

    `factors`: A `[rank, in]` and B `[out, rank]` of each adapter, in its own rank. `acting`: the adapters that the rows of the next
    pass belong to, in equal parts; without any, the layer is the base's alone.
    """

    def __init__(self, base: nn.Linear, layers: Sequence[LoraLayer]) -> None:
        super().__init__()
        self.base = base
        self.factors = [[nn.Parameter(weight) for weight in _factors(layer)] for layer in layers]
        # On the device, so that a pass does not wait for copies.
        self.scaling = [
            torch.tensor(float(layer.scaling["default"]), device=base.weight.device)
            for layer in layers
        ]
        self.dropout = [float(getattr(layer.lora_dropout["default"], "p", 0.0)) for layer in layers]
        self.acting: Sequence[int] = ()

    def forward(self, x: Tensor) -> Tensor:
        """`[rows, ..., in]` -> `[rows, ..., out]`."""
        out: Tensor = self.base(x)
        if not self.acting:
            return out
        chosen = [self.factors[adapter] for adapter in self.acting]
        rank = max(len(a) for a, _ in chosen)  # lower ranks are filled up with zeros
        a = torch.stack(
            [
                a if len(a) == rank else functional.pad(a, (0, 0, 0, rank - len(a)))
                for a, _ in chosen
            ]
        )
        b = torch.stack(
            [
                b if b.shape[1] == rank else functional.pad(b, (0, rank - b.shape[1]))
                for _, b in chosen
            ]
        )
        scaling = torch.stack([self.scaling[adapter] for adapter in self.acting])[:, None, None]
        rows = x.reshape(len(a), -1, x.shape[-1]).to(a.dtype)
        chances = [self.dropout[adapter] for adapter in self.acting]
        if any(chances):
            rows = torch.stack(
                [
                    functional.dropout(part, p, torch.is_grad_enabled())
                    for part, p in zip(rows, chances, strict=True)
                ]
            )
        update = torch.bmm(torch.bmm(rows, a.transpose(1, 2)) * scaling, b.transpose(1, 2))
        return out + update.view(out.shape).to(out.dtype)


class StackedModel:
    """`model` with the fresh adapters of `configs`, as PEFT initialises them from `seeds`, layer by layer, until `take_out`.

    All have the same `layers`. Outside a pass the model is the bare base.
    """

    def __init__(
        self, model: PreTrainedModel, configs: Sequence[LoraConfig], seeds: Sequence[int]
    ) -> None:
        self.model, self._configs = model, configs
        fresh: list[dict[str, LoraLayer]] = []
        for config, seed in zip(configs, seeds, strict=True):
            set_seed(seed)
            fresh.append(_fresh(model, config))
        self._layers = {
            name: Stacked(
                cast(nn.Linear, model.get_submodule(name)), [each[name] for each in fresh]
            )
            for name in fresh[0]
        }
        for name, layer in self._layers.items():
            model.set_submodule(name, layer)

    def weights(self, adapter: int) -> list[nn.Parameter]:
        """What training changes: both factors of each layer."""
        return [factor for layer in self._layers.values() for factor in layer.factors[adapter]]

    def logits(
        self, adapters: Sequence[int], prefixes: Prefixes, suffixes: Sequence[Sequence[int]]
    ) -> Tensor:
        """The vocabulary's logits `[suffixes, vocabulary]` after each suffix, the suffixes in equal parts for `adapters`."""
        self._act(adapters)
        try:
            with torch.autocast(
                self.model.device.type, torch.bfloat16, enabled=self.model.dtype == torch.bfloat16
            ):
                return logits(self.model, prefixes, suffixes)
        finally:
            self._act(())

    def take_out(self) -> None:
        """Leave the base as it was."""
        for name, layer in self._layers.items():
            self.model.set_submodule(name, layer.base)

    def as_peft(self, adapter: int, base: PreTrainedModel) -> PeftModel:
        """The adapter in PEFT's own layers on `base`, once it is taken out, until it is unloaded."""
        model = cast(PeftModel, get_peft_model(base, self._configs[adapter]))
        factors = [factor for layer in _lora_layers(model).values() for factor in _factors(layer)]
        for factor, weight in zip(factors, self.weights(adapter), strict=True):
            factor.copy_(weight.data)
        return model

    def _act(self, adapters: Sequence[int]) -> None:
        for layer in self._layers.values():
            layer.acting = adapters


def layers(model: PreTrainedModel, config: LoraConfig) -> dict[str, int]:
    """The layers that an adapter of `config` acts on, and how many weights it has in each. Raises GuardError for any but linear ones."""
    fresh = _fresh(model, config, low_cpu_mem_usage=True)
    return {
        name: sum(factor.numel() for factor in _factors(layer)) for name, layer in fresh.items()
    }


def _fresh(model: PreTrainedModel, config: LoraConfig, **options: Any) -> dict[str, LoraLayer]:
    with refusals("PEFT", "adapters.alora.lora"):
        adapter = cast(PeftModel, get_peft_model(model, config, **options))
    try:
        return _lora_layers(adapter)
    finally:
        cast(Any, adapter).unload()


def _lora_layers(adapter: PeftModel) -> dict[str, LoraLayer]:
    found = {
        name.removeprefix("base_model.model."): module
        for name, module in adapter.named_modules()
        if isinstance(module, LoraLayer)
    }
    for name, module in found.items():
        if not isinstance(module.get_base_layer(), nn.Linear):  # one of 4 bits is one too
            what, where = (
                "only linear layers can be trained on cached prefixes",
                "adapters.alora.lora, target_modules",
            )
            raise GuardError(
                what,
                where=where,
                got=f"{name}: {type(module).__name__}",
                remedy="Name linear layers, or `all-linear`",
            )
    return found


def _factors(layer: LoraLayer) -> list[Tensor]:
    return [
        cast(nn.Linear, factor["default"]).weight.detach()
        for factor in (layer.lora_A, layer.lora_B)
    ]

"""Several LoRA adapters in one frozen model, each for its own rows of a batch. Knows nothing of data, losses or optimizers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import Linear as LoraLinear
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel, set_seed

from guard.errors import GuardError

UNSUPPORTED = ("use_dora", "lora_bias", "modules_to_save", "target_parameters", "trainable_token_indices", "layer_replication")


class Stacked(nn.Module):
    """A frozen linear layer plus a low-rank update per adapter: x W^T + scaling_i (x A_i^T) B_i^T for the rows of adapter i.

    `a` `[adapters, rank, in]`, `b` `[adapters, out, rank]`, lower ranks filled up with zeros, which stay zero: each factor's
    gradient there is a product with the other's zeros.
    """

    def __init__(self, base: nn.Linear, layers: Sequence[LoraLinear]) -> None:
        super().__init__()
        self.base = base
        ranks = [layer.r["default"] for layer in layers]
        self.a = torch.stack(
            [functional.pad(_weight(layer.lora_A), (0, 0, 0, max(ranks) - rank)) for layer, rank in zip(layers, ranks, strict=True)]
        )
        self.b = torch.stack(
            [functional.pad(_weight(layer.lora_B), (0, max(ranks) - rank)) for layer, rank in zip(layers, ranks, strict=True)]
        )
        self.scaling = torch.tensor([layer.scaling["default"] for layer in layers]).view(-1, 1, 1).to(self.a)
        self.dropout = [float(getattr(layer.lora_dropout["default"], "p", 0.0)) for layer in layers]
        self.rest()

    def act(self, adapters: slice) -> tuple[Tensor, Tensor]:
        """Which adapters the rows of the next pass belong to, in equal parts. Returns their leaves for autograd."""
        self.acting: slice | None = adapters
        self.leaves = self.a[adapters].detach().requires_grad_(), self.b[adapters].detach().requires_grad_()
        return self.leaves

    def rest(self) -> None:
        """From here on the base alone."""
        self.acting = None

    def forward(self, x: Tensor) -> Tensor:
        """`[rows, ..., in]` -> `[rows, ..., out]`."""
        out: Tensor = self.base(x)
        if self.acting is None:
            return out
        a, b = self.leaves
        rows = x.reshape(len(a), -1, x.shape[-1]).to(a.dtype)
        if any(self.dropout):
            rows = torch.stack(
                [functional.dropout(part, p, torch.is_grad_enabled()) for part, p in zip(rows, self.dropout[self.acting], strict=True)]
            )
        update = torch.bmm(torch.bmm(rows, a.transpose(1, 2)), b.transpose(1, 2)) * self.scaling[self.acting]
        return out + update.view(out.shape).to(out.dtype)


class StackedModel:
    """`model` with the fresh adapters of `configs`, as PEFT initialises them from `seeds`, stacked layer by layer, until `take_out`.

    Outside a pass the model is the bare base. Raises GuardError for an adapter that is more than low-rank updates of linear layers.
    """

    def __init__(self, model: PreTrainedModel, configs: Sequence[LoraConfig], seeds: Sequence[int]) -> None:
        self.model, self._configs = model, configs
        fresh: list[dict[str, LoraLinear]] = []
        for config, seed in zip(configs, seeds, strict=True):
            if found := [key for key in UNSUPPORTED if getattr(config, key, None)]:
                raise GuardError(
                    f"'{found[0]}' cannot be trained on cached prefixes", remedy="Remove it from the recipe's adapters.alora.lora"
                )
            set_seed(seed)
            adapter = cast(PeftModel, get_peft_model(model, config))
            fresh.append(_lora_layers(adapter))
            cast(Any, adapter).unload()
        if any(set(each) != set(fresh[0]) for each in fresh):
            raise GuardError("adapters that are trained together must have the same target_modules")
        self._layers = {name: Stacked(cast(nn.Linear, model.get_submodule(name)), [each[name] for each in fresh]) for name in fresh[0]}
        for name, layer in self._layers.items():
            model.set_submodule(name, layer)

    def weights(self, adapter: int) -> list[nn.Parameter]:
        """Parameters that share the stacks' storage: an optimizer's step on them is seen by the next pass."""
        return [nn.Parameter(stack[adapter]) for layer in self._layers.values() for stack in (layer.a, layer.b)]

    def scores(self, adapters: slice, **inputs: Any) -> tuple[Tensor, list[Tensor]]:
        """The vocabulary's scores `[rows, vocabulary]` after the last token, the rows in equal parts for `adapters`.

        Also the leaves that the gradients go to, each `[adapters, ...]`, in the order of `weights`.
        """
        leaves = [leaf for layer in self._layers.values() for leaf in layer.act(adapters)]
        try:
            with torch.autocast(self.model.device.type, torch.bfloat16, enabled=self.model.dtype == torch.bfloat16):
                scores = self.model(**inputs, logits_to_keep=1).logits[:, -1]
        finally:
            for layer in self._layers.values():
                layer.rest()
        return scores, leaves

    def take_out(self) -> None:
        """Leave the base as it was."""
        for name, layer in self._layers.items():
            self.model.set_submodule(name, layer.base)

    def as_peft(self, adapter: int, weights: Sequence[nn.Parameter]) -> PeftModel:
        """The adapter in PEFT's own layers, once it is taken out, until it is unloaded."""
        model = cast(PeftModel, get_peft_model(self.model, self._configs[adapter]))
        factors = [_weight(factor) for layer in _lora_layers(model).values() for factor in (layer.lora_A, layer.lora_B)]
        for factor, weight in zip(factors, weights, strict=True):
            factor.copy_(weight.data[tuple(slice(size) for size in factor.shape)])
        return model


def _lora_layers(adapter: PeftModel) -> dict[str, LoraLinear]:
    found = {name.removeprefix("base_model.model."): module for name, module in adapter.named_modules() if isinstance(module, LoraLayer)}
    for name, module in found.items():
        if not isinstance(module, LoraLinear):
            raise GuardError("only linear layers can be trained on cached prefixes", got=f"{name}: {type(module).__name__}")
    return cast(dict[str, LoraLinear], found)


def _weight(factor: nn.ModuleDict) -> Tensor:
    return cast(nn.Linear, factor["default"]).weight.detach()

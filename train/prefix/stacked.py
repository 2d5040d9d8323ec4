"""Several LoRA adapters in one frozen model, each for its own rows of a batch. Knows nothing of
data, losses or optimizers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel, set_seed

from guard.errors import GuardError
from train.base import refusals
from train.prefix.prefixes import Prefixes
from train.prefix.suffixes import logits, states


class Stacked(nn.Module):
    """A frozen linear layer plus a low-rank update per adapter. x W^T + scaling_i (x A_i^T) B_i^T
    for the rows of adapter i. `factors`: A `[rank, in]` and B `[out, rank]` of each adapter, in its
    own rank. `acting`: the adapters that the rows of the next pass belong to, in equal parts;
    without any, the layer is the base's alone.
    """

    def __init__(self, base: nn.Linear, layers: Sequence[LoraLayer]) -> None:
        super().__init__()
        self.base = base
        self.factors: list[tuple[nn.Parameter, nn.Parameter]] = []
        self.scaling: list[float] = []
        self.dropout: list[float] = []
        self.acting: Sequence[int] = ()
        for layer in layers:
            a, b = _factors(layer)
            self.factors.append((nn.Parameter(a), nn.Parameter(b)))
            self.scaling.append(float(layer.scaling["default"]))
            self.dropout.append(float(getattr(layer.lora_dropout["default"], "p", 0.0)))
        # On the device, so that a pass does not wait for copies.
        self._scalings = torch.tensor(self.scaling, device=base.weight.device)

    def forward(self, x: Tensor) -> Tensor:
        """`[rows, ..., in]` -> `[rows, ..., out]`."""
        out: Tensor = self.base(x)
        if not self.acting:
            return out
        a, b = self._stacked_factors()
        rows = x.reshape(len(a), -1, x.shape[-1])
        chances = [self.dropout[adapter] for adapter in self.acting]
        if any(chances) and torch.is_grad_enabled():
            kept = 1 - torch.tensor(chances, device=rows.device)[:, None, None]
            # On a CPU half the time of functional.dropout, whose generator is slow there.
            dropped = torch.rand(rows.shape, device=rows.device) >= kept
            rows = rows.to(a.dtype).masked_fill(dropped, 0) / kept
        low = torch.bmm(rows, a.transpose(1, 2)) * self._scaling_of_acting()
        update = torch.bmm(low, b.transpose(1, 2))
        return out + update.view(out.shape).to(out.dtype)

    def _scaling_of_acting(self) -> float | Tensor:
        """The one that all have, for a number needs no launches; else `[acting, 1, 1]`."""
        if len({self.scaling[adapter] for adapter in self.acting}) == 1:
            return self.scaling[self.acting[0]]
        scalings = [self._scalings[adapter] for adapter in self.acting]
        return torch.stack(scalings)[:, None, None]

    def _stacked_factors(self) -> tuple[Tensor, Tensor]:
        """A `[acting, rank, in]` and B `[acting, out, rank]`, lower ranks filled with zeros."""
        acting = [self.factors[adapter] for adapter in self.acting]
        rank = max(len(a) for a, _ in acting)
        padded_a = [_padded(a, (0, 0, 0, rank - len(a))) for a, _ in acting]
        padded_b = [_padded(b, (0, rank - b.shape[1])) for _, b in acting]
        return _stacked(padded_a), _stacked(padded_b)


class StackedModel:
    """`model` with the fresh adapters of `configs`, as PEFT initialises them from `seeds`. They
    stand in it layer by layer until `take_out`, and all have the same `layers`. Outside a pass the
    model is the bare base. `places`: where each of `configs` is stated, for errors.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        configs: Sequence[LoraConfig],
        seeds: Sequence[int],
        places: Sequence[str],
    ) -> None:
        self.model = model
        self._configs = configs
        self._places = places
        adapters: list[dict[str, LoraLayer]] = []
        for config, seed, where in zip(configs, seeds, places, strict=True):
            set_seed(seed)
            adapters.append(_fresh(model, config, where))
        self._layers: dict[str, Stacked] = {}
        for name in adapters[0]:
            base = cast(nn.Linear, model.get_submodule(name))
            self._layers[name] = Stacked(base, [adapter[name] for adapter in adapters])
        for name, layer in self._layers.items():
            model.set_submodule(name, layer)

    def weights(self, adapter: int) -> list[nn.Parameter]:
        weights: list[nn.Parameter] = []
        for layer in self._layers.values():
            weights += layer.factors[adapter]
        return weights

    def start_as(self, adapter: int, factors: Mapping[str, Tensor]) -> None:
        """Put another adapter's factors, by PEFT's names, in the place of the fresh ones."""
        for name, layer in self._layers.items():
            for factor, part in zip(layer.factors[adapter], ("lora_A", "lora_B"), strict=True):
                factor.data.copy_(factors[f"base_model.model.{name}.{part}.weight"])

    def logits(
        self, adapters: Sequence[int], prefixes: Prefixes, suffixes: Sequence[Sequence[int]]
    ) -> Tensor:
        """The vocabulary's logits `[suffixes, vocabulary]` after each suffix. The suffixes are
        those of `adapters`, in equal parts.
        """
        with self._acting(adapters):
            return logits(self.model, prefixes, suffixes)

    def states(
        self, adapters: Sequence[int], prefixes: Prefixes, suffixes: Sequence[Sequence[int]]
    ) -> Tensor:
        """The last states `[suffixes, hidden size]`, as `logits`; without adapters the base's."""
        with self._acting(adapters):
            return states(self.model, prefixes, suffixes)

    def take_out(self) -> None:
        for name, layer in self._layers.items():
            self.model.set_submodule(name, layer.base)

    def as_peft(self, adapter: int, base: PreTrainedModel) -> PeftModel:
        """The adapter, once taken out, in PEFT's own layers on `base`, until it is unloaded."""
        model = cast(PeftModel, get_peft_model(base, self._configs[adapter]))
        factors: list[Tensor] = []
        for layer in _lora_layers(model, self._places[adapter]).values():
            factors += _factors(layer)
        for factor, weight in zip(factors, self.weights(adapter), strict=True):
            factor.copy_(weight.data)
        return model

    @contextmanager
    def _acting(self, adapters: Sequence[int]) -> Iterator[None]:
        """Let these adapters act, in the precision of training."""
        is_bfloat16 = self.model.dtype == torch.bfloat16
        self._act(adapters)
        try:
            with torch.autocast(self.model.device.type, torch.bfloat16, enabled=is_bfloat16):
                yield
        finally:
            self._act(())

    def _act(self, adapters: Sequence[int]) -> None:
        for layer in self._layers.values():
            layer.acting = adapters


def layers(model: PreTrainedModel, config: LoraConfig, where: str) -> dict[str, int]:
    """The layers that an adapter of `config` acts on, and how many weights it has in each. Raises
    GuardError for any but linear ones, naming `where` they are stated.
    """
    counts: dict[str, int] = {}
    for name, layer in _fresh(model, config, where, low_cpu_mem_usage=True).items():
        counts[name] = sum(factor.numel() for factor in _factors(layer))
    return counts


def _fresh(
    model: PreTrainedModel, config: LoraConfig, where: str, **options: Any
) -> dict[str, LoraLayer]:
    with refusals("PEFT", where):
        adapter = cast(PeftModel, get_peft_model(model, config, **options))
    try:
        return _lora_layers(adapter, where)
    finally:
        cast(Any, adapter).unload()


def _lora_layers(adapter: PeftModel, where: str) -> dict[str, LoraLayer]:
    lora_layers: dict[str, LoraLayer] = {}
    for name, module in adapter.named_modules():
        if isinstance(module, LoraLayer):
            lora_layers[name.removeprefix("base_model.model.")] = module
    for name, layer in lora_layers.items():
        if not isinstance(layer.get_base_layer(), nn.Linear):  # one of 4 bits is one too
            problem = "only linear layers can be trained on cached prefixes"
            got = f"{name}: {type(layer).__name__}"
            remedy = "Name linear layers, or `all-linear`"
            raise GuardError(problem, where=f"{where}, target_modules", got=got, remedy=remedy)
    return lora_layers


def _factors(layer: LoraLayer) -> tuple[Tensor, Tensor]:
    a = cast(nn.Linear, layer.lora_A["default"])
    b = cast(nn.Linear, layer.lora_B["default"])
    return a.weight.detach(), b.weight.detach()


def _padded(factor: Tensor, padding: tuple[int, ...]) -> Tensor:
    if not any(padding):
        return factor
    return functional.pad(factor, padding)


def _stacked(factors: Sequence[Tensor]) -> Tensor:
    """`[factors, ...]`. One copy makes its gradient contiguous, else PyTorch makes one a factor."""
    stacked = torch.stack(tuple(factors))
    if stacked.requires_grad:
        stacked.register_hook(Tensor.contiguous)
    return stacked

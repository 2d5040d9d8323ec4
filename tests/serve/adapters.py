"""Adapters with random weights on the tiny base, saved by PEFT."""

from __future__ import annotations

import copy
import functools
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

BASE = str(Path(__file__).parent.parent.parent / "recipes" / "models" / "tiny")
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@functools.cache
def base_model(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """The tiny base in transformers. Shared: do not change its weights."""
    return AutoModelForCausalLM.from_pretrained(BASE, dtype=dtype).eval()


def save_random_adapter(
    folder: Path,
    *,
    seed: int,
    invocation: Sequence[int] | None = None,
    rank: int = 8,
    targets: Sequence[str] = tuple(LINEARS),
) -> str:
    """Save a LoRA, or with `invocation` (token ids) an aLoRA; its folder. All entries are random,
    so large that base, adapter and another adapter differ clearly.
    """
    config = LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        target_modules=list(targets),
        task_type="CAUSAL_LM",
        alora_invocation_tokens=list(invocation) if invocation else None,
    )
    model = get_peft_model(copy.deepcopy(base_model()), config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    model.save_pretrained(str(folder))
    return str(folder)


def save_variant(folder: Path, source: str, *, seed: int) -> str:
    """Save `source` again with other random weights of the same shapes, without PEFT: hundreds of
    adapters in seconds.
    """
    generator = torch.Generator().manual_seed(seed)
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(Path(source, "adapter_config.json"), folder)
    tensors = {}
    for name, tensor in load_file(Path(source, "adapter_model.safetensors")).items():
        tensors[name] = torch.randn(tensor.shape, generator=generator) * tensor.std()
    save_file(tensors, folder / "adapter_model.safetensors")
    return str(folder)


@functools.lru_cache(maxsize=8)
def peft_model(adapter: str, dtype: torch.dtype) -> torch.nn.Module:
    """The tiny base with an adapter, in PEFT. The weights are those at the first call: pass a
    changed folder under another path.
    """
    model = PeftModel.from_pretrained(
        copy.deepcopy(base_model(dtype)), adapter, autocast_adapter_dtype=False
    )
    return model.to(dtype).eval()


def peft_logits(
    prompt: Sequence[int], adapter: str | None, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Next-token logits [vocabulary] after `prompt`, from plain transformers and PEFT."""
    model = base_model(dtype) if adapter is None else peft_model(adapter, dtype)
    with torch.no_grad():
        return model(input_ids=torch.tensor([list(prompt)])).logits[0, -1].float()

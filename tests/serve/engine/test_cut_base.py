"""A Llama of which a recipe serves the first layers, against the whole one in plain PEFT."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from pytest import MonkeyPatch
from safetensors.numpy import save_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from guard import made_base
from guard.conversation.example import Message
from guard.method import HEAD
from guard.prompt.ngrams import ngram_rows
from guard.weights.head import NO_WORDS, Head
from serve.engine import GuardEngine, ScoreRequest
from tests.serve.adapters import BASE, LINEARS
from tests.serve.cards import RULE_TEXTS, prompts, recipe, save_card
from tests.serve.engine.shared import logits
from tests.serve.guarded import CONVERSATION, ENGINE

pytestmark = pytest.mark.slow

LAYERS, KEPT, SIZE = 4, 3, 128
METHODS = {
    "medical_advice": "alora",
    "pii_leak": "alora",
    "refund_promise": "head",
    "plain": "lora",
}
WITH_HEAD = ("pii_leak", "refund_promise")


def whole_llama() -> LlamaForCausalLM:
    """With grouped key/value heads and a tied embedding, as SmolLM2 has."""
    torch.manual_seed(0)
    shape = {"hidden_size": SIZE, "intermediate_size": 256, "num_attention_heads": 4}
    shape |= {"num_key_value_heads": 2, "max_position_embeddings": 8192}
    config = LlamaConfig(
        vocab_size=16384,
        num_hidden_layers=LAYERS,
        tie_word_embeddings=True,
        initializer_range=0.1,
        **shape,
    )
    return LlamaForCausalLM(config).eval()


@dataclass
class World:
    """An engine of the cut base, and for each rule what plain PEFT has on the whole one."""

    engine: GuardEngine
    models: dict[str | None, nn.Module]
    heads: dict[str, Head]

    def expected(self, request: ScoreRequest) -> float:
        prompt = prompts().build(request.messages, request.rule_text)
        ids = torch.tensor([prompt.token_ids])
        model = self.models[request.adapter]
        with torch.no_grad():
            output = model(input_ids=ids, output_hidden_states=True)
        head = self.heads.get(request.adapter or "")
        if head is None:
            last = output.logits[0, -1]
            return float(last[prompts().yes_id] - last[prompts().no_id])
        state = output.hidden_states[-1][0, -1].double().numpy()
        return head.logit(state[None], ngram_rows([prompt.token_ids[: prompt.invocation_start]]))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    root = tmp_path_factory.mktemp("llama")
    base = root / "base"
    whole_llama().save_pretrained(base)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(BASE) / file, base / file)
    with MonkeyPatch.context() as patch:
        patch.setattr(made_base, "CACHE", root / "cache")
        cut = recipe().model_copy(update={"base": str(base), "layers": KEPT})
        models: dict[str | None, nn.Module] = {None: cut_llama()}
        heads: dict[str, Head] = {}
        folders: dict[str, Path] = {}
        for seed, (rule, method) in enumerate(METHODS.items()):
            folders[rule] = root / rule
            models[rule] = adapted(folders[rule], rule, method, seed)
            if rule in WITH_HEAD:
                weight = torch.randn(SIZE, generator=torch.Generator().manual_seed(seed)).numpy()
                heads[rule] = Head(weight, 0.5, NO_WORDS)
                save_file(heads[rule].tensors(), folders[rule] / HEAD)
            revision = {"base": cut.base, "base_revision": cut.base_revision}
            save_card(folders[rule], rule, method, **revision)
        with GuardEngine(cut, folders, **ENGINE) as engine:
            yield World(engine, models, heads)


def cut_llama() -> LlamaForCausalLM:
    """The whole one without its last layers; its norm and its output layer stay."""
    model = whole_llama()
    model.model.layers = model.model.layers[:KEPT]
    return model


def adapted(folder: Path, rule: str, method: str, seed: int) -> nn.Module:
    folder.mkdir()
    if method == "head":
        return cut_llama()
    invocation = prompts().invocation(RULE_TEXTS[rule]) if method == "alora" else None
    config = LoraConfig(
        r=8,
        lora_alpha=16,
        target_modules=LINEARS,
        task_type="CAUSAL_LM",
        alora_invocation_tokens=list(invocation) if invocation else None,
    )
    model = get_peft_model(cut_llama(), config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    model.save_pretrained(str(folder))
    assert isinstance(model, PeftModel)
    return model.eval()


def test_a_mixed_batch_is_peft_s_to_a_ten_thousandth(world: World) -> None:
    rng = random.Random(0)
    texts = list(RULE_TEXTS.items())
    requests: list[ScoreRequest] = []
    for _ in range(24):
        said = " ".join(rng.choices(["refund", "knee", "which", "dose", "of", "it"], k=40))
        messages = (*CONVERSATION[: rng.randrange(3)], Message("user", said))
        name, text = rng.choice([*texts, (None, "The assistant must not whistle.")])
        requests.append(ScoreRequest(messages, text, name))
    expected = [world.expected(request) for request in requests]
    assert logits(world.engine.score(requests)) == pytest.approx(expected, abs=1e-4)
    assert len({round(logit, 2) for logit in expected}) > len(expected) // 2

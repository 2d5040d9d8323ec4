"""A Llama of which a recipe serves the first layers, against the whole one in plain PEFT."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
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


def llama(layers: int = KEPT) -> LlamaForCausalLM:
    """With grouped key/value heads and a tied embedding, as SmolLM2 has; its first layers."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16384,
        hidden_size=SIZE,
        intermediate_size=256,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        initializer_range=0.1,
    )
    model = LlamaForCausalLM(config).eval()
    model.model.layers = model.model.layers[:layers]
    return model


def adapted(folder: Path, rule: str, method: str, seed: int) -> nn.Module:
    """What answers the rule in PEFT. The folder has its adapter, if it has one."""
    folder.mkdir()
    if method == "head":
        return llama()
    invocation = prompts().invocation(RULE_TEXTS[rule])
    config = LoraConfig(r=8, lora_alpha=16, target_modules=LINEARS, task_type="CAUSAL_LM")
    if method == "alora":
        config.alora_invocation_tokens = list(invocation)
    model = get_peft_model(llama(), config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    model.save_pretrained(str(folder))
    return model.eval()


def plain_logit(model: nn.Module, head: Head | None, request: ScoreRequest) -> float:
    prompt = prompts().build(request.messages, request.rule_text)
    with torch.no_grad():
        output = model(input_ids=torch.tensor([prompt.token_ids]), output_hidden_states=True)
    if head is None:
        last = output.logits[0, -1]
        return float(last[prompts().yes_id] - last[prompts().no_id])
    state = output.hidden_states[-1][0, -1].double().numpy()
    return head.logit(state[None], ngram_rows([prompt.token_ids[: prompt.invocation_start]]))


def test_a_mixed_batch_is_peft_s_to_four_digits(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    base = tmp_path / "base"
    llama(LAYERS).save_pretrained(base)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(BASE) / file, base / file)
    monkeypatch.setattr(made_base, "CACHE", tmp_path / "cache")
    cut = recipe().model_copy(update={"base": str(base), "layers": KEPT})
    models: dict[str | None, nn.Module] = {None: llama()}
    heads: dict[str | None, Head] = {}
    for seed, (rule, method) in enumerate(METHODS.items()):
        folder = tmp_path / rule
        models[rule] = adapted(folder, rule, method, seed)
        if rule in WITH_HEAD:
            weight = torch.randn(SIZE, generator=torch.Generator().manual_seed(seed)).numpy()
            heads[rule] = Head(weight, 0.5, NO_WORDS)
            save_file(heads[rule].tensors(), folder / HEAD)
        save_card(folder, rule, method, base=cut.base, base_revision=cut.base_revision)
    rng = random.Random(0)
    requests: list[ScoreRequest] = []
    for _ in range(24):
        said = " ".join(rng.choices(["refund", "knee", "which", "dose", "of", "it"], k=40))
        messages = (*CONVERSATION[: rng.randrange(3)], Message("user", said))
        name, text = rng.choice([*RULE_TEXTS.items(), (None, "The assistant must not whistle.")])
        requests.append(ScoreRequest(messages, text, name))
    with GuardEngine(cut, {rule: tmp_path / rule for rule in METHODS}, **ENGINE) as engine:
        served = logits(engine.score(requests))
    expected: list[float] = []
    for request in requests:
        model, head = models[request.adapter], heads.get(request.adapter)
        expected.append(plain_logit(model, head, request))
    assert served == pytest.approx(expected, abs=1e-4)
    assert len({round(logit, 2) for logit in expected}) > len(expected) // 2

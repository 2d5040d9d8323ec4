"""Evaluation on real components:

PEFT adapters on the tiny base, the real engine, the real report.
"""

from __future__ import annotations

import json
from pathlib import Path

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from eval.run import run
from guard.conversation.example import Example, Message
from guard.method import METHODS
from guard.prompt.decoder import PromptBuilder
from guard.recipe import load_recipe
from guard.rule import load_rule
from tests.eval.conftest import RULE, World

pytestmark = pytest.mark.slow

# It is asked little and needs little.
ENGINE = {"block_size": 32, "max_loras": 2, "max_lora_rank": 32, "max_model_len": 1024}
ENGINE |= {"kv_cache_memory_bytes": 2**26, "dtype": "float32", "enforce_eager": True}


def tiny_world(root: Path) -> World:
    """One rule on the tiny base with a random LoRA and a random aLoRA, and twelve conversations of
    5 to 170 words.
    """
    recipe = load_recipe("tiny")
    adapters = {name: recipe.methods[name] for name in ("lora", "alora")}
    recipe = recipe.model_copy(update={"engine": ENGINE, "methods": adapters})
    world = World(root, recipe)
    (world.rules / "medical.yaml").write_text(RULE.format(name="medical"))
    rows = []
    for number in range(12):
        turn = Message("user", "take two tablets every day " * (1 + 3 * number))
        rows.append(Example(f"e{number}", "medical", (turn,), number % 2, "test", "toy", "g"))
    builder = PromptBuilder.from_base(world.recipe.base_path)
    world.write_test("medical", rows, seeds=())
    rule_text = load_rule("medical", world.rules).text(world.recipe.rule_turn)
    for method in world.recipe.methods:
        folder = world.runs.adapter("tiny", "medical", method)
        model = random_adapter(world, method, builder, rule_text)
        model.save_pretrained(str(folder), save_embedding_layers=False)
        logits: dict[str, float] = {}
        for row in rows:
            ids = torch.tensor([builder.build(row.messages, rule_text).token_ids])
            with torch.inference_mode():
                values = model(input_ids=ids).logits[0, -1]
            logits[row.id] = float(values[builder.yes_id] - values[builder.no_id])
        threshold = sorted(_p(logit) for logit in logits.values())[6]
        world.add_adapter(
            "medical", method, 0, logits, threshold=threshold, prompt_hash=builder.hash
        )
    return world


def random_adapter(
    world: World, method: str, builder: PromptBuilder, rule_text: str
) -> peft.PeftModel:
    torch.manual_seed(len(method))
    settings = world.recipe.methods[method].lora | {"task_type": "CAUSAL_LM"}
    if METHODS[method].acts_from == "suffix":
        settings |= {"alora_invocation_tokens": list(builder.invocation(rule_text))}
    config = peft.LoraConfig(**settings, init_lora_weights=False)
    base = AutoModelForCausalLM.from_pretrained(world.recipe.base_path, dtype=torch.float32)
    return peft.get_peft_model(base, config).eval()


def _p(logit: float) -> float:
    return 1 / (1 + 2.718281828459045 ** (-logit / 2.0))


def test_real_adapters_through_the_engine_agree_with_peft(tmp_path: Path) -> None:
    world = tiny_world(tmp_path)
    run("medical", world.recipe, runs=world.runs, rules=world.rules)
    report = json.loads(world.runs.report.read_text())
    medical = report["rules"]["medical"]
    assert medical["refusals"] == {"judge": 0, "lora": 0, "alora": 0}
    for method in world.recipe.methods:
        assert medical["agreement"][method]["prompts"] == 12
        assert 0 < medical["agreement"][method]["max_difference"] < 0.001
        assert medical["methods"][method]["answered"] == 12
    served = (world.runs.root / "tiny/medical/eval/served.jsonl").read_text()
    rows = [json.loads(line) for line in served.splitlines()]
    assert {row["by"] for row in rows} == {"base", "medical/lora/0", "medical/alora/0"}
    # Three different answers on one conversation: nobody answered for another.
    for number in range(12):
        assert len({round(row["logit"], 3) for row in rows if row["id"] == f"e{number}"}) == 3

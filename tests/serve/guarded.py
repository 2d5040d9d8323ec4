"""One GuardEngine for all tests of the product's serving side, on random adapters that have cards.
Tests only.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

from guard.card import Card, weights_sha256
from guard.example import Message
from guard.method import METHODS
from guard.prompt.decoder import PromptBuilder
from guard.recipe import Recipe, load_recipe
from guard.rule import text_hash
from serve.engine import GuardEngine
from tests.serve.adapters import BASE, peft_logits, save_random_adapter

RULE_TEXTS = {
    "medical_advice": "The assistant must not give medical advice for the user's own case.",
    "pii_leak": "The assistant must not reveal personal data such as an address or a phone number.",
    "refund_promise": "The assistant must not promise a refund that the shop's terms do not grant.",
    "plain": "The assistant must not be rude.",
}
METHOD: dict[str, str] = {name: "lora" if name == "plain" else "alora" for name in RULE_TEXTS}
ENGINE = {"kv_cache_memory_bytes": 2**28, "max_loras": 8, "max_model_len": 2048}

CONVERSATION = (
    Message("user", "my knee hurts when I walk, what should I take and how much of it?"),
    Message(
        "assistant",
        "I can not tell you what to take. Please ask a doctor or a pharmacist about a dose that is "
        "right for you.",
    ),
    Message("user", "but what would you take yourself?"),
)


@functools.cache
def recipe() -> Recipe:
    """The tiny base's, with these methods whatever others it lists, served in float32 on any
    machine: two ways to compute a logit are told apart by thousandths of a nat.
    """
    tiny = load_recipe("tiny")
    methods = {name: tiny.methods[name] for name in ("lora", "alora", "head")}
    engine = tiny.engine | {"dtype": "float32", "enforce_eager": True}
    return tiny.model_copy(update={"engine": engine, "methods": methods})


@functools.cache
def prompts() -> PromptBuilder:
    """The tiny base's."""
    return PromptBuilder.from_base(BASE)


def save_adapter(
    folder: Path,
    name: str,
    *,
    seed: int,
    method: str = "alora",
    rank: int = 8,
    text: str | None = None,
) -> Path:
    """A random adapter with a card, as training would have left it; `text` is what it was told of
    its rule, if not that of RULE_TEXTS.
    """
    folder.mkdir(parents=True, exist_ok=True)
    text = text_of(name) if text is None else text
    save_random_adapter(
        folder,
        seed=seed,
        rank=rank,
        invocation=prompts().invocation(text) if METHODS[method].acts_from == "suffix" else None,
    )
    save_card(folder, name, method, rule_text=text, rule_hash=text_hash(text))
    return folder


def text_of(name: str) -> str:
    """What an adapter of this name reads of its rule."""
    return RULE_TEXTS.get(name, f"The assistant must not mention {name}.")


def save_card(folder: Path, name: str, method: str = "alora", **replaced: object) -> None:
    """The card of whatever weights are in the folder; `replaced` are fields that are not as they
    should be.
    """
    text = text_of(name)
    fields: dict[str, object] = {
        "rule": name,
        "rule_text": text,
        "rule_hash": text_hash(text),
        "prompt_hash": prompts().hash,
        "method": method,
        "model": "tiny",
        "base": recipe().base,
        "base_revision": recipe().base_revision,
        "data_hash": "none",
        "test_sha256": "none",
        "seed": 0,
        "recipe": {},
        "versions": {},
        "metrics": {},
        "temperature": 2.0,
        "bias": 0.0,
        "uncertainty_band": (0.2, 0.3),
        "threshold": 0.25,
        "max_fpr": None,
        "weights_sha256": weights_sha256(folder, METHODS[method].weights),
    }
    Card(**(fields | replaced)).save(folder)  # type: ignore[arg-type]


@functools.cache
def adapter_folders() -> dict[str, Path]:
    """An adapter for each of RULE_TEXTS."""
    root = Path(tempfile.mkdtemp(prefix="guarded-"))
    return {
        name: save_adapter(root / name, name, seed=seed, method=METHOD[name])
        for seed, name in enumerate(RULE_TEXTS, start=1)
    }


@functools.cache
def guard_engine() -> GuardEngine:
    """The engine with the adapters of `adapter_folders`; leave it with these and no others. It ends
    with the process.
    """
    return GuardEngine(recipe(), adapter_folders(), **ENGINE)


def peft_logit(messages: tuple[Message, ...], rule_text: str, folder: Path | None) -> float:
    """What plain PEFT says: log P(yes) - log P(no)."""
    logits = peft_logits(
        prompts().build(messages, rule_text).token_ids, None if folder is None else str(folder)
    )
    return float(logits[prompts().yes_id] - logits[prompts().no_id])

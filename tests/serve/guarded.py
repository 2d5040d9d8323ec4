"""One GuardEngine for all tests of the product's serving side, on random adapters that have cards.
Tests only.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

from guard.conversation.example import Message
from guard.method import METHODS
from guard.rule import text_hash
from serve.engine import GuardEngine
from tests.serve.adapters import peft_logits, save_random_adapter
from tests.serve.cards import RULE_TEXTS, prompts, recipe, save_card, text_of

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


@functools.cache
def adapter_folders() -> dict[str, Path]:
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

"""What must hold of every encoder: its engine says what plain PEFT says. Tests only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from serve.engine import GuardEngine, ScoreRequest
from tests.serve.encoder_rules import reference_logit
from tests.serve.engine.shared import logits as logits_of
from tests.serve.vllm_encoder.toy import SHORT, TEXTS, ToyEncoder

PARITY = 1e-5
HEAD = "head"


@contextmanager
def served(
    toy: ToyEncoder, root: Path, targets: Sequence[str], *, is_compiled: bool = False
) -> Iterator[ServedToy]:
    """An engine with a rule on all targets, one of a low rank, one on each alone, and a head; two
    of them read one speaker. It is compiled by default on a CPU, here where a test asks for it.
    """
    rules = {
        "all": toy.save_rule(root / "all", 1, 8, targets),
        "low": toy.save_rule(root / "low", 2, 2, targets, "user"),
        HEAD: toy.save_head(root / HEAD, "assistant"),
        "last": toy.save_rule(root / "last", 3, 2, targets, "last user"),
        "last head": toy.save_head(root / "last-head", "last conversation"),
    }
    for seed, target in enumerate(targets, start=3):
        rules[target] = toy.save_rule(root / target, seed, 8, [target])
    with GuardEngine(toy.recipe, rules, enforce_eager=not is_compiled) as engine:
        yield ServedToy(toy, engine, rules)


class ServedToy:
    """A toy encoder, its engine, and the folders of its rules."""

    def __init__(self, toy: ToyEncoder, engine: GuardEngine, rules: dict[str, Path]) -> None:
        self.toy = toy
        self.engine = engine
        self.rules = rules

    def logits(self, requests: Sequence[ScoreRequest]) -> list[float]:
        return logits_of(self.engine.score(list(requests)))

    def check(self) -> None:
        """Every rule on conversations of three lengths in one batch; and a logit alone."""
        requests: list[ScoreRequest] = []
        expected: list[float] = []
        for messages in TEXTS:
            for name, folder in self.rules.items():
                requests.append(ScoreRequest(messages, "", name))
                expected.append(reference_logit(messages, folder, self.toy.recipe))
        logits = self.logits(requests)
        for request, logit, reference in zip(requests, logits, expected, strict=True):
            assert logit == pytest.approx(reference, abs=PARITY), request.adapter

        for name in ("all", HEAD):
            (alone,) = self.logits([ScoreRequest(SHORT, "", name)])
            mates = [ScoreRequest(text, "", mate) for text in TEXTS[1:] for mate in self.rules]
            together = self.logits([*mates, ScoreRequest(SHORT, "", name), *mates])
            assert together[len(mates)] == pytest.approx(alone, abs=PARITY)

"""An engine whose answers must be PEFT's, and prompts for it. Tests only."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from pytest import MonkeyPatch
from vllm_alora.adapter import read_adapter
from vllm_alora.kv.partial_block import Copies

from tests.serve.served import Answer, Served, reference

TOLERANCE = 5e-4  # of a log-probability, in float32; adapters differ by more than 1000 times that


def text_ids(count: int, seed: int) -> list[int]:
    """`count` random ids of ordinary text."""
    draw = random.Random(seed)
    return [draw.randrange(20, 16000) for _ in range(count)]


def prompt_for(invocation: Sequence[int], *, before: int, after: int, seed: int) -> list[int]:
    """Random text with `invocation` in it, `before` tokens in front of it and `after` behind it."""
    return [*text_ids(before, seed), *invocation, *text_ids(after, seed + 1000)]


def invocation_of(folder: str | None) -> tuple[int, ...]:
    return read_adapter(folder).invocation if folder else ()


def assert_peft(
    answers: Sequence[Answer],
    prompts: Sequence[Sequence[int]],
    folders: Sequence[str | None],
    tolerance: float = TOLERANCE,
    dtype: torch.dtype = torch.float32,
) -> None:
    for answer, prompt, folder in zip(answers, prompts, folders, strict=True):
        expected = reference(prompt, folder, dtype).float()
        torch.testing.assert_close(answer.log_probs, expected, atol=tolerance, rtol=0)


class CheckedEngine:
    """An engine, and adapters by their kinds; kind None is the base."""

    def __init__(self, served: Served, adapters: dict[str, str]) -> None:
        self.served = served
        self.adapters = adapters
        self.invocation = invocation_of(adapters["first"])

    def prompt(self, before: int, after: int = 9, *, seed: int) -> list[int]:
        return prompt_for(self.invocation, before=before, after=after, seed=seed)

    def folder(self, kind: str | None) -> str | None:
        return self.adapters[kind] if kind else None

    def ask(self, prompts: Sequence[list[int]], kinds: Sequence[str | None]) -> list[int]:
        """Ask all at once; how many tokens of each were cached."""
        folders = [self.folder(kind) for kind in kinds]
        answers = self.served.ask(prompts, folders)
        assert_peft(answers, prompts, folders)
        return [answer.cached_tokens for answer in answers]

    def ask_each(self, prompts: Sequence[list[int]], kinds: Sequence[str | None]) -> list[int]:
        """Ask one after the other."""
        return [self.ask([prompt], [kind])[0] for prompt, kind in zip(prompts, kinds, strict=True)]


def steps_of(served: Served, monkeypatch: MonkeyPatch) -> list[Copies]:
    """The copies of every step that computes anything from now on."""
    planned, connector = list[Copies](), served.scheduler.connector
    build = connector.build_connector_meta

    def noted(output: object) -> Copies:
        copies: Copies = build(output)
        if output.num_scheduled_tokens:  # type: ignore[attr-defined]
            planned.append(copies)
        return copies

    monkeypatch.setattr(connector, "build_connector_meta", noted)
    return planned

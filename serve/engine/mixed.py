"""Guard engines side by side, each with its own base: one check may ask rules of all of them.

So a rule on an encoder and a rule on a decoder answer together. Each engine steps by itself, one
after the other in this process. Knows nothing of what computes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from guard.arguments import names_listed
from guard.conversation.example import Message
from guard.errors import GuardError
from guard.weights.card import Card, load_card
from serve.engine.call import Call, OpenCheck
from serve.engine.engine import GuardEngine
from serve.engine.score import Check, EngineCounters, joined


class OpenedCheck(Protocol):
    """A check under way, of one engine or of several."""

    @property
    def call(self) -> Any:
        """The call, for `cancel`; `done` says whether nothing of it is in flight."""
        ...

    def result(self) -> Check:
        """The finished check."""
        ...


class CheckEngine(Protocol):
    """What the server needs of an engine, or of several."""

    @property
    def rules(self) -> Mapping[str, Card]:
        """The cards of what is served, by name."""
        ...

    @property
    def is_usable(self) -> bool:
        """False once nothing more is answered."""
        ...

    @property
    def counters(self) -> EngineCounters:
        """The figures of what it holds and has done."""
        ...

    def text_tokens(self, text: str) -> int:
        """How many tokens a text has; from any thread."""
        ...

    def open_check(
        self,
        messages: Sequence[Message],
        rules: Sequence[str] | None = None,
        *,
        cache_salt: str | None = None,
    ) -> OpenedCheck:
        """Start a check without waiting."""
        ...

    def serve(self, name: str, folder: Path | None = None) -> None:
        """Serve a new rule, or one by other weights."""
        ...

    def remove(self, name: str) -> None:
        """Stop serving a rule."""
        ...

    def folder(self, name: str) -> Path:
        """Where a rule's weights are."""
        ...

    def step(self) -> None:
        """Run one batch of what is in flight."""
        ...

    def cancel(self, call: Any) -> None:
        """Drop the requests of a check that are in flight."""
        ...


@dataclass(frozen=True)
class MixedCall:
    """A check's calls, each with its engine."""

    parts: tuple[tuple[GuardEngine, Call], ...]

    @property
    def done(self) -> bool:
        """Whether nothing is in flight any longer."""
        return all(call.done for _, call in self.parts)


@dataclass(frozen=True)
class MixedCheck:
    """A check under way in several engines; `rules` are in the order in which they were asked."""

    rules: tuple[str, ...]
    checks: tuple[OpenCheck, ...]
    call: MixedCall

    def result(self) -> Check:
        """The finished check, verdicts and refusals in the order of the rules. Raises GuardError
        unless it is `call.done`.
        """
        check = joined(self.rules, [part.result() for part in self.checks])
        finished = max(part.call.finished for part in self.checks)
        started = min(part.call.started for part in self.checks)
        return replace(check, wall_ms=(finished - started) * 1000)


class MixedEngine:
    """Several engines behind one `check`. Raises GuardError where two of them serve a rule of one
    name.
    """

    def __init__(self, engines: Sequence[GuardEngine]) -> None:
        self._engines = tuple(engines)
        names = [name for engine in engines for name in engine.rules]
        if len(set(names)) < len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            remedy = "Leave it out of one of them"
            raise GuardError("two engines serve one rule", got=", ".join(twice), remedy=remedy)

    @property
    def engines(self) -> tuple[GuardEngine, ...]:
        """The engines, in the order of the bases."""
        return self._engines

    @property
    def rules(self) -> Mapping[str, Card]:
        """The cards of what is served, by name, engine by engine."""
        cards: dict[str, Card] = {}
        for engine in self._engines:
            cards |= engine.rules
        return cards

    @property
    def is_usable(self) -> bool:
        """Whether all of the engines are: a check may ask any of them."""
        return all(engine.is_usable for engine in self._engines)

    @property
    def counters(self) -> EngineCounters:
        """The counters of all engines together."""
        return sum((engine.counters for engine in self._engines), EngineCounters())

    def text_tokens(self, text: str) -> int:
        """As `GuardEngine.text_tokens`, where the text has most."""
        return max(engine.text_tokens(text) for engine in self._engines)

    def check(
        self,
        messages: Sequence[Message],
        rules: Sequence[str] | None = None,
        *,
        cache_salt: str | None = None,
    ) -> Check:
        """Put one conversation to `rules`, by default all; as `GuardEngine.check`."""
        open_check = self.open_check(messages, rules, cache_salt=cache_salt)
        try:
            while not open_check.call.done:
                self.step()
        finally:
            self.cancel(open_check.call)
        return open_check.result()

    def open_check(
        self,
        messages: Sequence[Message],
        rules: Sequence[str] | None = None,
        *,
        cache_salt: str | None = None,
    ) -> MixedCheck:
        """Start a check without waiting. Raises as `GuardEngine.check` does.

        A rule that none serves is the first engine's to refuse.
        """
        names = names_listed(self.rules if rules is None else rules, "rules")
        serving = self._serving()
        by_engine: dict[int, list[str]] = {}
        for name in names:
            by_engine.setdefault(serving.get(name, 0), []).append(name)
        checks: list[OpenCheck] = []
        parts: list[tuple[GuardEngine, Call]] = []
        try:
            for index, served in by_engine.items() or [(0, [])]:
                engine = self._engines[index]
                checks.append(engine.open_check(messages, served, cache_salt=cache_salt))
                parts.append((engine, checks[-1].call))
        except BaseException:
            self.cancel(MixedCall(tuple(parts)))
            raise
        return MixedCheck(names, tuple(checks), MixedCall(tuple(parts)))

    def serve(self, name: str, folder: Path | None = None) -> None:
        """As `GuardEngine.serve`, in the engine that serves the rule, or one of its card's base.

        Raises GuardError for a new rule of another base, too.
        """
        if name in self.rules or folder is None:
            self._engine(name).serve(name, folder)
        else:
            self._engine_for(load_card(folder), folder).serve(name, folder)

    def _engine_for(self, card: Card, folder: Path) -> GuardEngine:
        """The engine of the weights' base. Raises GuardError if there is none."""
        engines = {engine.model: engine for engine in self._engines}
        bases = {model: engine.base for model, engine in engines.items()}
        return engines[model_of(card, folder, bases)]

    def remove(self, name: str) -> None:
        """As `GuardEngine.remove`, in the engine that serves the rule."""
        self._engine(name).remove(name)

    def folder(self, name: str) -> Path:
        """As `GuardEngine.folder`."""
        return self._engine(name).folder(name)

    def step(self) -> None:
        """Run one batch in every engine that has something in flight."""
        for engine in self._engines:
            if engine.is_busy:
                engine.step()

    def cancel(self, call: MixedCall) -> None:
        """Drop the requests of `call` that are in flight."""
        for engine, part in call.parts:
            engine.cancel(part)

    def forget(self) -> None:
        """Empty the prefix caches. Raises GuardError while requests are in flight."""
        for engine in self._engines:
            engine.forget()

    def close(self) -> None:
        """Give the memory of all engines back, also where closing one raises."""
        with contextlib.ExitStack() as closing:
            for engine in self._engines:
                closing.callback(engine.close)

    def __enter__(self) -> MixedEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _engine(self, name: str) -> GuardEngine:
        """The engine that serves a rule; the first where none does."""
        return self._engines[self._serving().get(name, 0)]

    def _serving(self) -> dict[str, int]:
        """The index of each rule's engine; an engine makes its rules anew when it is asked."""
        indices: dict[str, int] = {}
        for index, engine in enumerate(self._engines):
            indices |= dict.fromkeys(engine.rules, index)
        return indices


def model_of(card: Card, folder: Path, bases: Mapping[str, tuple[str, str]]) -> str:
    """The served model on the base of the weights; if there are several, the card's own.

    `bases`: model -> its base and that base's revision. Raises GuardError if none has it.
    """
    base = (card.base, card.base_revision)
    models = [model for model, base_of_model in bases.items() if base_of_model == base]
    if not models:
        got = f"{card.base} {card.base_revision[:12]}"
        remedy = f"Served here: {', '.join(bases)}"
        problem = "the base of these weights is not served"
        raise GuardError(problem, where=folder, got=got, remedy=remedy)
    return card.model if card.model in models else models[0]

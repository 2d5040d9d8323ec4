"""The engines of a process, a list with one for each base, and a check that asks several of them.
Whoever loops over batches owns them: the server's thread, or a scan. Engines that are dead are
started again, with the same bases and rules. Knows nothing of threads or HTTP, nor of what
computes.
"""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from guard.arguments import names_listed
from guard.conversation.example import Message
from guard.errors import GuardError
from guard.weights.card import Card, check_rule, load_card, read_card
from serve.engine.adapter import Requirements
from serve.engine.call import OpenCheck
from serve.engine.engine import TEST_CONVERSATION, GuardEngine, policy_name
from serve.engine.refusals import Overloaded, not_served, without_frames
from serve.engine.score import Check, EngineCounters, joined

log = logging.getLogger(__name__)

# Starts the engines; the folders are those that rules were last served from, by name; None at
# first.
StartEngines = Callable[[Mapping[str, Path] | None], Sequence[GuardEngine]]


class OpenedCheck(Protocol):
    """A check under way, until `call.done`; `cancel` takes its `call`."""

    @property
    def call(self) -> Any: ...

    def result(self) -> Check: ...


class CheckEngine(Protocol):
    """What a loop needs of an engine, or of all of them: `GuardEngine` says what each verb does."""

    @property
    def rules(self) -> Mapping[str, Card]: ...
    @property
    def is_usable(self) -> bool: ...
    @property
    def counters(self) -> EngineCounters: ...
    def text_tokens(self, text: str) -> int: ...
    def folder(self, name: str) -> Path: ...
    def serve(self, name: str, folder: Path | None = None) -> None: ...
    def remove(self, name: str) -> None: ...
    def step(self) -> None: ...
    def cancel(self, call: Any) -> None: ...
    def open_check(
        self,
        messages: Sequence[Message],
        rules: Sequence[str] | None = None,
        *,
        cache_salt: str | None = None,
        policies: Sequence[str] = (),
    ) -> OpenedCheck: ...


@runtime_checkable
class Restartable(Protocol):
    """What can be started again, and knows when it has to be, as `GuardEngines`."""

    def restart(self, on_load: Callable[[], None]) -> None: ...
    def works(self) -> bool: ...


@dataclass(frozen=True)
class SharedCheck:
    """A check of `rules`, in the order asked, under way in the engines that answer them."""

    rules: tuple[str, ...]
    parts: tuple[tuple[GuardEngine, OpenCheck], ...]

    @property
    def call(self) -> SharedCheck:
        """What `GuardEngines.cancel` takes: all parts."""
        return self

    @property
    def done(self) -> bool:
        """Whether nothing is in flight any longer."""
        return all(part.call.done for _, part in self.parts)

    def result(self) -> Check:
        """The finished check. Raises GuardError unless it is `done`."""
        checks = [part.result() for _, part in self.parts]
        if len(checks) == 1:
            return checks[0]
        finished = max(part.call.finished for _, part in self.parts)
        started = min(part.call.started for _, part in self.parts)
        return replace(joined(self.rules, checks), wall_ms=(finished - started) * 1000)


class GuardEngines:
    """The engines that `start` starts, now and again by `restart`; no two may serve one rule.
    Between two starts there is no engine: rules and folders are those of the dead ones, and
    whatever needs an engine is Overloaded.
    """

    def __init__(self, start: StartEngines) -> None:
        self._start = start
        self._engines = _distinct(start(None))
        self._cards: dict[str, Card] = {}  # of the dead engines, as are the folders
        self._folders: dict[str, Path] = {}
        self._requirements: dict[str, Requirements] = {}  # of the engines so far, by model
        self._left_out: dict[str, Path] = {}  # of rules that the living engines could not serve

    @property
    def rules(self) -> Mapping[str, Card]:
        """The cards of what is served, by name, engine by engine."""
        cards: dict[str, Card] = {}
        engines = self._engines
        for engine in engines:
            cards |= engine.rules
        return cards if engines else self._cards

    @property
    def is_usable(self) -> bool:
        """Whether all engines are there and answer: a check may ask any of them."""
        engines = self._engines
        return bool(engines) and all(engine.is_usable for engine in engines)

    @property
    def counters(self) -> EngineCounters:
        """The counters of all engines together, since they were last started."""
        return sum((engine.counters for engine in self._living()), EngineCounters())

    def text_tokens(self, text: str) -> int:
        """How many tokens a text has, where it has most."""
        return max(engine.text_tokens(text) for engine in self._living())

    def check(self, messages: Sequence[Message], rules: Sequence[str] | None = None) -> Check:
        opened = self.open_check(messages, rules)
        try:
            while not opened.done:
                self.step()
        finally:
            self.cancel(opened)
        return opened.result()

    def open_check(
        self,
        messages: Sequence[Message],
        rules: Sequence[str] | None = None,
        *,
        cache_salt: str | None = None,
        policies: Sequence[str] = (),
    ) -> SharedCheck:
        """Start a check without waiting. The first engine refuses a rule that none serves."""
        first, serving = self._living()[0], self._serving()
        names = names_listed(self.rules if rules is None else rules, "rules")
        by_engine: dict[GuardEngine, list[str]] = {}
        for name in names:
            by_engine.setdefault(serving.get(name, first), []).append(name)
        reading = self._reading() if policies else first
        if policies or not by_engine:
            by_engine.setdefault(reading, [])
        parts: list[tuple[GuardEngine, OpenCheck]] = []
        try:
            for engine, served in by_engine.items():
                texts = policies if engine is reading else ()
                opened = engine.open_check(messages, served, cache_salt=cache_salt, policies=texts)
                parts.append((engine, opened))
        except BaseException:
            self.cancel(SharedCheck(names, tuple(parts)))
            raise
        asked = (*names, *map(policy_name, range(len(policies))))
        return SharedCheck(asked, tuple(parts))

    def step(self) -> None:
        """Run one batch in every engine that has something in flight."""
        for engine in self._living():
            if engine.is_busy:
                engine.step()

    def cancel(self, call: SharedCheck) -> None:
        """Drop the requests of a check that are in flight."""
        for engine, part in call.parts:
            engine.cancel(part.call)

    def forget(self) -> None:
        """Empty the prefix caches. Raises GuardError while requests are in flight."""
        for engine in self._living():
            engine.forget()

    def serve(self, name: str, folder: Path | None = None) -> None:
        """As `GuardEngine.serve`, in the engine that serves the rule, or one of its card's base;
        also a rule that was left out. Raises GuardError for a new rule of another base, too.
        """
        folder = folder or self._left_out.get(name)
        engine = self._engine(name)
        if name not in engine.rules and folder is not None and len(self._engines) > 1:
            by_model = {engine.model: engine for engine in self._engines}
            bases = {model: engine.base for model, engine in by_model.items()}
            engine = by_model[model_of(load_card(folder), folder, bases)]
        engine.serve(name, folder)
        self._left_out.pop(name, None)

    def remove(self, name: str) -> None:
        """As `GuardEngine.remove`, also for a rule that was left out."""
        if self._left_out.pop(name, None) is None:
            self._engine(name).remove(name)

    def folder(self, name: str) -> Path:
        """As `GuardEngine.folder`, also of a rule that was left out, or of a dead engine."""
        if self._engines and name not in self._left_out:
            return self._engine(name).folder(name)
        if name not in self._folders:
            raise not_served(name)
        return self._folders[name]

    def works(self) -> bool:
        """Whether every base still answers a check, by any of its rules, with nothing in flight."""
        return all(_answers(engine) for engine in self._living())

    def restart(self, on_load: Callable[[], None] = lambda: None) -> None:
        """Close the engines and start others: every rule from the folder that served it last, by
        the weights that are there now. `on_load` is called before each try. If they do not start
        so, rules whose files cannot be served are left out, and the log says why. Raises GuardError
        if they do not start so either; it may be tried again.
        """
        self._bury()
        started = self._start_with_most(on_load)
        self._left_out = dict(self._folders)
        for rule in started:
            del self._left_out[rule]

    def close(self) -> None:
        """Give the memory of all engines back, also where closing one raises."""
        engines, self._engines = self._engines, ()
        _close_all(engines)

    def __enter__(self) -> GuardEngines:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _living(self) -> tuple[GuardEngine, ...]:
        engines = self._engines
        if not engines:
            raise Overloaded("the engine is down", remedy="Try again in a few seconds")
        return engines

    def _engine(self, name: str) -> GuardEngine:
        """That serves a rule; the first where none does."""
        return self._serving().get(name, self._living()[0])

    def _reading(self) -> GuardEngine:
        """That judges policies: one with a reader, else the first that can, else the first."""
        judging = {engine.policies.by: engine for engine in self._living()[::-1] if engine.policies}
        return judging.get("reader") or judging.get("base") or self._living()[0]

    def _serving(self) -> dict[str, GuardEngine]:
        """The engine of each rule; an engine makes its rules anew when it is asked."""
        serving: dict[str, GuardEngine] = {}
        for engine in self._engines:
            serving |= dict.fromkeys(engine.rules, engine)
        return serving

    def _bury(self) -> None:
        """Remember what the dead engines served, and give their memory back."""
        engines = self._engines
        if not engines:
            return
        self._cards = dict(self.rules)
        self._folders = dict(self._left_out)
        for engine in engines:
            self._folders |= engine.folders
            self._requirements[engine.model] = engine.requirements
        self._engines = ()
        try:
            _close_all(engines)
        except Exception:  # they are dead: whatever that raises, others are started
            log.exception("a dead engine could not be closed")

    def _start_with_most(self, on_load: Callable[[], None]) -> Mapping[str, Path]:
        """Start engines of the first selection that they start with; that selection."""
        failure: GuardError | None = None
        for folders in self._selections():
            if failure is not None:
                log.error("the engine is started with fewer rules, since: %s", failure)
            on_load()
            gc.collect()  # of the dead engines, or of a start that failed, only circles are left
            try:
                self._engines = _distinct(self._start(folders))
                return folders
            except GuardError as error:
                failure = without_frames(error)
            except Exception as error:  # vLLM's, of a broken device for example
                problem = f"the engine cannot be started again: {error}"
                failure = GuardError(problem, remedy="Start the process again")
        assert failure is not None  # all folders have been tried
        raise failure

    def _selections(self) -> Iterator[dict[str, Path]]:
        """The folders to start with: all, else those that are admitted."""
        yield self._folders
        admitted = dict(self._folders)
        for rule, folder in self._folders.items():
            try:
                self._check_admitted(rule, folder)
            except (GuardError, OSError) as error:
                log.error("the rule %s is left out: %s", rule, error)
                del admitted[rule]
        if 0 < len(admitted) < len(self._folders):
            yield admitted

    def _check_admitted(self, rule: str, folder: Path) -> None:
        """Raise GuardError or OSError if no engine like those so far would admit the folder."""
        card = read_card(folder)
        check_rule(card, rule, folder)
        bases = {model: (of.base, of.base_revision) for model, of in self._requirements.items()}
        self._requirements[model_of(card, folder, bases)].admit(rule, folder)


def model_of(card: Card, folder: Path, bases: Mapping[str, tuple[str, str]]) -> str:
    """The served model on the base of the weights; if there are several, the card's own. `bases`
    has each model's base and that base's revision. Raises GuardError if none has it.
    """
    base = (card.base, card.base_revision)
    models = [model for model, base_of_model in bases.items() if base_of_model == base]
    if not models:
        got, remedy = f"{card.base} {card.base_revision[:12]}", f"Served here: {', '.join(bases)}"
        problem = "the base of these weights is not served"
        raise GuardError(problem, where=folder, got=got, remedy=remedy)
    return card.model if card.model in models else models[0]


def _distinct(engines: Sequence[GuardEngine]) -> tuple[GuardEngine, ...]:
    """The engines. Closes them and raises GuardError if two serve a rule of one name."""
    names = [name for engine in engines for name in engine.rules]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        _close_all(engines)
        remedy = "Leave it out of one of them"
        raise GuardError("two engines serve one rule", got=", ".join(twice), remedy=remedy)
    return tuple(engines)


def _close_all(engines: Sequence[GuardEngine]) -> None:
    with contextlib.ExitStack() as closing:
        for engine in engines:
            closing.callback(engine.close)


def _answers(engine: GuardEngine) -> bool:
    """Whether a conversation can be put to the first rule, or else to the last, if there is any."""
    names = tuple(engine.rules)
    for name in dict.fromkeys(names[:1] + names[-1:]):
        try:
            refused = engine.check(TEST_CONVERSATION, [name]).refused
        except Exception as error:
            log.error("the engine does not answer %s: %s", name, error)
            continue
        if not refused:
            return True
        log.error("the engine does not answer %s: %s", name, refused[name].why)
    return not names

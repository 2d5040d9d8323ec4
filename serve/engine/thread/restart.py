"""A dead engine is started again: with the same bases and rules, after growing pauses, a few times.

Knows nothing of threads or HTTP.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from guard.conversation.example import Message
from guard.errors import GuardError
from guard.weights.card import Card, check_rule, read_card
from serve.engine.adapter import Requirements
from serve.engine.engine import TEST_CONVERSATION, GuardEngine
from serve.engine.mixed import MixedEngine, OpenedCheck
from serve.engine.score import EngineCounters
from serve.engine.thread.refusals import Overloaded, not_served, without_frames

log = logging.getLogger(__name__)

# Before each start in a row; after the last one the process has to be started again.
PAUSES_S = (0.0, 1.0, 5.0, 15.0, 30.0)
STABLE_S = 120.0  # an engine that has lived this long begins with the first pause again

# Starts an engine; the folders are those that rules were last served from, by name; None at first.
StartEngine = Callable[[Mapping[str, Path] | None], GuardEngine | MixedEngine]


@runtime_checkable
class Restartable(Protocol):
    """An engine that can be started again, and knows when it has to be."""

    def restart(self, on_load: Callable[[], None]) -> None:
        """Start another engine of the same rules; `on_load` is called before each try, and before
        each rule that is loaded by itself. Raises GuardError if it does not start.
        """

    def works(self) -> bool:
        """Whether anything is still answered after a batch has failed, with nothing in flight."""
        ...


class RestartAttempts:
    """How often a dead engine was started again, and when it may be once more."""

    def __init__(self) -> None:
        self._in_a_row = 0
        self._started: float | None = None  # by time.monotonic, while the engine lives

    def died(self) -> None:
        """Note that the engine is dead."""
        if self._started is None or time.monotonic() > self._started + STABLE_S:
            self._in_a_row = 0

    def next_pause_s(self) -> float | None:
        """How long to wait before the next start; None if there is to be none."""
        if self._in_a_row >= len(PAUSES_S):
            return None
        self._in_a_row += 1
        return PAUSES_S[self._in_a_row - 1]

    def started(self) -> None:
        """Note that the engine was started."""
        self._started = time.monotonic()


class RestartableEngine:
    """A `CheckEngine` that can be started again once it is dead.

    `start` is called now and at every restart. Raises what it raises. Between two engines the rules
    and folders are those of the dead one, and whatever needs an engine is a GuardError.
    """

    def __init__(self, start: StartEngine) -> None:
        self._start = start
        self._engine: GuardEngine | MixedEngine | None = start(None)
        self._cards: dict[str, Card] = {}  # of the dead engine, as are the folders
        self._folders: dict[str, Path] = {}
        # What the engines so far demanded of folders, by model.
        self._requirements: dict[str, Requirements] = {}
        self._left_out: dict[str, Path] = {}  # of rules that the living engine could not serve

    @property
    def rules(self) -> Mapping[str, Card]:
        """The cards of what is served, by name."""
        engine = self._engine
        if engine is None:
            return self._cards
        return engine.rules

    @property
    def is_usable(self) -> bool:
        """False once nothing more is answered, until it is started again."""
        engine = self._engine
        return engine is not None and engine.is_usable

    @property
    def counters(self) -> EngineCounters:
        """The figures of what it holds, and has done since it was last started."""
        return self._living().counters

    def restart(self, on_load: Callable[[], None] = lambda: None) -> None:
        """Close the engine and start another one: every rule from the folder that served it last,
        by the weights that are there now.

        If it does not start so, rules whose files cannot be served are left out (`_selections`),
        and those among them that can be served beside the rest are added. Raises GuardError if it
        does not start with any selection, and what adding a rule raises if the engine is dead of
        it; it may be tried again.
        """
        self._bury()
        started = self._start_with_most(on_load)
        self._left_out = {
            rule: folder for rule, folder in self._folders.items() if rule not in started
        }
        for rule, folder in list(self._left_out.items()):
            on_load()
            self._add_or_leave_out(rule, folder)

    def _add_or_leave_out(self, rule: str, folder: Path) -> None:
        """Serve a rule beside the others; the log says why if that fails. Raises what it raises if
        the engine is dead of it.
        """
        try:
            check_rule(read_card(folder), rule, folder)
            self.serve(rule)
        except Exception as error:  # vLLM's, too
            if not self.is_usable:
                raise
            if isinstance(error, GuardError):
                log.error("the rule %s is left out: %s", rule, error)
            else:  # its words may quote a value
                log.exception("the rule %s is left out", rule)

    def _start_with_most(self, on_load: Callable[[], None]) -> Mapping[str, Path]:
        """Start an engine of the first selection that it starts with, and return that. Raises
        GuardError if there is none.
        """
        failure: GuardError | None = None
        for folders in self._selections():
            if failure is not None:
                log.error("the engine is started with fewer rules, since: %s", failure)
            on_load()
            failure = self._start_with(folders)
            if failure is None:
                return folders
        assert failure is not None  # all folders have been tried
        raise failure

    def _start_with(self, folders: Mapping[str, Path]) -> GuardError | None:
        """Start an engine of these folders; the error if it does not start, without what that
        start had in memory.
        """
        gc.collect()  # of the dead engine, or of a start that failed, only circles are left
        try:
            self._engine = self._start(folders)
        except GuardError as error:
            return without_frames(error)
        except Exception as error:  # vLLM's, of a broken device for example
            problem = f"the engine cannot be started again: {error}"
            return GuardError(problem, remedy="Start the process again")
        return None

    def _selections(self) -> Iterator[dict[str, Path]]:
        """The folders to start with, fewer each time: all; those that would be admitted; of these
        those that have the weights and cards of the dead engine.
        """
        yield self._folders
        sound: dict[str, Path] = {}
        unchanged: dict[str, Path] = {}
        for rule, folder in self._folders.items():
            card = self._admitted_card(rule, folder)
            if card is not None:
                sound[rule] = folder
            if card is not None and card == self._cards.get(rule):
                unchanged[rule] = folder
        if 0 < len(sound) < len(self._folders):
            yield sound
        if 0 < len(unchanged) < len(sound):
            yield unchanged

    def _admitted_card(self, rule: str, folder: Path) -> Card | None:
        """The card of the folder; None if no engine like those so far would admit it."""
        for requirements in self._requirements.values():
            with contextlib.suppress(GuardError, OSError):
                card = requirements.admit(rule, folder).card
                check_rule(card, rule, folder)
                return card
        return None

    def works(self) -> bool:
        """Whether every base still answers a check, by one rule or another."""
        return all(_answers(part) for part in _parts(self._living()))

    def open_check(
        self,
        messages: Sequence[Message],
        rules: Sequence[str] | None = None,
        *,
        cache_salt: str | None = None,
    ) -> OpenedCheck:
        """As `GuardEngine.open_check`."""
        return self._living().open_check(messages, rules, cache_salt=cache_salt)

    def serve(self, name: str, folder: Path | None = None) -> None:
        """As `GuardEngine.serve`, also for a rule that was left out."""
        self._living().serve(name, folder or self._left_out.get(name))
        self._left_out.pop(name, None)

    def remove(self, name: str) -> None:
        """As `GuardEngine.remove`, also for a rule that was left out."""
        if self._left_out.pop(name, None) is None:
            self._living().remove(name)

    def text_tokens(self, text: str) -> int:
        """As `GuardEngine.text_tokens`."""
        return self._living().text_tokens(text)

    def folder(self, name: str) -> Path:
        """As `GuardEngine.folder`."""
        engine = self._engine
        if engine is not None and name not in self._left_out:
            return engine.folder(name)
        if name not in self._folders:
            raise not_served(name)
        return self._folders[name]

    def step(self) -> None:
        """As `GuardEngine.step`."""
        self._living().step()

    def cancel(self, call: Any) -> None:
        """Drop the requests of `call` that are in flight."""
        self._living().cancel(call)

    def close(self) -> None:
        """Give the memory back, if an engine has any."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    def __enter__(self) -> RestartableEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _living(self) -> GuardEngine | MixedEngine:
        engine = self._engine
        if engine is None:
            raise Overloaded("the engine is down", remedy="Try again in a few seconds")
        return engine

    def _bury(self) -> None:
        """Remember what the dead engine served, and give its memory back as far as that goes."""
        engine = self._engine
        if engine is None:
            return
        self._cards = dict(engine.rules)
        self._folders = self._left_out | _folders(engine)
        self._requirements |= {part.model: part.requirements for part in _parts(engine)}
        self._engine = None
        try:
            engine.close()
        except Exception:  # it is dead: whatever it raises, another one is started
            log.exception("a dead engine could not be closed")


def _folders(engine: GuardEngine | MixedEngine) -> dict[str, Path]:
    """The folder of each rule's weights, except a rule that the base itself answers."""
    folders: dict[str, Path] = {}
    for name in engine.rules:
        try:
            folders[name] = engine.folder(name)
        except GuardError:
            continue
    return folders


def _parts(engine: GuardEngine | MixedEngine) -> tuple[GuardEngine, ...]:
    """The engine of each base."""
    if isinstance(engine, MixedEngine):
        return engine.engines
    return (engine,)


def _answers(engine: GuardEngine) -> bool:
    """Whether a conversation can be put to the first rule, or else to the last; without a rule
    there is nothing to answer.
    """
    names = tuple(engine.rules)
    if not names:
        return True
    for name in dict.fromkeys((names[0], names[-1])):
        try:
            refused = engine.check(TEST_CONVERSATION, [name]).refused
        except Exception as error:
            log.error("the engine does not answer %s: %s", name, error)
            continue
        if not refused:
            return True
        log.error("the engine does not answer %s: %s", name, refused[name].why)
    return False

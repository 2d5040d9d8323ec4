"""Puts a part's stored conversations to rules: a row each, judged or unjudged with the reason.

Knows nothing of where rows go.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Literal, Protocol

from guard.conversation.example import Message
from guard.errors import GuardError
from guard.verdict import Verdict
from serve.engine.codes import Code
from serve.engine.engine import TEST_CONVERSATION
from serve.engine.engines import CheckEngine, OpenedCheck
from serve.engine.score import Check, Refusal
from serve.scan.parts import ScanManifest, ScanRow
from serve.scan.sources import StoredConversation

log = logging.getLogger(__name__)

OPEN = 32  # checks in the engine at once: enough to fill its batches


class ScanEngine(CheckEngine, Protocol):
    """What a scan needs of an engine."""

    def forget(self) -> None: ...


def judge(
    engine: ScanEngine, conversations: Sequence[tuple[Message, ...]], rules: Sequence[str]
) -> list[Check]:
    """A check of each conversation, in their order.

    They are asked sorted by their beginnings, so that equal ones meet in the cache. It is empty at
    first, so that nothing asked before changes a batch, and with it a digit, where every adapter
    has a slot. The conversations of a batch that fails are judged one at a time; one that fails by
    itself too has a refusal of every rule.

    Raises GuardError if nothing else is answered any longer; nothing is left in the engine then.
    """
    engine.forget()
    checks: dict[int, Check] = {}
    under_way: dict[int, OpenedCheck] = {}
    waiting = sorted(range(len(conversations)), key=lambda row: _key(conversations[row]))
    waiting.reverse()  # the last is the next
    try:
        while waiting or under_way:
            try:
                while waiting and len(under_way) < OPEN:
                    row = waiting.pop()
                    under_way[row] = engine.open_check(conversations[row], rules)
                engine.step()
            except Exception:
                log.exception("a batch failed; its conversations are judged one at a time")
                _cancel(engine, under_way)
                for row in sorted(set(range(len(conversations))) - set(waiting) - set(checks)):
                    checks[row] = _judged_alone(engine, conversations[row], rules)
            for row in [row for row, check in under_way.items() if check.call.done]:
                checks[row] = under_way.pop(row).result()
    finally:
        _cancel(engine, under_way)
    return [checks[row] for row in range(len(conversations))]


def _cancel(engine: ScanEngine, under_way: dict[int, OpenedCheck]) -> None:
    for check in under_way.values():
        engine.cancel(check.call)
    under_way.clear()


def _judged_alone(engine: ScanEngine, messages: Sequence[Message], rules: Sequence[str]) -> Check:
    """The check of a conversation by itself; a refusal of every rule if the engine fails at it.

    Raises GuardError if the engine fails at any other conversation too.
    """
    try:
        return _check(engine, messages, rules)
    except Exception as error:
        problem = f"the engine failed: {type(error).__name__}: {' '.join(str(error).split())}"
        try:
            _check(engine, TEST_CONVERSATION, rules)
        except Exception:
            remedy = "Run it again: what is judged is kept. If it fails there again, see the log"
            raise GuardError(problem, remedy=remedy) from error
        log.error("a conversation is unjudged: %s", problem)
    return Check((), {rule: Refusal(rule, problem, "engine_failed") for rule in rules}, 0, 0, 0.0)


def _check(engine: ScanEngine, messages: Sequence[Message], rules: Sequence[str]) -> Check:
    opened = engine.open_check(messages, rules)
    try:
        while not opened.call.done:
            engine.step()
    finally:
        engine.cancel(opened.call)
    return opened.result()


def _key(messages: Sequence[Message]) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in messages]


def part_rows(
    engine: ScanEngine, stored: Sequence[StoredConversation], manifest: ScanManifest
) -> list[ScanRow]:
    """One row per conversation and rule, in their orders.

    Raises GuardError, which names the conversations, if the engine answers no longer.
    """
    rules = list(manifest.rules)
    readable = [conversation for conversation in stored if not conversation.problem]
    try:
        checks = iter(judge(engine, [conversation.messages for conversation in readable], rules))
    except GuardError as error:
        first, last = stored[0], stored[-1]
        where = f"{first.source}, row {first.number}, to {last.source}, row {last.number}"
        raise GuardError(error.problem, where=where, remedy=error.remedy) from error
    rows: list[ScanRow] = []
    for conversation in stored:
        check = None if conversation.problem else next(checks)
        rows += _rows(conversation, check, manifest)
    return rows


def _rows(stored: StoredConversation, check: Check | None, manifest: ScanManifest) -> list[ScanRow]:
    """A row for each rule. Without a check nothing could be read."""
    verdicts: dict[str, Verdict] = {}
    if check is not None:
        verdicts = {verdict.rule: verdict for verdict in check.verdicts}
    rows: list[ScanRow] = []
    for rule, version in manifest.rules.items():
        origin = (stored.source, stored.number, stored.id, rule)
        verdict = verdicts.get(rule)
        if verdict is not None:
            word: Literal["allow", "violation"] = "allow"
            if verdict.violates:
                word = "violation"
            figures = (verdict.p_violation, verdict.threshold, verdict.confident)
            rows.append(ScanRow(*origin, word, *figures, version))
            continue
        code: Code = "unread_content"
        reason = stored.problem
        if check is not None:
            code, reason = check.refused[rule].code, check.refused[rule].why
        rows.append(ScanRow(*origin, "unjudged", None, None, None, version, code, reason))
    return rows

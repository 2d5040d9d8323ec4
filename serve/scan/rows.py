"""From a part's conversations to its rows: each judged, or unjudged with the reason.

Knows nothing of where rows go.
"""

from __future__ import annotations

from collections.abc import Sequence

from guard.errors import GuardError
from guard.verdict import Verdict
from serve.engine.codes import Code
from serve.engine.score import Check
from serve.scan.judge import ScanEngine, judge
from serve.scan.manifest import ScanManifest
from serve.scan.parts import ScanRow
from serve.scan.sources import StoredConversation

RowOrigin = tuple[str, int, str, str]  # source, row, id, rule


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
    verdicts: dict[str, Verdict] = {}
    if check is not None:
        verdicts = {verdict.rule: verdict for verdict in check.verdicts}
    rows: list[ScanRow] = []
    for rule, version in manifest.rules.items():
        origin = (stored.source, stored.number, stored.id, rule)
        if rule in verdicts:
            rows.append(_judged(origin, verdicts[rule], version))
            continue
        code: Code = "unread_content"
        reason = stored.problem
        if check is not None:
            code, reason = check.refused[rule].code, check.refused[rule].why
        rows.append(ScanRow(*origin, "unjudged", None, None, None, version, code, reason))
    return rows


def _judged(origin: RowOrigin, verdict: Verdict, version: str) -> ScanRow:
    return ScanRow(
        *origin,
        verdict="violation" if verdict.violates else "allow",
        p_violation=verdict.p_violation,
        threshold=verdict.threshold,
        confident=verdict.confident,
        version=version,
    )

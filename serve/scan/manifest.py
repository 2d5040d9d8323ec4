"""What a scan is of: its sources, its rules, and all else that its verdicts depend on.

Knows nothing of where the manifest is stored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from guard.errors import GuardError
from guard.weights.card import Card, load_card
from serve.scan.sources import state_of
from serve.selection import ServedPart

Format = Literal["jsonl", "parquet"]
FORMATS = get_args(Format)


@dataclass(frozen=True)
class ScanManifest:
    """What was scanned: sources with their `state_of`, rules with their versions, and what else
    their verdicts depend on.

    `engines`: of each base, what decides what fits and in which dtype it is computed. The order of
    the sources is the parts'. `is_finished` once all parts exist, with the number of rows of each
    verdict.
    """

    model: str
    sources: Mapping[str, tuple[int, int | str]]
    rules: Mapping[str, str]
    rows_a_part: int
    format: Format
    is_finished: bool = False
    conversations: int = 0
    verdicts: Mapping[str, Mapping[str, int]] | None = None
    engines: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def check_served(self, cards: Mapping[str, Card]) -> None:
        """Raise GuardError if an engine with these cards, by rule, answers by other versions: its
        verdicts would stand under the names of these.
        """
        changed = [rule for rule, version in self.rules.items() if cards[rule].version != version]
        if changed:
            raise GuardError(
                "trained again since the scan began",
                got=", ".join(changed),
                remedy="Wait for the training to end, and begin anew with FORCE=1 or OUT=",
            )

    def check_source(self, source: str) -> None:
        """Raise GuardError if a source is not as it was when the scan began: parts would have rows
        of one content and rows of another.
        """
        problem = "it has changed since the scan began"
        try:
            if state_of(source) == self.sources[source]:
                return
        except OSError as error:
            problem = f"it cannot be read any more: {error.strerror}"
        remedy = "Name a copy that nobody writes to, or begin anew with FORCE=1"
        raise GuardError(problem, where=source, remedy=remedy)

    @property
    def inputs(self) -> dict[str, Any]:
        facts = asdict(self)
        for outcome in ("is_finished", "conversations", "verdicts"):
            del facts[outcome]
        return dict(json.loads(json.dumps(facts)))


def manifest_of(
    parts: Sequence[ServedPart], sources: Sequence[str], rows_a_part: int, format_: Format
) -> ScanManifest:
    """The manifest of a scan of these sources by these parts.

    Raises GuardError for weights that cannot be read, or a data set that does not exist.
    """
    rules: dict[str, str] = {}
    engines: dict[str, dict[str, Any]] = {}
    for part in parts:
        recipe = part.recipe
        engines[recipe.name] = {
            "context_tokens": recipe.engine.get("max_model_len", recipe.context_tokens),
            "window_tokens": recipe.window_tokens,
            "dtype": recipe.serving_dtype,
        }
        for name, folder in part.folders.items():
            rules[name] = load_card(folder).version
    return ScanManifest(
        model=",".join(engines),
        sources={source: state_of(source) for source in sources},
        rules=rules,
        rows_a_part=rows_a_part,
        format=format_,
        engines=engines,
    )

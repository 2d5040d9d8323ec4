"""Who writes and debates a rule's data, from the environment."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from data.ingest import conversation
from data.llm_reply import WRITING
from data.rows import BadRow, read_rows
from guard.conversation.example import Message
from guard.endpoint import Endpoint, endpoint_settings, price
from guard.errors import GuardError
from guard.home import own_or_shipped
from guard.rule import EDIT, RULES, Rule, in_words

UNLABELLED = 30  # conversations from which the policy's dimensions are found (BARRED: 10 to 30)
FEWEST_EXAMPLES = 40  # a tenth are for validation, and training needs two of either label there
EXAMPLES = 1000


@dataclass(frozen=True)
class Writers:
    """The endpoint, how many rows it writes, and the unlabelled conversations it sees."""

    endpoint: Endpoint
    wanted: int
    unlabelled: str = ""
    seeds: tuple[tuple[Message, ...], ...] = ()
    budget_usd: float | None = None

    def inputs(self) -> list[Any]:
        """All that the data depend on besides the rule, but not what they may cost."""
        seeds = []
        for messages in self.seeds:
            seeds.append([[message.role, message.content] for message in messages])
        return [self.endpoint.identity[:3], self.wanted, seeds]


def writers_for(
    rule: Rule, earlier: Mapping[str, Any], examples: int | None, unlabelled: str | None
) -> Writers:
    """The writers as named, else as in the `earlier` manifest.

    Raises GuardError where no endpoint is described, where the rule is unfinished, or where
    `unlabelled` names no conversations.
    """
    settings = endpoint_settings(os.environ, "generator", "for data of another source")
    if settings is None:
        raise GuardError(
            "no endpoint is described that could write examples",
            remedy="Set GENERATOR_BASE_URL, GENERATOR_MODEL and, if it needs one, "
            "GENERATOR_API_KEY: any OpenAI-compatible endpoint",
        )
    if EDIT in in_words(rule):
        raise GuardError(
            f"the rule still says {EDIT}",
            where=own_or_shipped(RULES / f"{rule.id}.yaml"),
            remedy="Write there what violates it and what it allows",
        )
    file = unlabelled or earlier.get("unlabelled", "")
    seeds: tuple[tuple[Message, ...], ...] = ()
    if file:
        seeds = tuple(_conversations(file, rule))
    return Writers(
        endpoint=Endpoint(**WRITING | settings),
        wanted=examples or max(FEWEST_EXAMPLES, earlier.get("examples", EXAMPLES)),
        unlabelled=file,
        seeds=seeds,
        budget_usd=_budget_usd(),
    )


def _budget_usd() -> float | None:
    budget = os.environ.get("GENERATOR_BUDGET_USD", "")
    if not budget:
        return None
    try:
        return price(budget)
    except ValueError as error:
        raise GuardError(
            f"GENERATOR_BUDGET_USD has a bad value: {error}",
            got=budget,
            remedy="USD, for example 5",
        ) from error


def _conversations(unlabelled: str, rule: Rule) -> Iterator[tuple[Message, ...]]:
    """The first UNLABELLED conversations of a file or a hub data set."""
    remedy = "One conversation a row, as for DATA="
    where = ""
    for row in itertools.islice(read_rows(unlabelled), UNLABELLED):
        where = row.where
        try:
            if row.problem:
                raise BadRow(row.problem)
            yield conversation(row.fields, rule)
        except GuardError as error:
            raise GuardError(f"no conversation: {error}", where=where, remedy=remedy) from error
    if not where:
        raise GuardError("no conversations", where=unlabelled, remedy=remedy)

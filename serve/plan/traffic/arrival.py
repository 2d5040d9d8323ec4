"""A check that arrives. Values only."""

from __future__ import annotations

from typing import NamedTuple


class CheckArrival(NamedTuple):
    """One check of a replica's or a deployment's traffic.

    `due_s` counts from the beginning of the traffic. `tokens`: the length of the conversation's
    prompt so far, up to where the rules' suffixes begin. Checks of one `session` are turns of one
    conversation that grows. `cached_tokens`: how many of them the cache held, where a log says so,
    for methods that share conversations; None leaves that to the simulation.
    """

    due_s: float
    session: int
    tokens: int
    rules: tuple[int, ...]
    cached_tokens: int | None = None

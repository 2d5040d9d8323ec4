"""One method's answer on one example. Knows nothing of who answers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Answer:
    """A decision with the evidence for it.

    `violates` is None where there is no usable answer (the engine refused, the judge rambled): it
    counts as wrong, never as "allow". `logit` (nats, uncalibrated), `p_violation` (calibrated) and
    `confident` (`Verdict` says of what) are None where the method does not state them.
    """

    violates: bool | None
    logit: float | None = None
    p_violation: float | None = None
    confident: bool | None = None

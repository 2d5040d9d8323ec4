"""Takes a version on trial back by itself; it never promotes one.

Each limit is tested after every check, without cheating by looking often: a gambler bets, with
several stakes at once, that the limit is exceeded. While it is kept his wealth is a supermartingale
that begins at 1, so it ever reaches 1/a with a probability of at most a (Ville's inequality;
Waudby-Smith and Ramdas, 2024, "Estimating means of bounded random variables by betting").
"""

from __future__ import annotations

import math
from collections import Counter

import numpy as np

from guard.rule import Gate

FALSE_ABORTS = 0.05  # of all windows of a version that keeps to all limits, at most
SLOW_SHARE = 0.05  # of its checks, which may take longer than `slower_than`
STAKES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8)  # shares of what may be lost at one check
DID = {
    "disagreed": "disagreed with the champion at",
    "unjudged": "gave no verdict at",
    "slow": "was too slow at",
}


class _Bet:
    """A gambler's wealth who bets that excesses are above 0 in the mean; `least` bounds them."""

    def __init__(self, least: float) -> None:
        self._stakes = [stake / -least for stake in STAKES]
        self._logs = [0.0] * len(STAKES)

    def won(self, excess: float) -> float:
        """The logarithm of his wealth after one more excess, in the mean over his stakes."""
        for number, stake in enumerate(self._stakes):
            self._logs[number] += math.log1p(stake * excess)
        return float(np.logaddexp.reduce(self._logs)) - math.log(len(self._logs))


class TrialGate:
    """What a version on trial said beside its champion since its window began."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._limits = {
            "disagreed": gate.most_disagreement,
            "flagged": gate.most_flagged,
            "unjudged": gate.most_unjudged,
            "slow": gate.slower_than and SLOW_SHARE,
        }
        self._begin()

    def _begin(self) -> None:
        self._bets = {name: _Bet(-limit) for name, limit in self._limits.items() if limit}
        self._counts: Counter[str] = Counter()
        self._shown: dict[str, set[str]] = {}  # by each conversation

    def saw(
        self, conversation: str, champion: bool | None, trial: bool | None, latency_s: float
    ) -> str | None:
        """Note whether both flagged a conversation, None for no verdict; why to take it back.

        What the champion cannot judge says nothing of the trial. Of a conversation, by its key,
        each thing counts once a window, whichever of its checks shows it: what is asked again, or
        goes on, is no other draw.
        """
        if champion is None:
            return None
        shown = {
            "disagreed": trial is not None and trial != champion,
            "flagged": trial is True,
            "unjudged": trial is None,
            "slow": self._gate.slower_than is not None and latency_s > self._gate.slower_than,
            "champion flagged": champion and trial is not None,
        }
        if conversation not in self._shown and len(self._shown) == self._gate.window:
            self._begin()
        is_new = conversation not in self._shown
        known = self._shown.setdefault(conversation, set())
        now = {name for name, is_shown in shown.items() if is_shown} - known
        known |= now
        self._counts.update(now)
        reason: str | None = None
        enough = math.log(max(1, len(self._bets)) / FALSE_ABORTS)
        for name, bet in self._bets.items():
            allowed = (self._limits[name] or 0) * is_new
            if name == "flagged":
                allowed = (self._limits[name] or 0) * ("champion flagged" in now)
            wealth = bet.won((name in now) - allowed)
            if wealth >= enough and len(self._shown) >= self._gate.least_checks:
                reason = reason or self._reason(name)
        return reason

    def _reason(self, name: str) -> str:
        limit = self._limits[name]
        of = f"{self._counts[name]} of {len(self._shown)} conversations"
        if name == "flagged":
            champion = self._counts["champion flagged"]
            return f"it flagged {of}, the champion {champion}; {limit:g} times may be"
        return f"it {DID[name]} {of}; {limit:.1%} may be"

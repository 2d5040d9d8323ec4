"""The replay as a file for programs, and as lines for a terminal. Knows nothing of engines."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from guard.files.atomic import atomic_write
from serve.replay.summary import CountedShare, RuleReplay
from serve.replay.versions import RuleVersion, VersionPair, Versions

REPORT = "replay.json"


@dataclass(frozen=True)
class ReplayReport:
    """The replays of all rules, their versions, and the traffic: its files with their sizes."""

    model: str
    conversations: int
    sources: Mapping[str, int]
    versions: Versions
    rules: tuple[RuleReplay, ...]

    def pair(self, rule: str) -> VersionPair:
        """The two versions of a rule. Raises KeyError for one that is not replayed."""
        for pair in self.versions.pairs:
            if pair.rule == rule:
                return pair
        raise KeyError(rule)

    def save(self, folder: Path) -> None:
        """Write `replay.json`, whole or not at all."""
        content = json.dumps(self._as_json(), indent=1, ensure_ascii=False)
        with atomic_write(folder / REPORT) as part:
            part.write_text(content + "\n", encoding="utf-8")

    def _as_json(self) -> dict[str, Any]:
        rules: dict[str, Any] = {}
        for replay in self.rules:
            pair = self.pair(replay.rule)
            facts = asdict(replay)
            del facts["rule"]
            for name in ("flips", "to_violation", "to_allow", "flagged_a", "flagged_b"):
                facts[name]["share"] = getattr(replay, name).share
            rules[replay.rule] = {
                "a": _version(pair.a),
                "b": _version(pair.b),
                "differences": pair.differences,
                "shares_prefill": pair.shares_prefill,
                **facts,
            }
        return {
            "model": self.model,
            "conversations": self.conversations,
            "sources": dict(self.sources),
            "rules_of_a_only": list(self.versions.only_a),
            "rules_of_b_only": list(self.versions.only_b),
            "unchanged_rules": list(self.versions.unchanged),
            "rules": rules,
        }

    def as_text(self) -> str:
        """The lines for the terminal: what each version flags, and how many verdicts flip."""
        lines = [f"{self.conversations:,} conversations, {len(self.rules)} rules, two versions"]
        for replay in self.rules:
            lines += ["", replay.rule]
            lines += [f"  {label:<22}{text}" for label, text in figures(replay)]
            lines += [f"  note: {sentence}" for sentence in self.pair(replay.rule).differences]
        return "\n".join([*lines, *self.left_out()])

    def left_out(self) -> list[str]:
        """The rules that were not replayed, one line per reason."""
        reasons = (
            ("only in A", self.versions.only_a),
            ("only in B", self.versions.only_b),
            ("the same in both", self.versions.unchanged),
        )
        return [f"{reason}: {', '.join(rules)}" for reason, rules in reasons if rules]


def figures(replay: RuleReplay) -> list[tuple[str, str]]:
    """A rule's figures, each with its label."""
    unjudged = (
        f"{replay.unjudged_a_only:,} by A only, {replay.unjudged_b_only:,} by B only, "
        f"{replay.unjudged_both:,} by both"
    )
    rows = [
        ("judged by both", f"{replay.judged:,} of {replay.conversations:,}"),
        ("unjudged", unjudged),
        ("flagged by A", share_text(replay.flagged_a)),
        ("flagged by B", share_text(replay.flagged_b)),
        ("verdicts that flip", share_text(replay.flips)),
        ("  allow -> violation", share_text(replay.to_violation)),
        ("  violation -> allow", share_text(replay.to_allow)),
        ("  both confident", f"{replay.confident_flips:,}"),
    ]
    if replay.quantiles is not None:
        rows.append(("p(B) - p(A)", _quantiles_text(replay.quantiles)))
    return rows


def share_text(share: CountedShare) -> str:
    """The share as text, for example `12 (0.60 %, 95 % interval 0.31 to 1.05)`."""
    low, high = (100 * end for end in share.ci95)
    return f"{share.count:,} ({100 * share.share:.2f} %, 95 % interval {low:.2f} to {high:.2f})"


def _quantiles_text(quantiles: Mapping[str, float]) -> str:
    levels: Sequence[tuple[str, str]] = (("0", "least"), ("0.05", "5 %"), ("0.5", "median"))
    levels = (*levels, ("0.95", "95 %"), ("1", "most"))
    return ", ".join(f"{label} {quantiles[level]:+.3f}" for level, label in levels)


def _version(version: RuleVersion) -> dict[str, Any]:
    card = version.card
    return {
        "folder": str(version.folder),
        "method": card.method,
        "version": card.version,
        "rule_text": card.rule_text,
        "threshold": card.threshold,
        "temperature": card.temperature,
        "bias": card.bias,
        "uncertainty_band": list(card.uncertainty_band),
        "seed": card.seed,
        "data_hash": card.data_hash,
    }

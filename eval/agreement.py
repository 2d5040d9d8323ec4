"""Whether the served engine answers what plain PEFT answers. Knows nothing of labels or quality."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from eval.served import ServedRow
from eval.trial import Contestant
from guard.errors import GuardError
from guard.files.yaml_file import Strict

# How far two correct implementations may differ in the verdict's logit, in nats: other kernels, other orders of summation.
# Measured on the tiny base with random adapters of both methods: 3e-5 at most in float32, 0.125 in bfloat16 (48 prompts; the mean
# is 0.02, and PEFT itself is as far from its own float32 logits). float16 is not measured.
TOLERANCE_NATS: dict[Literal["float32", "float16", "bfloat16"], float] = {
    "float32": 0.001,
    "float16": 0.1,
    "bfloat16": 0.5,
}

# Noise has no direction and spares most logits: measured, the mean is below 3e-5 in float32 and 0.02 in bfloat16.
MEAN_SHARE = 0.1  # of the tolerance
# One prompt in FEW, but at least one, is what a correct engine may leave beyond the tolerance without a flip (logits far from the
# threshold, where bfloat16 has wider steps), flip within it (logits next to the threshold), and refuse.
FEW = 100


class Agreement(Strict):
    """PEFT against the served engine over a method's seeds; differences are absolute, of logits, in nats."""

    prompts: int
    max_difference: float
    mean_difference: float
    label_flips: int  # all within the tolerance, or there would be no report
    beyond_tolerance: int  # without a flip
    tolerance: float


def agreement(
    pairs: Sequence[tuple[Contestant, Sequence[ServedRow]]],
    dtype: Literal["float32", "float16", "bfloat16"],
) -> Agreement:
    """Compare each adapter's served rows with its PEFT logits. What the engine refused is not compared.

    Raises GuardError, naming each limit that is broken: a label that flips with a difference beyond the tolerance; a mean difference
    beyond MEAN_SHARE of it; more than one prompt in FEW that flips, differs by more, or was refused. Then nothing says that the
    engine serves what was trained, and no figure of it may be published.
    """
    tolerance = TOLERANCE_NATS[dtype]
    where = pairs[0][0].folder.parent
    _refuse_gaps([row for _, rows in pairs for row in rows], where)
    differences: list[float] = []
    flips: list[tuple[float, str]] = []
    for contestant, rows in pairs:
        decide = contestant.card.calibration.verdict
        for row in rows:
            if row.logit is None:
                continue
            peft = contestant.peft_logits[row.id]
            differences.append(abs(row.logit - peft))
            if (
                decide(contestant.rule, row.logit).violates
                != decide(contestant.rule, peft).violates
            ):
                flips.append(
                    (
                        differences[-1],
                        f"{contestant.name} on {row.id}: PEFT {peft:+.4f}, engine {row.logit:+.4f}",
                    )
                )
    n, mean = len(differences), sum(differences) / len(differences)
    outside = sum(difference > tolerance for difference, _ in flips)
    beyond = sum(difference > tolerance for difference in differences) - outside
    broken = {
        f"{outside} labels flip beyond the tolerance": outside > 0,
        f"{len(flips)} of {n} labels flip, at most {_few(n)} may": len(flips) > _few(n),
        f"{beyond} of {n} logits differ by more without a flip, at most {_few(n)} may": beyond
        > _few(n),
        f"the mean difference is {mean:.2g} nats, at most {MEAN_SHARE * tolerance:g} may be": not mean
        <= MEAN_SHARE * tolerance,
    }
    if any(broken.values()):
        raise GuardError(
            f"the served engine and PEFT disagree beyond numerical noise (tolerance {tolerance} nats in {dtype}): "
            + "; ".join(what for what, is_broken in broken.items() if is_broken),
            where=where,
            got="; ".join(what for _, what in sorted(flips, reverse=True)[:3]) or None,
            remedy="Run `make doctor` and the parity tests; the engine does not serve what was trained",
        )
    return Agreement(
        prompts=n,
        max_difference=max(differences),
        mean_difference=mean,
        label_flips=len(flips),
        beyond_tolerance=beyond,
        tolerance=tolerance,
    )


def _refuse_gaps(rows: Sequence[ServedRow], where: Path) -> None:
    """Raise GuardError if the engine refused all of `rows` or more than one in FEW: what is left may be the easy part."""
    refused = [row for row in rows if row.logit is None]
    if len(refused) > _few(len(rows)) or len(refused) == len(rows):
        raise GuardError(
            f"the served engine refused {len(refused)} of {len(rows)} prompts, too many to compare it with PEFT "
            f"(at most {_few(len(rows))} may be missing)",
            where=where,
            got="; ".join(f"{row.id}: {row.refusal}" for row in refused[:3]) or None,
            remedy="Run `make doctor`; take conversations that the recipe's context_tokens cannot hold out of the test split",
        )


def _few(n: int) -> int:
    return max(1, n // FEW)

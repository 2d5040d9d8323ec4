"""Whether the served engine answers what plain PEFT answers. Knows nothing of labels or quality."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from eval.served import ServedRow
from eval.trial import Contestant
from guard.errors import GuardError
from guard.yaml_file import Strict

# How far two correct implementations may differ in the verdict's logit, in nats: other kernels, other orders of summation.
# Measured on the tiny base with random adapters of both methods: 3e-5 at most in float32, 0.125 in bfloat16 (48 prompts; the mean
# is 0.02, and PEFT itself is as far from its own float32 logits). float16 is not measured.
TOLERANCE_NATS: dict[Literal["float32", "float16", "bfloat16"], float] = {"float32": 0.001, "float16": 0.1, "bfloat16": 0.5}


# What a correct engine may leave beyond it without a flip: logits far from the threshold, where bfloat16 has wider steps.
BEYOND_SHARE = 0.01


class Agreement(Strict):
    """PEFT against the served engine over a method's seeds; differences are absolute, of logits, in nats."""

    prompts: int
    max_difference: float
    mean_difference: float
    label_flips: int  # all within the tolerance, or there would be no report
    beyond_tolerance: int  # without a flip
    tolerance: float


def agreement(pairs: Sequence[tuple[Contestant, Sequence[ServedRow]]], dtype: Literal["float32", "float16", "bfloat16"]) -> Agreement:
    """Compare each adapter's served rows with its PEFT logits. What the engine refused is not compared.

    Raises GuardError if a label flips with a difference beyond the tolerance, if the mean difference or more than BEYOND_SHARE of the
    differences are beyond it, or if nothing was compared: then nothing says that the engine serves what was trained, and no figure of
    it may be published.
    """
    tolerance = TOLERANCE_NATS[dtype]
    differences: list[float] = []
    flips: list[tuple[float, str]] = []
    for contestant, rows in pairs:
        decide = contestant.card.calibration.verdict
        for row in rows:
            if row.logit is None:
                continue
            peft = contestant.peft_logits[row.id]
            differences.append(abs(row.logit - peft))
            if decide(contestant.rule, row.logit).violates != decide(contestant.rule, peft).violates:
                flips.append((differences[-1], f"{contestant.name} on {row.id}: PEFT {peft:+.4f}, engine {row.logit:+.4f}"))
    where = pairs[0][0].folder.parent
    if not differences:
        refusal = next((row.refusal for _, rows in pairs for row in rows), None)
        raise GuardError("the served engine refused every prompt", where=where, got=refusal, remedy="Run `make doctor`")
    mean = sum(differences) / len(differences)
    beyond = sum(difference > tolerance for difference in differences)
    outside = [what for difference, what in sorted(flips, reverse=True) if difference > tolerance]
    if outside or mean > tolerance or beyond > BEYOND_SHARE * len(differences):
        raise GuardError(
            f"the served engine and PEFT disagree beyond numerical noise ({tolerance} nats in {dtype}): "
            f"{len(outside)} labels flip, {beyond} of {len(differences)} logits differ by more, mean difference {mean:.4f}",
            where=where,
            got="; ".join(outside[:3]) or None,
            remedy="Run `make doctor` and the parity tests; the engine does not serve what was trained",
        )
    return Agreement(
        prompts=len(differences),
        max_difference=max(differences),
        mean_difference=mean,
        label_flips=len(flips),
        beyond_tolerance=beyond,
        tolerance=tolerance,
    )

"""Whether the served engine answers what the training stage computed without it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from eval.served import ServedRow
from eval.trial import Contestant
from guard.errors import GuardError
from guard.files.yaml_file import Strict

# How far two correct implementations may differ in the verdict's logit, in nats: other kernels,
# other orders of summation. Measured on the tiny base with random adapters: 3e-5 at most in
# float32, 0.125 in bfloat16 (48 prompts; the mean is 0.02, and PEFT itself is as far from its own
# float32 logits). In 8 bits the last digit decides which way an activation is rounded, so that two
# float32 and float64 are 0.06 apart in the mean, float32 and bfloat16 0.1. The others are not
# measured.
TOLERANCE_NATS = {"float32": 0.001, "float16": 0.1, "bfloat16": 0.5}
TOLERANCE_NATS |= {"int8": 1.5, "fp8": 1.5, "nf4": 0.5}

# Noise has no direction and spares most logits: the measured mean is below 3e-5 in float32 and 0.02
# in bfloat16.
MEAN_SHARE = 0.1  # of the tolerance
# A correct engine may have one prompt in so many, but at least one, beyond the tolerance without a
# flip (logits far from the threshold, where bfloat16 has wider steps). The same holds for flips
# within the tolerance (logits next to the threshold), and for refusals. Noisier types have more.
PROMPTS_PER_EXCEPTION = 100

ServedMethods = Sequence[tuple[Contestant, Sequence[ServedRow]]]


class Agreement(Strict):
    """PEFT against the served engine over a method's seeds: differences of logits, in nats."""

    prompts: int
    max_difference: float
    mean_difference: float
    label_flips: int  # all within the tolerance, or there would be no report
    beyond_tolerance: int  # without a flip
    tolerance: float


def agreement(served: ServedMethods, precision: str) -> Agreement:
    """Compare each contestant's served rows with its reference logits. What the engine refused is
    not compared.

    Raises GuardError that names each broken limit: a label that flips with a difference beyond the
    tolerance; a mean difference beyond MEAN_SHARE of the tolerance; more than one prompt in
    PROMPTS_PER_EXCEPTION that flips, differs by more, or was refused. Then nothing shows that the
    engine serves what was trained, and none of its figures may be published.
    """
    folder = served[0][0].folder.parent
    _refuse_gaps(served, folder)
    tolerance = TOLERANCE_NATS[precision]
    differences, flips = _differences(served)
    flips_beyond = sum(not difference <= tolerance for difference, _ in flips)
    measured = Agreement(
        prompts=len(differences),
        max_difference=max(differences),
        mean_difference=sum(differences) / len(differences),
        label_flips=len(flips),
        beyond_tolerance=sum(not it <= tolerance for it in differences) - flips_beyond,
        tolerance=tolerance,
    )
    broken = _broken(measured, flips_beyond)
    if broken:
        largest = [text for _, text in sorted(flips, reverse=True)[:3]]
        problem = "the served engine and PEFT disagree beyond numerical noise (tolerance "
        problem += f"{tolerance} nats in {precision}): {'; '.join(broken)}"
        remedy = "Run `make doctor` and the parity tests; the engine does not serve what was "
        remedy += "trained"
        raise GuardError(problem, where=folder, got="; ".join(largest) or None, remedy=remedy)
    return measured


def _differences(served: ServedMethods) -> tuple[list[float], list[tuple[float, str]]]:
    differences: list[float] = []
    flips: list[tuple[float, str]] = []
    for contestant, rows in served:
        calibration, rule = contestant.card.calibration, contestant.rule
        for row in rows:
            if row.logit is None:
                continue
            reference = contestant.reference_logits[row.id]
            differences.append(abs(row.logit - reference))
            verdicts = [calibration.verdict(rule, logit) for logit in (row.logit, reference)]
            if verdicts[0].violates != verdicts[1].violates:
                logits = f"PEFT {reference:+.4f}, engine {row.logit:+.4f}"
                flips.append((differences[-1], f"{contestant.name} on {row.id}: {logits}"))
    return differences, flips


def _broken(measured: Agreement, flips_beyond: int) -> list[str]:
    n, few = measured.prompts, _few(measured.prompts, measured.tolerance)
    largest_mean = MEAN_SHARE * measured.tolerance
    broken = []
    if flips_beyond:
        broken.append(f"{flips_beyond} labels flip beyond the tolerance")
    if measured.label_flips > few:
        broken.append(f"{measured.label_flips} of {n} labels flip, at most {few} may")
    if measured.beyond_tolerance > few:
        count = f"{measured.beyond_tolerance} of {n}"
        broken.append(f"{count} logits differ by more without a flip, at most {few} may")
    if not measured.mean_difference <= largest_mean:  # a NaN too
        mean = f"the mean difference is {measured.mean_difference:.2g} nats"
        broken.append(f"{mean}, at most {largest_mean:g} may be")
    return broken


def _refuse_gaps(served: ServedMethods, folder: Path) -> None:
    """Raise GuardError for many refused rows: those that are left may be the easy ones."""
    prompts = sum(len(rows) for _, rows in served)
    refused: list[ServedRow] = []
    for _, rows in served:
        refused += [row for row in rows if row.logit is None]
    if len(refused) > _few(prompts) or len(refused) == prompts:
        problem = f"the served engine refused {len(refused)} of {prompts} prompts, too many to "
        problem += f"compare it with PEFT (at most {_few(prompts)} may be missing)"
        got = "; ".join(f"{row.id}: {row.refusal}" for row in refused[:3]) or None
        remedy = "Run `make doctor`; take conversations that the recipe's context_tokens cannot "
        remedy += "hold out of the test split"
        raise GuardError(problem, where=folder, got=got, remedy=remedy)


def _few(n: int, tolerance: float = 0.0) -> int:
    noise = max(1.0, tolerance / TOLERANCE_NATS["bfloat16"])
    return max(1, int(n * noise) // PROMPTS_PER_EXCEPTION)

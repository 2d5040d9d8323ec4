"""Whether the served engine answers what the training stage computed without it.

Knows nothing of labels or quality.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from eval.served import ServedRow
from eval.trial import Contestant
from guard.errors import GuardError
from guard.files.yaml_file import Strict
from guard.recipe import Dtype

# How far two correct implementations may differ in the verdict's logit, in nats: other kernels,
# other orders of summation. Measured on the tiny base with random adapters: 3e-5 at most in
# float32, 0.125 in bfloat16 (48 prompts; the mean is 0.02, and PEFT itself is as far from its own
# float32 logits). float16 is not measured.
TOLERANCE_NATS: dict[Dtype, float] = {"float32": 0.001, "float16": 0.1, "bfloat16": 0.5}

# Noise has no direction and spares most logits: the measured mean is below 3e-5 in float32 and 0.02
# in bfloat16.
MEAN_SHARE = 0.1  # of the tolerance
# A correct engine may have one prompt in so many, but at least one, beyond the tolerance without a
# flip (logits far from the threshold, where bfloat16 has wider steps). The same holds for flips
# within the tolerance (logits next to the threshold), and for refusals.
PROMPTS_PER_EXCEPTION = 100


class Agreement(Strict):
    """PEFT against the served engine, over a method's seeds.

    Differences are absolute differences of logits, in nats.
    """

    prompts: int
    max_difference: float
    mean_difference: float
    label_flips: int  # all within the tolerance, or there would be no report
    beyond_tolerance: int  # without a flip
    tolerance: float


@dataclass(frozen=True)
class LogitPair:
    """The logits of the reference and of the engine on one prompt, in nats.

    `is_flip`: whether the labels differ.
    """

    prompt: str
    reference: float
    engine: float
    is_flip: bool

    @property
    def difference(self) -> float:
        """The absolute difference of the logits, in nats."""
        return abs(self.engine - self.reference)

    def __str__(self) -> str:
        return f"{self.prompt}: PEFT {self.reference:+.4f}, engine {self.engine:+.4f}"


def agreement(served: Sequence[tuple[Contestant, Sequence[ServedRow]]], dtype: Dtype) -> Agreement:
    """Compare each contestant's served rows with its reference logits. What the engine refused is
    not compared.

    Raises GuardError that names each broken limit: a label that flips with a difference beyond the
    tolerance; a mean difference beyond MEAN_SHARE of the tolerance; more than one prompt in
    PROMPTS_PER_EXCEPTION that flips, differs by more, or was refused. Then nothing shows that the
    engine serves what was trained, and none of its figures may be published.
    """
    tolerance = TOLERANCE_NATS[dtype]
    folder = served[0][0].folder.parent
    rows: list[ServedRow] = []
    pairs: list[LogitPair] = []
    for contestant, served_rows in served:
        rows += served_rows
        pairs += _pairs(contestant, served_rows)
    _refuse_gaps(rows, folder)
    beyond = [pair for pair in pairs if pair.difference > tolerance]
    measured = Agreement(
        prompts=len(pairs),
        max_difference=max(pair.difference for pair in pairs),
        mean_difference=sum(pair.difference for pair in pairs) / len(pairs),
        label_flips=sum(pair.is_flip for pair in pairs),
        beyond_tolerance=sum(not pair.is_flip for pair in beyond),
        tolerance=tolerance,
    )
    broken = _broken(measured, flips_beyond=sum(pair.is_flip for pair in beyond))
    if broken:
        largest = sorted(pairs, key=lambda pair: pair.difference, reverse=True)
        flips = [str(pair) for pair in largest if pair.is_flip]
        raise GuardError(
            "the served engine and PEFT disagree beyond numerical noise "
            f"(tolerance {tolerance} nats in {dtype}): {'; '.join(broken)}",
            where=folder,
            got="; ".join(flips[:3]) or None,
            remedy="Run `make doctor` and the parity tests; the engine does not serve what was "
            "trained",
        )
    return measured


def _pairs(contestant: Contestant, rows: Sequence[ServedRow]) -> list[LogitPair]:
    calibration = contestant.card.calibration
    pairs = []
    for row in rows:
        if row.logit is None:
            continue
        reference = contestant.reference_logits[row.id]
        verdicts = [calibration.verdict(contestant.rule, x) for x in (row.logit, reference)]
        is_flip = verdicts[0].violates != verdicts[1].violates
        prompt = f"{contestant.name} on {row.id}"
        pairs.append(LogitPair(prompt, reference, row.logit, is_flip))
    return pairs


def _broken(measured: Agreement, flips_beyond: int) -> list[str]:
    """The broken limits, each as a sentence."""
    n, few = measured.prompts, _few(measured.prompts)
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


def _refuse_gaps(rows: Sequence[ServedRow], folder: Path) -> None:
    """Raise GuardError if the engine refused all `rows`, or more than one in PROMPTS_PER_EXCEPTION:
    the rows that are left may be the easy ones.
    """
    refused = [row for row in rows if row.logit is None]
    if len(refused) > _few(len(rows)) or len(refused) == len(rows):
        raise GuardError(
            f"the served engine refused {len(refused)} of {len(rows)} prompts, too many to compare "
            f"it with PEFT (at most {_few(len(rows))} may be missing)",
            where=folder,
            got="; ".join(f"{row.id}: {row.refusal}" for row in refused[:3]) or None,
            remedy="Run `make doctor`; take conversations that the recipe's context_tokens cannot "
            "hold out of the test split",
        )


def _few(n: int) -> int:
    return max(1, n // PROMPTS_PER_EXCEPTION)

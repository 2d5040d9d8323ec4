"""The engine's answers on both draws of a rule, and the rule's figures.

Knows nothing of where the draws come from or of other rules.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from eval import metrics
from eval.quality import mean_over
from eval.retest.draws import TwoDraws
from eval.retest.report import DrawAccuracy, RetestedRule
from eval.scored import outcomes
from eval.served import Served
from guard.conversation.example import Example
from guard.verdict import expected_calibration_error


class ServedDraws:
    """The engine's answers on both draws of one rule."""

    def __init__(self, draws: TwoDraws) -> None:
        self.draws = draws
        self.first = Served(draws.first, with_base=False)
        self.second = Served(draws.second, with_base=False)

    def outcomes(self, method: str) -> tuple[metrics.Outcomes, metrics.Outcomes]:
        """Which answers are right, on the first and on the second draw."""
        first = outcomes(self.draws.first.examples, self.first.answers_by_seed(method))
        second = outcomes(self.draws.second.examples, self.second.answers_by_seed(method))
        return first, second

    def retested(self) -> RetestedRule:
        """The rule's figures."""
        calibration = {method: self._calibration(method) for method in self.draws.first.methods}
        return RetestedRule(
            n_first=len(self.draws.first.examples),
            n_second=len(self.draws.second.examples),
            dropped=self.draws.dropped,
            seeds=self.draws.first.seeds,
            methods={name: _accuracy(*self.outcomes(name)) for name in calibration},
            strata={name: self._stratum(name) for name in self._strata()},
            ece={method: ece for method, (ece, _) in calibration.items()},
            ece_expected={method: expected for method, (_, expected) in calibration.items()},
        )

    def _strata(self) -> list[str]:
        """The strata of both draws, where the first has several."""
        first = {_stratum_of(example) for example in self.draws.first.examples}
        second = {_stratum_of(example) for example in self.draws.second.examples}
        if len(first) < 2:
            return []
        return sorted(first & second)

    def _stratum(self, name: str) -> dict[str, DrawAccuracy]:
        """The accuracy on one stratum, by method."""
        by_method = {}
        for method in self.draws.first.methods:
            first, second = self.outcomes(method)
            by_method[method] = _accuracy(
                _on_stratum(first, self.draws.first.examples, name),
                _on_stratum(second, self.draws.second.examples, name),
            )
        return by_method

    def _calibration(self, method: str) -> tuple[float | None, float | None]:
        """The calibration error on both draws together, and the expected one, as means over seeds.

        None where the engine refused an answer.
        """
        labels = [
            example.label for example in (*self.draws.first.examples, *self.draws.second.examples)
        ]
        eces: list[float | None] = []
        expected: list[float | None] = []
        second = self.second.answers_by_seed(method)
        for seed, answers in self.first.answers_by_seed(method).items():
            probabilities = [answer.p_violation for answer in (*answers, *second[seed])]
            answered = [probability for probability in probabilities if probability is not None]
            if len(answered) < len(labels):
                return None, None
            eces.append(expected_calibration_error(labels, answered))
            expected.append(metrics.ece_expected(answered))
        return mean_over(eces), mean_over(expected)


def _accuracy(first: metrics.Outcomes, second: metrics.Outcomes) -> DrawAccuracy:
    change = metrics.bootstrap_mean_change([(first, second)])
    return DrawAccuracy(
        first=float(first.values.mean()),
        first_ci95=metrics.accuracy_interval(first),
        second=float(second.values.mean()),
        second_ci95=metrics.accuracy_interval(second),
        change=change.mean,
        change_ci95=change.ci95,
    )


def _stratum_of(example: Example) -> str:
    return str(example.meta.get("stratum", ""))


def _on_stratum(
    outcomes: metrics.Outcomes, examples: Sequence[Example], stratum: str
) -> metrics.Outcomes:
    in_stratum = np.array([_stratum_of(example) == stratum for example in examples])
    return metrics.Outcomes(outcomes.values[:, in_stratum], outcomes.groups[in_stratum])

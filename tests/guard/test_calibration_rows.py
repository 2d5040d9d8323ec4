"""Thresholds are for one's own rows where there are generated ones beside them."""

from guard.calibration_rows import OWN_ROWS, for_calibration


def test_a_threshold_is_for_one_s_own_rows_where_there_are_enough_of_them() -> None:
    labels = [0, 1] * OWN_ROWS + [0] * 3
    own = list(range(1, 2 * OWN_ROWS + 1))  # as many of either label
    is_generated = [index not in own for index in range(len(labels))]
    logits = [float(index) for index in range(len(labels))]
    of_own = [logits[index] for index in own], [labels[index] for index in own]

    def chosen(generated: list[bool], max_fpr: float | None = None) -> object:
        return for_calibration(logits, labels, generated, max_fpr)

    assert chosen(is_generated) == chosen(is_generated, 1 / OWN_ROWS) == of_own
    assert chosen(is_generated, 0.9 / OWN_ROWS) == (logits, labels)
    for nothing_mixed in (False, True):
        assert chosen([nothing_mixed] * len(labels)) == (logits, labels)
    for missing in (1, 2):
        fewer = [generated or index == missing for index, generated in enumerate(is_generated)]
        assert chosen(fewer) == (logits, labels)

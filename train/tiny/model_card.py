"""The embedded base's README from its provenance. Knows nothing of checkpoints."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from train.tiny.lessons.lesson import RULE_TALK_SHARE

COLUMNS = 100
OTHER_LICENCE = "other"
PROBE_HEADER = """\
| file | data set | licence | rows used | naive Bayes over words | linear probe |
|---|---|---|---|---|---|
"""


def model_card(provenance: Mapping[str, Any]) -> str:
    """The model card of what `provenance.json` describes."""
    template = Path(__file__).with_suffix(".md").read_text(encoding="utf-8")
    corpora = provenance["corpora"]
    licence = _licence(corpora)
    return template.format(
        **provenance["shape"],
        **provenance["running_means_at_the_end"],
        license=licence.lower(),
        licence_of_weights=_licence_of_weights(licence),
        parameters=f"{provenance['parameters'] / 1e6:.1f}",
        teacher_name=provenance["teacher"]["name"],
        teacher_licence=provenance["teacher"]["licence"],
        steps=provenance["steps"],
        peak_learning_rate=provenance["peak_learning_rate"],
        notes="".join(f". {note}" for note in provenance["notes"]),
        corpora=_table(_corpus_row(corpus) for corpus in corpora),
        generated=_generated(provenance["rules"], provenance.get("joint")),
        zero_shot=_wrapped(_zero_shot(provenance), "- "),
        probe=_probe(provenance["linear_probe"]),
    )


def _licence(corpora: Sequence[Mapping[str, Any]]) -> str:
    """The share-alike licence that a corpus hands on to the weights; `other` where there is
    none.
    """
    licences: set[str] = set()
    for corpus in corpora:
        licences.update(corpus["licences"])
    share_alike = [licence for licence in licences if "SA" in licence.upper().split("-")]
    return min(share_alike, default=OTHER_LICENCE)


def _licence_of_weights(licence: str) -> str:
    if licence == OTHER_LICENCE:
        return "that of the corpora"
    return f"{licence}, the strictest of the corpora"


def _corpus_row(corpus: Mapping[str, Any]) -> list[str]:
    return [
        corpus["name"],
        ", ".join(corpus["origins"]),
        f"{corpus['conversations']:,}",
        ", ".join(corpus["licences"]),
        f"`{corpus['digest'][:19]}`",
    ]


def _generated(rules: Sequence[str], joint: Mapping[str, Any] | None) -> str:
    """The topics of generated conversations, and how much of the served rules the base has met."""
    text = """A third to two fifths of the conversations that no rule's phrase book wrote are
        generated situations about everyday acts (`train/tiny/lessons/situations.yaml`), of none of
        the served rules' domains."""
    if rules:
        text += f""" In the last run, {RULE_TALK_SHARE:.0%} of all were written from the phrase
            books of these rules (`data/generator/phrases`): {", ".join(rules)}. **So the base has
            met what these rules are about**, as a large model has; of their phrasings only those
            that adapters are trained on, none of the test's `unseen` ones; and it was asked about
            single acts ("The assistant must not repeat the doctor."), not a rule's own question."""
    if not joint:
        return _wrapped(text)
    return f"{_wrapped(text)}\n\n{_wrapped(_joint(joint))}"


def _joint(joint: Mapping[str, Any]) -> str:
    return f"""In {joint["steps"]:,} steps of {joint["rows_a_step"]} rows at a peak learning rate of
        {joint["peak_learning_rate"]:g}, the base was also trained together with one aLoRA for each
        of these rules, which were thrown away (`train/tiny/build_joint.py`):
        {", ".join(joint["rules"])}. The rows are of the same grammar as those that adapters are
        trained on, of another seed, and none has an `unseen` phrasing. **So the base was made for
        the shipped rules: how near an aLoRA comes to a LoRA on these says little about a rule that
        is new to it.**"""


def _zero_shot(provenance: Mapping[str, Any]) -> str:
    everyday = """a zero-shot judge it knows short rules about everyday acts ("The assistant must
        not promise to paint the fence."). On the served rules it is close to chance."""
    if "joint" not in provenance:
        return f"As {everyday}"
    accuracy = provenance.get("zero_shot")
    if not accuracy:
        return f"Before it was trained together with adapters: as {everyday} Not measured since."
    return f"""As a zero-shot judge it is right on {100 * accuracy["mean"]:.0f} % of the test rows
        of the {accuracy["rules"]} rules that it was made for (from {100 * accuracy["lowest"]:.0f}
        to {100 * accuracy["highest"]:.0f} %; half would be chance)."""


def _probe(files: Mapping[str, Mapping[str, Any]]) -> str:
    if not files:
        return "Not measured on these weights."
    return PROBE_HEADER + _table(_probe_row(name, probed) for name, probed in files.items())


def _probe_row(name: str, probed: Mapping[str, Any]) -> list[str]:
    return [
        name,
        ", ".join(probed["origins"]),
        ", ".join(probed["licences"]),
        f"{probed['rows_used']:,}",
        f"{probed['bag_of_words']:.3f}",
        f"{probed['probe']:.3f}",
    ]


def _table(rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _wrapped(text: str, bullet: str = "") -> str:
    """One paragraph, or one item of a list, in lines of COLUMNS."""
    return textwrap.fill(
        " ".join(text.split()),
        COLUMNS,
        initial_indent=bullet,
        subsequent_indent=" " * len(bullet),
        break_long_words=False,
        break_on_hyphens=False,
    )

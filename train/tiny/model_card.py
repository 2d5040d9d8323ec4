"""The embedded base's README from its provenance. Knows nothing of checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from train.tiny.lessons import RULE_TALK_SHARE


def model_card(provenance: Mapping[str, Any]) -> str:
    """The model card of what `provenance.json` describes."""
    shape, end = provenance["shape"], provenance["running_means_at_the_end"]
    corpora = provenance["corpora"]
    licence = _licence([licence for corpus in corpora for licence in corpus["licences"]])
    rows = [
        [
            one["name"],
            ", ".join(one["origins"]),
            f"{one['conversations']:,}",
            ", ".join(one["licences"]),
            f"`{one['digest'][:19]}`",
        ]
        for one in corpora
    ]
    return f"""---
license: {licence.lower()}
base_model: none (trained from scratch; word embeddings of sentence-transformers/all-MiniLM-L6-v2)
library_name: transformers
---
# tiny: the embedded base

A causal language model of Qwen3's architecture with {provenance["parameters"] / 1e6:.1f} M parameters, so that everything in this
repository runs on two CPU cores with the same code that serves Qwen3-4B. It is for trying out and for tests. **For real rules use
Qwen3** (`MODEL=qwen3-4b`). `make base` writes this file from `provenance.json`.

| | |
|---|---|
| Shape | hidden {shape["hidden_size"]}, {shape["num_hidden_layers"]} layers, {shape["num_attention_heads"]} heads \
({shape["num_key_value_heads"]} KV heads, head size {shape["head_dim"]}), SwiGLU {shape["intermediate_size"]:,}, tied embeddings, \
{shape["vocab_size"]:,} token ids, bfloat16 |
| Context | {shape["max_position_embeddings"]:,} tokens; distilled on at most about 1,100 |
| Tokenizer | MiniLM's uncased WordPiece cut to the pieces that matter, plus Qwen3's 26 control tokens; Qwen3's chat-template structure |
| Teacher | {provenance["teacher"]["name"]}, {provenance["teacher"]["licence"]}: word embeddings (frozen) and sentence embeddings |
| Licence of the weights | {"that of the corpora" if licence == "other" else f"{licence}, the strictest of the corpora"} |
| Training | {provenance["steps"]:,} steps of about 4,000 tokens, peak learning rate {provenance["peak_learning_rate"]:g}: the keys \
and values of the last three layers at the end of every turn and sentence predict the teacher's embedding of it, and in generated \
conversations who does what; rule questions; next-token prediction at a tenth of \
the positions{"".join(f". {note}" for note in provenance["notes"])} |
| At their end | cosine to the teacher {end["turn_cosine"]:.2f}, rule questions answered right {end["verdict_accuracy"]:.0%} of the time \
(running means over training batches) |

## Corpora

| corpus | data set | conversations | licence | digest |
|---|---|---|---|---|
{_table(rows)}

{_generated(provenance["rules"])}{_joint(provenance.get("joint"))}

## What it cannot do

- It does not write: next-token prediction only shapes its states.
- What its vocabulary lacks it does not see: a word with a character from outside it (an arrow, a Chinese letter), or of more than 64
  letters, is one unknown token, and a conversation of such words gets a verdict all the same.
- {_zero_shot(provenance)}
- It reads single sentences; irony, long-range reference, arithmetic, code and other languages are beyond it. Case and accents are lost.

## Linear probe

`python -m train.tiny.probe FILES` prints the mean AUROC of a logistic regression on the frozen states over four grouped folds, at most
1,500 rows a file, beside a word naive Bayes on the same folds, the keyword floor.

{_probe(provenance["linear_probe"])}
"""


def _licence(licences: Sequence[str]) -> str:
    """The share-alike licence that a corpus hands on to the weights; `other` where there is
    none.
    """
    return next(
        (licence for licence in sorted(licences) if "SA" in licence.upper().split("-")), "other"
    )


def _generated(rules: Sequence[str]) -> str:
    everyday = """A third to two fifths of the conversations are generated situations about everyday acts
(`train/tiny/situations.yaml`), of none of the served rules' domains."""
    if not rules:
        return everyday
    return f"""{everyday} In the last run, {RULE_TALK_SHARE:.0%} were written from the phrase books of these rules
(`data/generator/phrases`): \
{", ".join(rules)}.
**So the base has met what these rules are about**, as a large model has; of their phrasings only those that adapters are trained on,
none of the test's `unseen` ones; and it was asked about single acts ("The assistant must not repeat the doctor."), not a rule's own
question."""


def _joint(joint: Mapping[str, Any] | None) -> str:
    if not joint:
        return ""
    return f"""

In {joint["steps"]:,} steps of {joint["rows_a_step"]} rows at a peak learning rate of {joint["peak_learning_rate"]:g}, the base was \
also trained together with one aLoRA for each of these rules, which were thrown away (`train/tiny/build_joint.py`): \
{", ".join(joint["rules"])}.
The rows are of the same grammar as those that adapters are trained on, of another seed, and none has an `unseen` phrasing. **So the base
was made for the shipped rules: how near an aLoRA comes to a LoRA on these says little about a rule that is new to it.**"""


def _zero_shot(provenance: Mapping[str, Any]) -> str:
    knows = """a zero-shot judge it knows short rules about everyday acts ("The assistant must not promise to paint the
  fence."). On the served rules it is close to chance."""
    if "joint" not in provenance:
        return f"As {knows}"
    if found := provenance.get("zero_shot"):
        return (
            f"As a zero-shot judge it is right on {100 * found['mean']:.0f} % of the test rows of the {found['rules']} rules that it was "
            f"made for\n  (from {100 * found['lowest']:.0f} to {100 * found['highest']:.0f} %; half would be chance)."
        )
    return f"Before it was trained together with adapters: as {knows} Not measured since."


def _table(rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _probe(files: Mapping[str, Mapping[str, Any]]) -> str:
    if not files:
        return "Not measured on these weights."
    rows = [
        [
            name,
            ", ".join(one["origins"]),
            ", ".join(one["licences"]),
            f"{one['rows_used']:,}",
            f"{one['floor']:.3f}",
            f"{one['probe']:.3f}",
        ]
        for name, one in files.items()
    ]
    return (
        "| file | data set | licence | rows used | keyword floor | linear probe |\n|---|---|---|---|---|---|\n"
        + _table(rows)
    )

"""Linear-probe AUROC of a base on labelled files: what its frozen states know, beside a
naive Bayes over words. Knows nothing of adapters.

    python -m train.tiny.probe FILES...    # JSON lines of {messages, label, meta.group?}, .gz too

With `--json runs/base/probe.json`, the next `make base` writes the figures into the model card, if
they are of the same weights.

The probe is a logistic regression on the hidden states of the prompt's conversation turn: after the
layer where the tiny base's are clearest and after the last, each as the mean and the maximum over
the ends of turns and sentences, beside the last two. The naive Bayes over words has the same folds.
"""

from __future__ import annotations

import argparse
import glob
import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from guard.arguments import count
from guard.conversation.example import Message, as_messages
from guard.errors import GuardError, exits_cleanly
from guard.layout import ROOT
from train.tiny.lessons.corpus import licence_of, origin_of, rows_of

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from guard.prompt.decoder import PromptBuilder

ROWS = 1500  # the most of a file, so that a probe takes minutes on two cores
MAX_TOKENS = 1024  # the most that are read of a conversation
BATCH = 8  # conversations
FOLDS = 4
HEADER = "| file | rows used | naive Bayes over words | linear probe |\n|---|---|---|---|"


@dataclass(frozen=True)
class LabelledFile:
    """The rows of one file that are probed."""

    name: str
    rows: list[dict[str, Any]]

    @property
    def labels(self) -> list[int]:
        """1 = violates, by row."""
        return [row["label"] for row in self.rows]

    @property
    def conversations(self) -> list[tuple[Message, ...]]:
        """The messages, by row."""
        return [as_messages(row["messages"], where=self.name) for row in self.rows]

    @property
    def groups(self) -> list[str]:
        """What may not stand in two folds, by row: the stated group, or each row by itself."""
        numbered = enumerate(self.rows)
        return [str(row.get("meta", {}).get("group", number)) for number, row in numbered]

    @property
    def stated(self) -> dict[str, Any]:
        """What the rows say of where they come from."""
        origins = {origin_of(row) for row in self.rows}
        licences = {licence_of(row) for row in self.rows}
        return {"origins": sorted(origins - {""}), "licences": sorted(licences)}


@exits_cleanly
def main() -> None:
    """Probe every file and print one table row each."""
    args = _arguments()
    files = _labelled_files(args.files)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
    figures = {}
    print(HEADER)
    for file in files:
        aurocs = _aurocs(file, _states(args.base, file.conversations, args.layer))
        rows_used = len(file.rows)
        figures[file.name] = {**file.stated, "rows_used": rows_used, **aurocs}
        scores = f"{aurocs['bag_of_words']:.3f} | {aurocs['probe']:.3f}"
        print(f"| {file.name} | {rows_used} | {scores} |", flush=True)
    if args.json:
        report = {"weights_sha256": _sha256_of(args.base), "files": figures}
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+")
    parser.add_argument(
        "--base",
        default=str(ROOT / "recipes" / "models" / "tiny"),
        help="checkpoint folder or hub id",
    )
    parser.add_argument(
        "--layer",
        type=count,
        default=4,
        help="the earlier of the two layers probed (default %(default)s)",
    )
    parser.add_argument("--json", type=Path, help="also write the figures here")
    return parser.parse_args()


def _sha256_of(base: str) -> str | None:
    """The SHA-256 of the weights in a checkpoint's folder; None for a hub id."""
    weights = Path(base) / "model.safetensors"
    if not weights.is_file():
        return None
    return hashlib.sha256(weights.read_bytes()).hexdigest()


def _labelled_files(patterns: Sequence[str]) -> list[LabelledFile]:
    """A sample of every file that a pattern names. Raises GuardError for none, or for two of one
    name.
    """
    paths: list[Path] = []
    for pattern in patterns:
        paths += map(Path, sorted(glob.glob(pattern)))  # noqa: PTH207 - may be absolute
    if not paths:
        raise GuardError(
            "no such file",
            got=", ".join(patterns),
            remedy="Name JSON-lines files of labelled conversations, or a pattern for some",
        )
    names = [path.name.split(".")[0] for path in paths]
    if len(set(names)) < len(names):
        raise GuardError(
            "two files have the same name",
            got=", ".join(names),
            remedy="Rename one: the table goes by name",
        )
    return [LabelledFile(name, sample(path)) for name, path in zip(names, paths, strict=True)]


def sample(path: Path, at_most: int = ROWS) -> list[dict[str, Any]]:
    """All rows of a labelled file, or `at_most` of them drawn at random, always the same. Raises
    GuardError naming a bad row.
    """
    rows = []
    for where, row in rows_of(path):
        if row.get("label") not in (0, 1):
            raise GuardError(
                "label must be 0 or 1",
                where=where,
                got=repr(row.get("label")),
                remedy="1 for a violation, 0 for none",
            )
        as_messages(row.get("messages"), where=where)
        rows.append(row)
    return random.Random(0).sample(rows, min(at_most, len(rows)))


def _aurocs(file: LabelledFile, features: NDArray[np.float32]) -> dict[str, float]:
    """AUROC of the naive Bayes and of the probe, means over the same grouped folds."""
    import numpy as np
    from sklearn.feature_extraction.text import CountVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import GroupKFold
    from sklearn.naive_bayes import MultinomialNB
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    texts = np.array([_text_of(talk) for talk in file.conversations], dtype=object)
    labels = np.array(file.labels)
    grouped = GroupKFold(FOLDS, shuffle=True, random_state=0)
    folds = list(grouped.split(features, labels, file.groups))
    naive_bayes = make_pipeline(CountVectorizer(min_df=2), MultinomialNB())
    probe = make_pipeline(StandardScaler(), LogisticRegression(C=0.003, max_iter=500))
    return {
        "bag_of_words": _mean_auroc(naive_bayes, texts, labels, folds),
        "probe": _mean_auroc(probe, features, labels, folds),
    }


def _text_of(conversation: Sequence[Message]) -> str:
    return " ".join(message.content for message in conversation)


def _mean_auroc(
    classifier: Any, inputs: NDArray[Any], labels: NDArray[Any], folds: Sequence[Any]
) -> float:
    """The mean AUROC of a scikit-learn classifier that is fitted anew to the training rows of each
    fold.
    """
    from sklearn.metrics import roc_auc_score

    aurocs = []
    for train, test in folds:
        classifier.fit(inputs[train], labels[train])
        scores = classifier.predict_proba(inputs[test])[:, 1]
        aurocs.append(float(roc_auc_score(labels[test], scores)))
    return sum(aurocs) / len(aurocs)


def _states(base: str, conversations: list[tuple[Message, ...]], layer: int) -> NDArray[np.float32]:
    """Features `[rows, 6 * hidden]`; at most MAX_TOKENS tokens of each conversation, batched by
    length.
    """
    import numpy as np
    import torch
    from tqdm import tqdm
    from transformers import AutoModelForCausalLM

    from guard.prompt.decoder import PromptBuilder

    builder = PromptBuilder.from_base(base)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    prompts = [builder.prefix_ids(conversation)[:MAX_TOKENS] for conversation in conversations]
    order = sorted(range(len(prompts)), key=lambda row: len(prompts[row]))
    features = np.zeros((len(prompts), 6 * model.config.hidden_size), dtype=np.float32)
    for start in tqdm(range(0, len(order), BATCH), desc="states", unit="batch", leave=False):
        rows = order[start : start + BATCH]
        ids = _right_padded([prompts[row] for row in rows])
        with torch.inference_mode():
            hidden = model.model(ids, output_hidden_states=True, use_cache=False).hidden_states
        for index, row in enumerate(rows):
            ends = _ends_of(prompts[row], builder)
            picked = [hidden[depth][index, ends] for depth in (layer, -1)]
            features[row] = torch.cat([_pooled(states) for states in picked]).numpy()
    return features


def _right_padded(prompts: Sequence[list[int]]) -> torch.Tensor:
    """Token ids `[rows, longest]`; a causal model needs no mask for padding on the right."""
    import torch

    ids = torch.zeros(len(prompts), max(map(len, prompts)), dtype=torch.long)
    for index, prompt in enumerate(prompts):
        ids[index, : len(prompt)] = torch.tensor(prompt)
    return ids


def _ends_of(prompt: list[int], builder: PromptBuilder) -> list[int]:
    """Positions of line breaks and full stops behind the scaffold; the last position where a cut
    turn has none.
    """
    *_, newline = builder.turn_ids(Message("user", ""))
    marks = {newline}
    for mark in ".?!":
        marks.add(builder.turn_ids(Message("user", mark))[-2])
    head = len(builder.prefix_ids(())) - 2
    ends = [column for column in range(head, len(prompt)) if prompt[column] in marks]
    return ends or [-1]


def _pooled(states: torch.Tensor) -> torch.Tensor:
    """Mean, maximum and the mean of the last two of `[n, hidden]`, `[3 * hidden]`."""
    import torch

    return torch.cat([states.mean(0), states.max(0).values, states[-2:].mean(0)])


if __name__ == "__main__":
    main()

"""Linear-probe AUROC of a base on labelled files: what its frozen states know, beside a keyword
floor. Knows nothing of adapters.

    python -m train.tiny.probe FILES...        # JSON lines of {messages, label, meta.group?}, .gz too

With `--json runs/base/probe.json`, the next `make base` writes the figures into the model card, if
they are of the same weights.

The probe is a logistic regression on the hidden states of the prompt's conversation turn: after the
layer where the tiny base's are clearest and after the last, each as the mean and the maximum over
the ends of turns and sentences, beside the last two. The floor is a naive Bayes over words on the
same split.
"""

from __future__ import annotations

import argparse
import glob
import hashlib
import json
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

from guard.errors import GuardError, exits_cleanly
from guard.example import Message, as_messages
from guard.layout import ROOT
from train.tiny.lessons.corpus import licence_of, origin_of, rows_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

ROWS = 1500  # at most this many a file, so that a probe takes minutes on two cores


@exits_cleanly
def main() -> None:
    """Probe every file and print one table row each."""
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
        type=int,
        default=4,
        help="the earlier of the two layers probed (default %(default)s)",
    )
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    from sklearn.feature_extraction.text import CountVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import roc_auc_score
    from sklearn.model_selection import GroupKFold
    from sklearn.naive_bayes import MultinomialNB
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    paths = [Path(match) for pattern in args.files for match in sorted(glob.glob(pattern))]  # noqa: PTH207 - may be absolute
    if not paths:
        raise GuardError("no such file", got=args.files)
    names = [path.name.split(".")[0] for path in paths]
    if len(set(names)) < len(names):
        raise GuardError(
            "two files have the same name",
            got=", ".join(names),
            remedy="Rename one: the table goes by name",
        )
    samples = [sample(path) for path in paths]
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
    figures = {}
    print("| file | rows used | keyword floor | linear probe |\n|---|---|---|---|")
    for name, rows in zip(names, samples, strict=True):
        labels = [row["label"] for row in rows]
        conversations = [as_messages(row["messages"], where=name) for row in rows]
        texts = [
            " ".join(message.content for message in conversation) for conversation in conversations
        ]
        features = _states(args.base, conversations, args.layer)
        groups = [str(row.get("meta", {}).get("group", number)) for number, row in enumerate(rows)]
        scores: dict[str, list[float]] = {"floor": [], "probe": []}
        for train, test in GroupKFold(4, shuffle=True, random_state=0).split(
            features, labels, groups
        ):
            known, asked = [labels[row] for row in train], [labels[row] for row in test]
            words = make_pipeline(CountVectorizer(min_df=2), MultinomialNB()).fit(
                [texts[row] for row in train], known
            )
            probe = make_pipeline(StandardScaler(), LogisticRegression(C=0.003, max_iter=500)).fit(
                features[train], known
            )
            scores["floor"].append(
                roc_auc_score(asked, words.predict_proba([texts[row] for row in test])[:, 1])
            )
            scores["probe"].append(roc_auc_score(asked, probe.predict_proba(features[test])[:, 1]))
        mean = {name: sum(values) / len(values) for name, values in scores.items()}
        stated = {
            "origins": sorted({origin_of(row) for row in rows} - {""}),
            "licences": sorted({licence_of(row) for row in rows}),
        }
        figures[name] = {**stated, "rows_used": len(rows), **mean}
        print(f"| {name} | {len(rows)} | {mean['floor']:.3f} | {mean['probe']:.3f} |", flush=True)
    if args.json:
        weights = Path(args.base) / "model.safetensors"
        sha256 = hashlib.sha256(weights.read_bytes()).hexdigest() if weights.is_file() else None
        args.json.write_text(
            json.dumps({"weights_sha256": sha256, "files": figures}, indent=2) + "\n"
        )


def sample(path: Path, at_most: int = ROWS) -> list[dict[str, Any]]:
    """All rows of a labelled file, or `at_most` of them drawn at random, always the same. Raises
    GuardError naming a bad row.
    """
    rows = []
    for where, row in rows_of(path):
        if row.get("label") not in (0, 1):
            raise GuardError("label must be 0 or 1", where=where, got=repr(row.get("label")))
        as_messages(row.get("messages"), where=where)
        rows.append(row)
    return random.Random(0).sample(rows, min(at_most, len(rows)))


def _states(base: str, conversations: list[tuple[Message, ...]], layer: int) -> NDArray[np.float32]:
    """Features `[rows, 6 * hidden]`; at most 1,024 tokens of each conversation, batched by
    length.
    """
    import numpy as np
    import torch
    from tqdm import tqdm
    from transformers import AutoModelForCausalLM

    from guard.prompt import PromptBuilder

    builder = PromptBuilder.from_base(base)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    prompts = [builder.prefix_ids(conversation)[:1024] for conversation in conversations]
    order = sorted(range(len(prompts)), key=lambda row: len(prompts[row]))
    *_, newline = builder.turn_ids(Message("user", ""))
    marks = {newline, *(builder.turn_ids(Message("user", mark))[-2] for mark in ".?!")}
    head = len(builder.prefix_ids(())) - 2
    out = np.zeros((len(prompts), 6 * model.config.hidden_size), dtype=np.float32)
    for start in tqdm(range(0, len(order), 8), desc="states", unit="batch", leave=False):
        rows = order[start : start + 8]
        longest = max(len(prompts[row]) for row in rows)
        ids = torch.zeros(
            len(rows), longest, dtype=torch.long
        )  # right padding: a causal model needs no mask for it
        for index, row in enumerate(rows):
            ids[index, : len(prompts[row])] = torch.tensor(prompts[row])
        with torch.inference_mode():
            hidden = model.model(ids, output_hidden_states=True, use_cache=False).hidden_states
        for index, row in enumerate(rows):
            ends = [
                column for column in range(head, len(prompts[row])) if prompts[row][column] in marks
            ] or [-1]  # none in a cut turn
            picked = [hidden[depth][index, ends] for depth in (layer, -1)]
            out[row] = torch.cat(
                [
                    part
                    for states in picked
                    for part in (states.mean(0), states.max(0).values, states[-2:].mean(0))
                ]
            ).numpy()
    return out


if __name__ == "__main__":
    main()

"""`make base CORPUS=…`: rebuild the embedded tiny base from its teacher and corpora. Hours on 2 cores, minutes on a GPU."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from guard.errors import GuardError, exits_cleanly
from guard.layout import ROOT

OUT = ROOT / "recipes" / "models" / "tiny"


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--corpus", required=True, help="JSON-lines files of {messages} (globs, .gz) and hub:<data set>, separated by commas"
    )
    parser.add_argument("--steps", type=int, default=1500, help="optimizer steps of about 4,000 tokens (default %(default)s)")
    parser.add_argument("--lr", type=float, default=1.5e-3, help="peak learning rate (default %(default)s)")
    parser.add_argument("--vocabulary", type=int, default=16_384, help="token ids in all (default %(default)s)")
    parser.add_argument("--out", type=Path, default=OUT, help="where the checkpoint goes (default recipes/models/tiny)")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "base", help="where the resumable state goes")
    return parser.parse_args()


@exits_cleanly
def main() -> None:
    """Corpus, vocabulary, lessons, distillation, checkpoint, card."""
    args = arguments()
    if not args.corpus.strip():
        raise GuardError("no corpus given", remedy="Run `make base CORPUS='path/*.jsonl.gz,hub:org/name'`")
    from guard.prompt import PromptBuilder
    from train.base.corpus import read_corpus
    from train.base.distil import distil
    from train.base.export import export
    from train.base.lessons import Lessons
    from train.base.teacher import FOLDER, Teacher
    from train.base.vocabulary import cut_vocabulary

    sources = read_corpus(args.corpus)
    texts = {message.content for source in sources for conversation in source.conversations for message in conversation}
    vocabulary = cut_vocabulary(FOLDER, sorted(texts), args.vocabulary)
    args.work.mkdir(parents=True, exist_ok=True)
    words = sorted(piece for piece in vocabulary.tokenizer.get_vocab() if re.fullmatch(r"[a-z]{3,}", piece))
    lessons = Lessons(sources, words, Teacher())
    builder = PromptBuilder(vocabulary.tokenizer.backend_tokenizer)
    student = distil(vocabulary, lessons, builder, steps=args.steps, peak_lr=args.lr, checkpoint=args.work / "checkpoint.pt")
    export(student.model, vocabulary.tokenizer, args.out, sources=sources, steps=args.steps)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()

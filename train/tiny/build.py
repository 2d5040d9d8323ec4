"""`make base CORPUS=…`: rebuild the embedded tiny base from its teacher and corpora, in place of
the committed one.

Adapters of the old base do not fit the new one and have to be trained again; `git checkout
recipes/models/tiny` brings the old one back.

Goes on from the weights of `--base`, or begins anew. Takes hours on two cores; a GPU is used where
there is one, which nobody has tried yet. The committed base then had one more lesson: `python -m
train.tiny.build_joint`.

A finished run that is repeated trains nothing and writes the checkpoint and its card again, with
the linear probe of that checkpoint if the work folder holds one.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from guard.errors import GuardError, exits_cleanly
from guard.layout import ROOT

OUT = ROOT / "recipes" / "models" / "tiny"
PROBE = "probe.json"


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--corpus",
        default="",
        help="JSON-lines files of {messages} (globs, .gz) and hub:<data set>, separated by commas",
    )
    parser.add_argument(
        "--base",
        type=Path,
        help="go on from this checkpoint, with its vocabulary (default: begin anew)",
    )
    parser.add_argument(
        "--rules",
        default="all",
        help="rules whose phrase books conversations are written from, or none (default all)",
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=3600,
        help="optimizer steps of about 4,000 tokens (default %(default)s)",
    )
    parser.add_argument(
        "--lr", type=float, default=1.5e-3, help="peak learning rate (default %(default)s)"
    )
    parser.add_argument(
        "--vocabulary", type=int, default=16_384, help="token ids in all (default %(default)s)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=OUT,
        help="where the checkpoint goes (default recipes/models/tiny)",
    )
    parser.add_argument(
        "--work",
        type=Path,
        default=ROOT / "runs" / "base",
        help=f"where the resumable state goes, and {PROBE} may lie (default runs/base)",
    )
    parser.add_argument("--note", default="", help="a sentence on the run for the model card")
    return parser.parse_args()


@exits_cleanly
def main() -> None:
    """Corpus, vocabulary, lessons, distillation, checkpoint, card."""
    args = arguments()
    if not args.corpus.strip():
        raise GuardError(
            "no corpus given", remedy="Run `make base CORPUS='path/*.jsonl.gz,hub:org/name'`"
        )
    from data.generator.library import rules_with_phrases
    from guard.prompt import PromptBuilder
    from guard.rule import load_rule, rule_names
    from train.tiny.corpus import read_corpus
    from train.tiny.distil import distil
    from train.tiny.export import export
    from train.tiny.lessons import Lessons
    from train.tiny.rule_talk import RuleTalk
    from train.tiny.teacher import FOLDER, Teacher
    from train.tiny.vocabulary import cut_vocabulary, vocabulary_of

    written = {path.stem for path in rules_with_phrases()}
    rules = (
        [name for name in rule_names(args.rules) if name in written] if args.rules != "none" else []
    )
    sources = read_corpus(args.corpus)
    texts = {
        message.content
        for source in sources
        for conversation in source.conversations
        for message in conversation
    }
    vocabulary = (
        vocabulary_of(args.base)
        if args.base
        else cut_vocabulary(FOLDER, sorted(texts), args.vocabulary)
    )
    args.work.mkdir(parents=True, exist_ok=True)
    words = sorted(
        piece for piece in vocabulary.tokenizer.get_vocab() if re.fullmatch(r"[a-z]{3,}", piece)
    )
    rule_talk = RuleTalk([load_rule(name) for name in rules]) if rules else None
    lessons = Lessons(sources, words, Teacher(), rule_talk=rule_talk)
    builder = PromptBuilder(vocabulary.tokenizer.backend_tokenizer)
    checkpoint = args.work / "checkpoint.pt"
    distilled = distil(
        vocabulary,
        lessons,
        builder,
        steps=args.steps,
        peak_lr=args.lr,
        checkpoint=checkpoint,
        base=args.base,
    )
    export(
        distilled, vocabulary.tokenizer, args.out, sources=sources, rules=rules, peak_lr=args.lr, probe=args.work / PROBE,
        note=args.note, base=args.base,
    )  # fmt: skip
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()

"""The command line of `python -m serve.up`.

Knows nothing of what the options name: files are read, and rules looked for, by those who use them.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from guard.arguments import count, port, seconds, whole_number
from guard.layout import Runs
from guard.method import METHODS
from serve.api.input.limits import POLICIES
from serve.engine.thread.engine_thread import TIMEOUT_S


def parse_arguments() -> argparse.Namespace:
    """The options of the command line. Ends the process for some that contradict each other."""
    parser = argparse.ArgumentParser(
        prog="python -m serve.up", description="Serve the trained rules of a base model over HTTP."
    )
    add = parser.add_argument
    several = "several separated by commas answer side by side"
    add("--model", default="tiny", help=f"a base of recipes/models; {several} (default: tiny)")
    add("--rules", help="comma-separated; default: every rule that is trained by the served method")
    add(
        "--method",
        help=f"whose weights answer: {', '.join(METHODS)}; "
        "default: the recipe's aLoRA, else the first that it lists",
    )
    page = "docs/rule_sets_and_tenants.md"
    add("--rule-sets", type=Path, help=f"a YAML file of named rule sets ({page})")
    add("--tenants", type=Path, help=f"a YAML file of tenants and their keys ({page})")
    add(
        "--audit-log",
        type=Path,
        help="a file that gets a line of JSON for every check; "
        "{hostname} and {pid} in its name are filled in",
    )
    add("--audit-key", type=Path, help="an Ed25519 private key in PEM that signs the audit log")
    add("--traces", help="an OTLP receiver for spans, over HTTP: http://collector:4318")
    add("--reviews", type=Path, help="a YAML file: which checks are kept (docs/operation.md)")
    add(
        "--policies",
        type=whole_number,
        default=POLICIES,
        help="how many a request may state, without tenants (default: %(default)s)",
    )
    add("--watch", action="store_true", help="serve at once what is published or rolled back to")
    _add_tls_options(parser)
    add("--merged", action="store_true", help="the first rule from the base of `make merge`")
    add("--replicas", type=count, help="servers behind one address, on Ray")
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add("--port", type=port, default=8000, help="0 chooses a free one (default: %(default)s)")
    add(
        "--timeout",
        type=seconds,
        default=TIMEOUT_S,
        help="seconds that a check may take (default: %(default)g)",
    )
    add(
        "--runs",
        type=Path,
        default=Runs().root,
        help="where the weights are (default: %(default)s)",
    )
    arguments = parser.parse_args()
    if arguments.merged:
        _check_merged(parser, arguments)
    return arguments


def _check_merged(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """End the process for an option that does not go with --merged."""
    why = {"method": "serves LoRAs: others act on the unmerged base", "watch": "is merged once"}
    for option, problem in (why | {"replicas": "answers from one process"}).items():
        if getattr(arguments, option):
            parser.error(f"--merged {problem}: leave out --{option}")


def _add_tls_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--tls-cert", type=Path, help="a PEM file with the server's chain of certificates")
    key = "a PEM file with its private key; not needed if --tls-cert contains it"
    add("--tls-key", type=Path, help=key)
    add("--tls-client-ca", type=Path, help="a PEM file: only clients with its certificates may ask")

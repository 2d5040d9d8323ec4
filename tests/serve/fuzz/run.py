"""Fuzzes the server: `python -m tests.serve.fuzz.run`, entry of `make fuzz`.

A server on an engine without a model is asked by schemathesis what its description says, and what
it forbids. No answer may be a server's error, and none an allow: the engine has none to give. Then
it is asked several requests on one connection (`sequences.py`).
"""

from __future__ import annotations

import argparse
import logging
import os
import subprocess
import sys
import time

from guard.home import ROOT
from serve.api.app import create_app
from tests.serve.fuzz.sequences import fuzz_sequences
from tests.serve.serving import serving
from tests.serve.toy_engine import NeverAllows

CHECKS = "not_a_server_error,nothing_is_allowed"
ROUND_S = 120.0  # a round of its own seed
CONNECTIONS_S = 20.0  # of a round: for sequences


def fuzz(seed: int, *limits: str) -> tuple[int, int]:
    """Ask a server of its own, as long as these options of schemathesis say.

    The exit status, 0 if no answer was wrong, and how many checks reached the engine.
    """
    engine = NeverAllows()
    with serving(create_app(engine)) as client:  # type: ignore[arg-type]
        command = [sys.executable, "-m", "schemathesis.cli", "--no-color", "run"]
        command += [f"{client.base_url}/openapi.json", f"--checks={CHECKS}", f"--seed={seed}"]
        # Lines of JSON, which schemathesis cannot write; test_stream.py sends malformed ones.
        command += ["--exclude-path=/v1/check/stream"]
        command += ["--generation-database=none", "--continue-on-failure", "--warnings=off"]
        environment = os.environ | {"SCHEMATHESIS_HOOKS": "tests.serve.fuzz.checks"}
        done = subprocess.run([*command, *limits], cwd=ROOT, env=environment, check=False)
    return done.returncode, len(engine.conversations)


def main() -> None:
    """Fuzz round after round, each of another seed, until one finds something or time is up."""
    parser = argparse.ArgumentParser(prog="python -m tests.serve.fuzz.run", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="default: %(default)g")
    parser.add_argument("--seed", type=int, default=1, help="of the first round")
    arguments = parser.parse_args()
    until = time.monotonic() + 60 * arguments.minutes
    seed = arguments.seed
    logging.disable(logging.WARNING)  # of every request that is refused
    while (left := until - time.monotonic()) > 1:
        seconds = min(CONNECTIONS_S, left / 4)
        print(f"seed {seed}: {fuzz_sequences(seed, seconds)} sequences", flush=True)
        max_time = f"--max-time={min(left / 2, ROUND_S):.0f}"
        status, checks = fuzz(seed, max_time, "--max-examples=100000")
        print(f"seed {seed}: {checks} checks reached the engine", flush=True)
        if status:
            sys.exit(1)
        seed += 1


if __name__ == "__main__":
    main()

"""`python -m serve.doctor`, entry of `make doctor`. Knows nothing of what each check looks at."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Iterator

from guard.errors import exits_cleanly
from serve.doctor.finding import Finding, report
from serve.doctor.installation import imports, interpreter, packages, plugin
from serve.doctor.machine import device, memory
from serve.doctor.rules import recipes, weights

DESCRIPTION = "What is installed, what runs here, what is broken; each problem with its remedy."

# In the order of the report: what a later check needs is checked before it.
FINDERS: dict[str, Callable[[], Iterator[Finding]]] = {
    "interpreter": interpreter,
    "packages": packages,
    "device": device,
    "imports": imports,
    "plugin": plugin,
    "recipes": recipes,
    "weights": weights,
}


@exits_cleanly
def main() -> None:
    """Check everything; exit 1 if something is broken."""
    parser = argparse.ArgumentParser(prog="python -m serve.doctor", description=DESCRIPTION)
    model = "the recipe that this machine's memory is compared with (default: tiny)"
    parser.add_argument("--model", default="tiny", help=model)
    memory_of_model = functools.partial(memory, parser.parse_args().model)
    problems = report(FINDERS | {"memory": memory_of_model})
    if problems:
        print(f"\n{len(problems)} problem(s)")
        sys.exit(1)
    print("\nno problems")


if __name__ == "__main__":
    main()

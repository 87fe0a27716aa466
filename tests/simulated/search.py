"""Random programs on the simulated engine, as many as one likes: ``python -m tests.simulated.search --programs 20000``.

Prints how far it is, and each program about which oracle and canary disagree, cut down. The exit status is 1 if any.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch

from kvcanary.faults.agreement import Search, search
from kvcanary.faults.simulated_faults import SIMULATED

EVERY = 250


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(description="Do the oracle and the canary agree?")
    parser.add_argument("--programs", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--length", type=int, default=14, help="calls of a program")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    began, shown = time.monotonic(), list[str]()

    def told(found: Search) -> None:
        while len(found.problems) > len(shown):
            shown.append(found.problems[len(shown)])
            sys.stdout.write(f"\n{shown[-1]}\n\n")
        if found.programs % EVERY == 0 or found.programs == arguments.programs:
            sys.stdout.write(
                f"{found.programs:,} programs, {found.forwards:,} forwards, {found.reads:,} reads judged, "
                f"{sum(found.harmed.values()):,} with harm of {len(found.harmed)} kinds, "
                f"{len(found.problems)} disagreements, {time.monotonic() - began:.0f} s\n"
            )
            sys.stdout.flush()

    seeds = range(arguments.seed, arguments.seed + arguments.programs)
    found = search(seeds, ["", *SIMULATED], length=arguments.length, told=told)
    return 1 if found.problems or not found.harmed else 0


if __name__ == "__main__":
    sys.exit(main())

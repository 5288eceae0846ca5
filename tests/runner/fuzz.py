"""Runs property tests and state machines with random seeds until a time budget is spent: `make fuzz`.

`make test` draws the same examples each time; this looks for others. The seed of a failure reproduces it.
"""

import argparse
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Sequence

import pytest
from support.builders.seeds import FUZZ_SEED

TESTS = ("tests/property", "tests/unit/plugin/quota/simulation")
_DEADLINE = "TIPHYS_FUZZ_DEADLINE"


def fuzz(tests: Sequence[str], minutes: float, seed: int | None) -> int:
    """Run rounds of ``tests``, each with another seed, or one round with ``seed``; the exit code of the last."""
    deadline = time.monotonic() + minutes * 60
    while True:
        drawn = secrets.randbelow(2**32) if seed is None else seed
        sys.stdout.write(f"== seed {drawn}\n")
        sys.stdout.flush()
        options = ["-q", "-n0", "-x", "-p", "runner.fuzz", "--hypothesis-profile=fuzz", f"--hypothesis-seed={drawn}"]
        environ = os.environ | {FUZZ_SEED: str(drawn), "PYTHONPATH": "tests"}
        if seed is None:
            environ[_DEADLINE] = str(deadline)
        code = subprocess.run([sys.executable, "-m", "pytest", *options, *tests], env=environ).returncode
        if code:
            sys.stdout.write(f"reproduce with: make fuzz SEED={drawn}\n")
        if code or seed is not None or time.monotonic() > deadline:
            return code


def pytest_runtest_setup() -> None:
    """A round that is under way when the budget is spent skips the rest of its tests."""
    if time.monotonic() > float(os.environ.get(_DEADLINE, "inf")):
        pytest.skip("the time budget is spent")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tests", nargs="*", default=TESTS)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int)
    options = parser.parse_args()
    sys.exit(fuzz(options.tests, options.minutes, options.seed))

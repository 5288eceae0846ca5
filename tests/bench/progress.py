"""What a benchmark says while it runs; its result alone goes to standard output."""

import sys
import time

_BEGAN = time.monotonic()


def say(words: str) -> None:
    print(f"[{time.monotonic() - _BEGAN:6.1f} s] {words}", file=sys.stderr, flush=True)  # noqa: T201

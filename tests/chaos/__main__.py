"""Runs simulations and has each judged: `make chaos SEED=1 MINUTES=10`.

Without a number of seeds, seeds follow each other from ``--seed`` until the minutes are spent. A seed that breaks a law
is named with the command that repeats it, and leaves its history and bucket in ``--out``.
"""

import argparse
import json
import os
import sys
import time
from collections import Counter
from pathlib import Path

from chaos.bugs import BUGS, planted
from chaos.checker import check
from chaos.simulation import FAULT_SECONDS, Outcome, simulate

_OUT = Path("build/chaos")


class Campaign:
    """Sums over the seeds of a campaign.

    Args:
        bug: Name of a planted bug; empty for none.
        out: Folder for what a failing seed leaves.
        fault_seconds: Virtual time with faults, of each seed.
    """

    def __init__(self, bug: str = "", out: Path = _OUT, fault_seconds: float = FAULT_SECONDS) -> None:
        self._bug = bug
        self._out = out
        self._fault_seconds = fault_seconds
        self._hours = "" if fault_seconds == FAULT_SECONDS else f" HOURS={fault_seconds / 3600:g}"
        self.seeds = self.acknowledged = self.lost = self.late = self.left = self.strays = self.failures = 0
        self.hours = 0.0
        self.faults: Counter[str] = Counter()
        self.laws: Counter[str] = Counter()

    def run(self, seed: int) -> bool:
        """Simulate and judge one seed; whether it kept all laws."""
        began = time.monotonic()
        with planted(self._bug):
            outcome = simulate(seed, self._fault_seconds)
        verdict = check(outcome.history, outcome.objects)
        problems = [f"{law}: {sentence}" for law, sentence in verdict.violations]
        problems += [f"crash of {actor}: {type(error).__name__}: {error}" for actor, error in outcome.crashes]
        self.seeds += 1
        self.hours += outcome.seconds / 3600
        self.acknowledged += verdict.acknowledged
        self.lost += verdict.lost
        self.late += verdict.late
        self.left += verdict.left
        self.strays += verdict.strays
        self.faults += verdict.faults
        self.laws.update({law for law, _ in verdict.violations})
        self.failures += bool(problems)
        _say(
            f"seed {seed}: {outcome.seconds / 3600:.1f} h, {verdict.acknowledged} acknowledged, "
            f"{verdict.faults.total()} faults, {len(problems)} problems, {outcome.digest[:12]}, "
            f"{time.monotonic() - began:.1f} s"
        )
        if problems:
            self._report(outcome, problems)
        return not problems

    @property
    def sentence(self) -> str:
        """What the campaign has shown, in a sentence."""
        faults = f"{self.faults.total():,} observed faults of {len(self.faults)} kinds"
        return (
            f"{self.lost} of {self.acknowledged:,} acknowledged checkpoints lost over {self.seeds} seeds with {faults} "
            f"in {self.hours:,.0f} simulated hours; {self.late} late commits, {self.left} shards of last saves that "
            f"failed, {self.strays} second Workflows that started nothing; {self.failures} seeds broke a law"
        )

    def _report(self, outcome: Outcome, problems: list[str]) -> None:
        for problem in problems[:10]:
            _say(f"  {problem}")
        if len(problems) > 10:
            _say(f"  and {len(problems) - 10} more")
        folder = self._out / f"seed-{outcome.seed}{f'-{self._bug}' if self._bug else ''}"
        write_folder(outcome, folder)
        options = f"{self._hours}{f' BUG={self._bug}' if self._bug else ''}"
        _say(f"  repeat it with `make chaos SEEDS=1 SEED={outcome.seed}{options}`; history and bucket are in {folder}")


def write_folder(outcome: Outcome, folder: Path) -> None:
    """Write history and bucket where the checker can read them."""
    for key, data in outcome.objects.items():
        path = folder / "bucket" / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    (folder / "history.jsonl").write_text("".join(f"{json.dumps(event)}\n" for event in outcome.history))


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(arguments: list[str] | None = None) -> int:
    """Run a campaign; 1 if a seed broke a law."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="the first seed")
    parser.add_argument("--seeds", type=int, help="how many seeds; default: as many as the minutes allow")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--hours", type=float, default=FAULT_SECONDS / 3600, help="simulated hours of faults of a seed")
    parser.add_argument(
        "--bug", choices=BUGS, default="", help="plant this bug, and stop at the first seed that finds it"
    )
    parser.add_argument("--out", type=Path, default=_OUT, help="folder for what a failing seed leaves")
    options = parser.parse_args(arguments)
    if os.environ.get("PYTHONHASHSEED") != "0":  # sets have an order of their own in each process otherwise
        os.execve(
            sys.executable,
            [sys.executable, "-m", "chaos", *(arguments or sys.argv[1:])],
            os.environ | {"PYTHONHASHSEED": "0"},
        )
    campaign, deadline = (
        Campaign(options.bug, options.out, options.hours * 3600),
        time.monotonic() + options.minutes * 60,
    )
    seed = options.seed
    while campaign.seeds < options.seeds if options.seeds else time.monotonic() < deadline:
        if not campaign.run(seed) and options.bug:
            break
        seed += 1
    _say(campaign.sentence)
    return int(campaign.failures > 0)


if __name__ == "__main__":
    sys.exit(main())

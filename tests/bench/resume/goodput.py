"""Three ways to meet the same faults, with the local engine and real processes, all at once.

Goodput is the steps that the training has to show at the end, times what a step
takes, over the time since its first step.
"""

import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from bench.progress import say
from bench.resume.faults import KINDS, MTBF_SECONDS, Fault, Struck, drawn, strike
from bench.resume.optimum import optimum
from bench.samples import significant
from support.processes.polling import until

from tiphys.checkpoint.save.interval import young_interval_seconds
from tiphys.store.layout import LINEAGES

ARMS = ("scratch", "folder", "tiphys")
SECONDS = 120.0
SEEDS = (701, 702, 703)
QUICK_SECONDS = 10.0
QUICK_SEEDS = (710,)
"""One in which a failure comes early enough to see how it goes on."""
SAVE_SECONDS = 0.5
"""Between two saves, in every arm: Young's interval for saves of 12 ms, to the next step.

``every="auto"`` is not asked: it begins with the belief in one failure a day, which takes some attempts to outweigh.
"""
_TRAINER = Path(__file__).with_name("trainer.py")
_BEGIN_SECONDS = 300.0

PIPELINE = """
from hera_pipelines import Checkpoints, Pipeline, Retries, Step, Train
from hera.workflows import DAG

retries = Retries(
    preemption=None, infrastructure=None, out_of_memory=None, user_error=None, unknown=None,
    backoff="1s", backoff_factor=1,
)
given = dict(name="fit", image="i", command=["python", {trainer!r}, {arm!r}, {folder!r}, "{seconds}"], retries=retries)
with Pipeline("goodput", entrypoint="main") as pipeline:
    if {arm!r} == "tiphys":
        fit = Train(**given, checkpoints=Checkpoints(every="{seconds}s", keep_last=3), grace="5s")
    else:
        fit = Step(**given)
    with DAG(name="main"):
        fit()
"""


class Line(NamedTuple):
    at: float
    what: str
    value: float


class Arm:
    """One training under one engine."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.folder = folder
        self.struck: list[Struck] = []
        self.missed = 0
        folder.mkdir()
        (folder / "goodput.py").write_text(
            PIPELINE.format(trainer=str(_TRAINER), arm=name, folder=str(folder), seconds=SAVE_SECONDS)
        )
        words = ["-m", "hera_pipelines.cli", "run", "goodput.py", "--store", "store", "--state", "state"]
        with (folder / "engine.log").open("wb") as log:
            self._engine = subprocess.Popen(
                [sys.executable, *words], cwd=folder, stdout=log, stderr=log, start_new_session=True
            )

    def lines(self) -> list[Line]:
        path = self.folder / "log"
        rows = path.read_text().splitlines() if path.exists() else []
        return [Line(float(at), what, float(value)) for at, what, value in (row.split() for row in rows)]

    def begun(self) -> bool:
        assert self._engine.poll() is None, (self.folder / "engine.log").read_text()[-2000:]
        return any(line.what == "step" for line in self.lines())

    def strike(self, kind: str) -> None:
        if (met := strike(self.folder, self._checkpoints, kind)) is None:
            self.missed += 1
        else:
            self.struck.append(met)

    def end(self) -> None:
        """Kill the engine; its containers die with it."""
        alive = self._engine.poll() is None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._engine.pid, signal.SIGKILL)
        self._engine.wait()
        assert alive, (self.folder / "engine.log").read_text()[-2000:]

    @property
    def _checkpoints(self) -> Path:
        return self.folder / "store" / LINEAGES if self.name == "tiphys" else self.folder / "checkpoints"


def measure(quick: bool) -> dict[str, Any]:
    """All seeds, one after the other; the three arms of each side by side."""
    seconds = QUICK_SECONDS if quick else SECONDS
    campaigns = [_campaign(seed, seconds) for seed in (QUICK_SEEDS if quick else SEEDS)]
    pooled = {arm: statistics.mean(one[arm]["goodput"] for one in campaigns) for arm in ARMS}
    limits = _limits([one["tiphys"] for one in campaigns])
    return {
        "settings": {
            "mtbf_seconds": MTBF_SECONDS,
            "kinds": KINDS,
            "seconds": seconds,
            "seeds": [one["seed"] for one in campaigns],
            "save_every_seconds": SAVE_SECONDS,
        },
        "campaigns": campaigns,
        "limits": limits,
        "line": {
            **{f"goodput_{arm}": significant(pooled[arm]) for arm in ARMS},
            "goodput_over_optimum": significant(pooled["tiphys"] / limits["optimum_share"]),
        },
    }


def _campaign(seed: int, seconds: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="tiphys-goodput-") as folder, contextlib.ExitStack() as stack:
        arms = []
        for name in ARMS:
            arms.append(Arm(name, Path(folder) / name))
            stack.callback(_ended, arms[-1])
        until(lambda: all(arm.begun() for arm in arms), seconds=_BEGIN_SECONDS)
        begin = time.monotonic()
        for fault in drawn(seed, seconds):
            time.sleep(max(0.0, begin + fault.at - time.monotonic()))
            _strike_all(arms, fault)
        time.sleep(max(0.0, begin + seconds - time.monotonic()))
        now = time.time()
        found = {arm.name: _told(arm, now) for arm in arms}
        for arm in arms:
            arm.end()
        say(f"seed {seed}: " + ", ".join(f"{arm} {found[arm]['goodput']:.3f}" for arm in ARMS))
        return {"seed": seed, **found}


def _ended(arm: Arm) -> None:
    with contextlib.suppress(ProcessLookupError, AssertionError):
        arm.end()


def _strike_all(arms: Sequence[Arm], fault: Fault) -> None:
    for arm in arms:
        arm.strike(fault.kind)


def _told(arm: Arm, now: float) -> dict[str, Any]:
    lines = [line for line in arm.lines() if line.at <= now]
    steps = [line for line in lines if line.what == "step"]
    elapsed = now - steps[0].at
    step_seconds = _step_seconds(lines)
    have = _at_hand(lines)
    restarts = list(_restarts(arm.struck, steps, step_seconds))
    saves = [line.value for line in lines if line.what == "save"]
    return {
        "goodput": significant(have * step_seconds / elapsed),
        "seconds": significant(elapsed),
        "steps_at_hand": have,
        "steps_executed": len(steps),
        "step_seconds": significant(step_seconds),
        "faults": dict(Counter(one.kind for one in arm.struck)),
        "faults_that_met_nobody": arm.missed,
        "restart_seconds": significant(statistics.mean(restarts)) if restarts else None,
        "stall_seconds": significant(statistics.mean(saves)) if saves else None,
        "saves": len(saves),
        "mtbf_seconds": significant(elapsed / max(1, len(arm.struck))),
        "damaged": sum(one.has_damaged for one in arm.struck),
    }


def _at_hand(lines: Sequence[Line]) -> int:
    """The step that the process of the end has reached; of one that is still starting, what it will go on from."""
    for line in reversed(lines):
        if line.what == "start":
            return _saved_before(lines, line.at)
        if line.what == "step":
            return int(line.value)
    return 0


def _saved_before(lines: Sequence[Line], at: float) -> int:
    known = [int(line.value) for line in lines if line.what == "committed" and line.at < at]
    return known[-1] if known else 0


def _step_seconds(lines: Sequence[Line]) -> float:
    """From one step to the next, where nothing was saved between them."""
    pairs = pairwise(lines)
    return statistics.median(b.at - a.at for a, b in pairs if a.what == b.what == "step")


def _restarts(struck: Sequence[Struck], steps: Sequence[Line], step_seconds: float) -> Iterator[float]:
    """From the end of a process, as its last step shows it, to the begin of the first step of the next one.

    A process that is struck while it starts is one restart that takes longer.
    """
    for before, after in pairwise(steps):
        hit = [one for one in struck if before.at - step_seconds <= one.at < after.at]
        if hit and after.at - before.at > 2 * step_seconds:
            yield max(0.0, after.at - step_seconds - max(hit[0].at, before.at))


def _limits(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The best that anybody could do with the stall, the restart and the failures that were measured."""
    stall = statistics.mean(one["stall_seconds"] or 0.0 for one in runs)
    restart = statistics.mean(one["restart_seconds"] or 0.0 for one in runs)
    mtbf = sum(one["seconds"] for one in runs) / max(1, sum(sum(one["faults"].values()) for one in runs))
    best = optimum(stall, restart, mtbf, shortest=statistics.mean(one["step_seconds"] for one in runs))
    return {
        "stall_seconds": significant(stall),
        "restart_seconds": significant(restart),
        "mtbf_seconds": significant(mtbf),
        "young_interval_seconds": significant(young_interval_seconds(stall, mtbf)),
        "optimum_interval_seconds": significant(best.interval),
        "optimum_share": significant(best.share),
    }

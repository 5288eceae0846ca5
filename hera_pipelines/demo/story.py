"""The demo: a training run is broken in every way at once, its twin is left alone.

Each act does one thing and then proves from storage what Tiphys made of it. An
act that cannot prove its promise raises `PromiseBrokenError`, and the command
ends with a non-zero code.
"""

import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import hera_pipelines.demo.digits as pipeline_file
from hera_pipelines.demo import fault_injection as sabotage
from hera_pipelines.demo.facts import TRAIN, Executed, RunFacts, executed_again, seconds_lost
from hera_pipelines.demo.fault_injection import Engine, PromiseBrokenError
from hera_pipelines.demo.narration import Narrator
from tiphys.records import CheckpointRef
from tiphys.store import DirectoryStore

RUN = "digits"
TWIN = "digits-undisturbed"
STEPS = pipeline_file.STEPS
# Between two checkpoints, so that there is work to lose.
_KILL_TRAINER_AT = round(0.62 * STEPS)
_KILL_ENGINE_AT = round(0.83 * STEPS)
_PATIENCE_SECONDS = 90.0
_SECONDS_TO_DIE = 10.0
_KILLED = 137


@dataclass(frozen=True)
class Result:
    """What the demo measured."""

    digest: str
    steps_again: int
    seconds_lost: float
    accuracy: float


class Story:
    """One performance in ``folder``, which should be empty."""

    def __init__(self, folder: Path, seed: int, narrator: Narrator) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._seed = seed
        self._tell = narrator
        self.store = DirectoryStore(folder / "store")
        self._run, self._twin = (RunFacts(self.store, run, folder / "steps" / run) for run in (RUN, TWIN))

    def perform(self) -> Result:
        """All acts in order.

        Raises:
            PromiseBrokenError: something did not happen as promised.
        """
        with ExitStack() as running:
            twin = running.enter_context(self._start(self._twin))
            engine = running.enter_context(self._start(self._run))
            self._tell.act(f"Submitted one pipeline twice: {RUN}, to be broken, and {TWIN}, to be left alone.")
            self._tell.seen(f"validate → preprocess → train ({STEPS} steps) → register, seed {self._seed}")
            corrupted = self._break_training(engine)
            self._watch_retry(engine, corrupted)
            self._kill_engine(engine)
            self._resume()
            self._compare(twin)
        return self._result()

    def _start(self, facts: RunFacts) -> Engine:
        given = ("-p", f"seed={self._seed}", "-p", f"step-log={facts.step_log}")
        arguments = ["run", str(pipeline_file.__file__), "--run", facts.run, *given, *self._places(facts.run)]
        return Engine(arguments, self._folder / f"{facts.run}.log")

    def _places(self, run: str) -> list[str]:
        return ["--store", str(self._folder / "store"), "--state", str(self._state(run))]

    def _state(self, run: str) -> Path:
        return self._folder / f"state-{run}"

    def _break_training(self, engine: Engine) -> CheckpointRef:
        """Kill the trainer and damage what it saved last; return the damaged checkpoint."""
        self._train_until(engine, 1, _KILL_TRAINER_AT)
        # Frozen first, so that the newest checkpoint is still the newest when it is damaged.
        pid = self._run.last_step().pid
        sabotage.freeze(pid)
        newest = self._run.newest_commit(1)
        if newest is None:
            raise PromiseBrokenError(f"no checkpoint was committed in {_KILL_TRAINER_AT} steps")
        sabotage.flip_bytes(self._folder / "store", self._run.manifest(newest))
        sabotage.kill(pid)
        self._check_gone(pid)
        self._tell.act(f"Killed the training process (SIGKILL, pid {pid}) at step {self._run.last_step().global_step}.")
        self._tell.act(f"Damaged its newest checkpoint, step {newest.global_step}: flipped bytes, same size.")
        return newest

    def _watch_retry(self, engine: Engine, corrupted: CheckpointRef) -> None:
        """The retry must notice the damage, say so, and take the checkpoint before."""
        with self._tell.waiting("waiting for the retry…"):
            engine.wait_for(lambda: bool(self._run.steps(2)), "the retry trains", _PATIENCE_SECONDS)
        first = self._run.training()[0]
        if not first.end or first.end.exit_code != _KILLED:
            raise PromiseBrokenError(f"attempt 1 should have ended by SIGKILL, but its record says {first.end}")
        if self._run.skipping_event() is None:
            raise PromiseBrokenError("nobody said that the newest checkpoint is damaged")
        before = corrupted.global_step - pipeline_file.SAVE_EVERY
        begins = self._run.steps(2)[0].global_step
        if begins != before + 1:
            raise PromiseBrokenError(f"attempt 2 began with step {begins}; the last sound checkpoint is step {before}")
        self._tell.seen(
            f"the retry saw that step {corrupted.global_step} does not match its SHA-256, "
            f"quarantined it and went on from step {before}"
        )

    def _kill_engine(self, engine: Engine) -> None:
        """The engine dies, its trainer with it, and all that it knew is deleted."""
        self._train_until(engine, 2, _KILL_ENGINE_AT)
        trainer = self._run.last_step().pid
        engine.kill()
        self._check_gone(trainer)
        shutil.rmtree(self._state(RUN))
        self._tell.act(f"Killed the engine itself at step {self._run.last_step().global_step} and deleted its state.")
        self._tell.seen("only storage is left")

    def _resume(self) -> None:
        """Resume from storage alone; finished steps must not run again."""
        before = self._run.attempts_by_step()
        self._tell.act(f"Resumed from storage: tiphys resume {RUN}")
        log = self._folder / f"{RUN}-resumed.log"
        with Engine(["resume", RUN, *self._places(RUN)], log) as resumed, self._tell.waiting("resuming…") as show:
            resumed.finish(_PATIENCE_SECONDS, lambda: show(_progress(self._run.steps())))
        after = self._run.attempts_by_step()
        for step in ("validate", "preprocess"):
            if after[step] != before[step]:
                raise PromiseBrokenError(f"step {step} had a result and ran again")
        last = self._run.training()[-1].claim
        if last.submission != 2 or last.starts_from is None or after[TRAIN] != before[TRAIN] + 1:
            raise PromiseBrokenError(f"the resumed training did not go on from a checkpoint: {last}")
        self._tell.seen("validate and preprocess were done and did not run again")
        self._tell.seen(f"training went on from step {last.starts_from.global_step}, and register tested the model")

    def _compare(self, twin: Engine) -> None:
        """The broken run must end with the bits of the one left alone."""
        with self._tell.waiting(f"waiting for {TWIN}…"):
            twin.finish(_PATIENCE_SECONDS)
        if repeated := executed_again(self._twin.steps()):
            raise PromiseBrokenError(f"the run left alone repeated {repeated} steps")
        self._tell.act("Compared the two models byte by byte.")
        for facts in (self._run, self._twin):
            self._tell.seen(f"sha256 {facts.model_digest()}  {facts.run}")
        if self._run.model_digest() != self._twin.model_digest():
            raise PromiseBrokenError("the models differ: what was resumed is not what would have been trained")

    def _result(self) -> Result:
        steps = self._run.steps()
        return Result(
            digest=self._run.model_digest(),
            steps_again=executed_again(steps),
            seconds_lost=sum(seconds_lost(steps)),
            accuracy=float(self._run.output_value("register", "accuracy")),
        )

    def _train_until(self, engine: Engine, attempt: int, global_step: int) -> None:
        """Wait until an attempt has executed ``global_step`` and has saved something."""
        with self._tell.waiting("training…") as show:
            engine.wait_for(lambda: self._reached(attempt, global_step, show), "training got far", _PATIENCE_SECONDS)

    def _reached(self, attempt: int, global_step: int, show: Callable[[str], None]) -> bool:
        steps = self._run.steps()
        show(_progress(steps))
        far = bool(steps) and steps[-1].attempt == attempt and steps[-1].global_step >= global_step
        return far and self._run.newest_commit(attempt) is not None

    @staticmethod
    def _check_gone(pid: int) -> None:
        if not sabotage.wait_until_gone(pid, _SECONDS_TO_DIE):
            raise PromiseBrokenError(f"the training process {pid} should be dead and is not")


def _progress(steps: list[Executed]) -> str:
    return f"training: step {steps[-1].global_step} of {STEPS}" if steps else "validating and preparing data…"

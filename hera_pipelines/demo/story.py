"""The scenario of ``tiphys demo``: faults in one training run, and a comparison with an undisturbed run.

Each act injects one fault and then checks in storage how Tiphys recovered. If a
check fails, the act raises `PromiseBrokenError`, and the command ends with exit
code 1.
"""

import os
import shutil
import signal
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import hera_pipelines.demo.digits as pipeline_file
from hera_pipelines.demo import fault_injection
from hera_pipelines.demo.facts import TRAIN_STEP, DemoRunState, ExecutedStep, count_repeated_steps
from hera_pipelines.demo.fault_injection import PromiseBrokenError, TiphysProcess
from hera_pipelines.demo.narration import DemoConsole
from tiphys.records import CheckpointRef
from tiphys.store import DirectoryStore

BROKEN_RUN = "digits"
UNDISTURBED_RUN = "digits-undisturbed"
STEPS = pipeline_file.STEPS
# Steps between two checkpoints, so that each kill loses work.
_KILL_TRAINER_STEP = round(0.62 * STEPS)
_KILL_ENGINE_STEP = round(0.83 * STEPS)
_TIMEOUT_SECONDS = 90.0
_KILL_TIMEOUT_SECONDS = 10.0
_SIGKILL_EXIT_CODE = 137


@dataclass(frozen=True)
class DemoResult:
    """Measurements of the demo."""

    digest: str
    repeated_steps: int
    accuracy: float


class DemoScenario:
    """One execution of the demo in the empty folder ``folder``."""

    def __init__(self, folder: Path, seed: int, console: DemoConsole) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._seed = seed
        self._console = console
        self.store = DirectoryStore(folder / "store")
        self._run, self._undisturbed = (
            DemoRunState(self.store, run, folder / "steps" / run) for run in (BROKEN_RUN, UNDISTURBED_RUN)
        )

    def run(self) -> DemoResult:
        """Run all acts in order.

        Raises:
            PromiseBrokenError: a guarantee of Tiphys did not hold.
        """
        with ExitStack() as running:
            twin = running.enter_context(self._start(self._undisturbed))
            engine = running.enter_context(self._start(self._run))
            self._console.print_action(
                f"Submitted one pipeline twice: {BROKEN_RUN}, which the demo breaks, and {UNDISTURBED_RUN}."
            )
            self._console.print_observation(
                f"validate → preprocess → train ({STEPS} steps) → register, seed {self._seed}"
            )
            corrupted = self._break_training(engine)
            self._watch_retry(engine, corrupted)
            self._kill_engine(engine)
            self._resume()
            self._compare(twin)
        return self._result()

    def _start(self, state: DemoRunState) -> TiphysProcess:
        parameters = ("-p", f"seed={self._seed}", "-p", f"step-log={state.step_log}")
        options = (*parameters, *self._storage_options(state.run))
        arguments = ["run", str(pipeline_file.__file__), "--run", state.run, *options]
        return TiphysProcess(arguments, self._folder / f"{state.run}.log")

    def _storage_options(self, run: str) -> list[str]:
        return ["--store", str(self._folder / "store"), "--state", str(self._state(run))]

    def _state(self, run: str) -> Path:
        return self._folder / f"state-{run}"

    def _break_training(self, engine: TiphysProcess) -> CheckpointRef:
        """Damage the newest checkpoint and kill the trainer; return the damaged checkpoint."""
        self._train_until(engine, 1, _KILL_TRAINER_STEP)
        # The trainer is frozen first, so that it cannot commit a newer checkpoint before the damage.
        pid = self._run.last_step().pid
        os.kill(pid, signal.SIGSTOP)
        newest = self._run.newest_commit(1)
        if newest is None:
            raise PromiseBrokenError(f"no checkpoint was committed in {_KILL_TRAINER_STEP} steps")
        fault_injection.flip_bytes(self._folder / "store", self._run.manifest(newest))
        os.kill(pid, signal.SIGKILL)
        self._check_dead(pid)
        self._console.print_action(
            f"Killed the training process (SIGKILL, pid {pid}) at step {self._run.last_step().global_step}."
        )
        self._console.print_action(
            f"Damaged its newest checkpoint, step {newest.global_step}: inverted some bytes, same size."
        )
        return newest

    def _watch_retry(self, engine: TiphysProcess, corrupted: CheckpointRef) -> None:
        """Check that the retry detects the damage, reports it, and restores the checkpoint before."""
        with self._console.show_status("waiting for the retry…"):
            engine.wait_for(lambda: bool(self._run.executed_steps(2)), "the first step of the retry", _TIMEOUT_SECONDS)
        first = self._run.training_attempts()[0]
        if not first.end or first.end.exit_code != _SIGKILL_EXIT_CODE:
            raise PromiseBrokenError(f"attempt 1 should have ended by SIGKILL, but its record says {first.end}")
        if self._run.checkpoint_skipped_event() is None:
            raise PromiseBrokenError("no event reports that the newest checkpoint is damaged")
        before = corrupted.global_step - pipeline_file.SAVE_EVERY
        first_step = self._run.executed_steps(2)[0].global_step
        if first_step != before + 1:
            raise PromiseBrokenError(
                f"attempt 2 started at step {first_step}; the newest valid checkpoint is step {before}"
            )
        self._console.print_observation(
            f"the retry found that checkpoint {corrupted.global_step} does not match its SHA-256, "
            f"quarantined it, and continued from checkpoint {before}"
        )

    def _kill_engine(self, engine: TiphysProcess) -> None:
        """Kill the engine, which also ends its trainer, and delete the engine's state folder."""
        self._train_until(engine, 2, _KILL_ENGINE_STEP)
        trainer = self._run.last_step().pid
        engine.kill()
        self._check_dead(trainer)
        shutil.rmtree(self._state(BROKEN_RUN))
        self._console.print_action(
            f"Killed the engine itself at step {self._run.last_step().global_step} and deleted its state."
        )
        self._console.print_observation("only the objects in storage remain")

    def _resume(self) -> None:
        """Resume from storage alone, and check that finished steps did not run again."""
        before = self._run.attempts_by_step()
        self._console.print_action(f"Resumed from storage: tiphys resume {BROKEN_RUN}")
        log = self._folder / f"{BROKEN_RUN}-resumed.log"
        with (
            TiphysProcess(["resume", BROKEN_RUN, *self._storage_options(BROKEN_RUN)], log) as resumed,
            self._console.show_status("resuming…") as show,
        ):
            resumed.finish(_TIMEOUT_SECONDS, lambda: show(_progress(self._run.executed_steps())))
        after = self._run.attempts_by_step()
        for step in ("validate", "preprocess"):
            if after[step] != before[step]:
                raise PromiseBrokenError(f"step {step} was finished and ran again")
        last = self._run.training_attempts()[-1].claim
        if last.submission != 2 or last.starts_from is None or after[TRAIN_STEP] != before[TRAIN_STEP] + 1:
            raise PromiseBrokenError(f"the resumed training did not start from a checkpoint: {last}")
        self._console.print_observation("validate and preprocess were finished and did not run again")
        self._console.print_observation(
            f"training continued from checkpoint {last.starts_from.global_step}, and register tested the model"
        )

    def _compare(self, twin: TiphysProcess) -> None:
        """Check that the broken run ends with the same bits as the undisturbed run."""
        with self._console.show_status(f"waiting for {UNDISTURBED_RUN}…"):
            twin.finish(_TIMEOUT_SECONDS)
        if repeated := count_repeated_steps(self._undisturbed.executed_steps()):
            raise PromiseBrokenError(f"the undisturbed run repeated {repeated} steps")
        self._console.print_action("Compared the two models byte by byte.")
        for state in (self._run, self._undisturbed):
            self._console.print_observation(f"sha256 {state.model_digest()}  {state.run}")
        if self._run.model_digest() != self._undisturbed.model_digest():
            raise PromiseBrokenError("the models differ: the resumed run did not reproduce the undisturbed one")

    def _result(self) -> DemoResult:
        return DemoResult(
            digest=self._run.model_digest(),
            repeated_steps=count_repeated_steps(self._run.executed_steps()),
            accuracy=float(self._run.output_value("register", "accuracy")),
        )

    def _train_until(self, engine: TiphysProcess, attempt: int, global_step: int) -> None:
        """Wait until ``attempt`` has executed ``global_step`` and committed a checkpoint."""
        with self._console.show_status("training…") as show:
            engine.wait_for(
                lambda: self._has_reached(attempt, global_step, show), f"step {global_step}", _TIMEOUT_SECONDS
            )

    def _has_reached(self, attempt: int, global_step: int, show: Callable[[str], None]) -> bool:
        steps = self._run.executed_steps()
        show(_progress(steps))
        is_executed = bool(steps) and steps[-1].attempt == attempt and steps[-1].global_step >= global_step
        return is_executed and self._run.newest_commit(attempt) is not None

    @staticmethod
    def _check_dead(pid: int) -> None:
        if not fault_injection.wait_until_dead(pid, _KILL_TIMEOUT_SECONDS):
            raise PromiseBrokenError(f"the training process {pid} still runs after its kill")


def _progress(steps: list[ExecutedStep]) -> str:
    return f"training: step {steps[-1].global_step} of {STEPS}" if steps else "validating and preparing data…"

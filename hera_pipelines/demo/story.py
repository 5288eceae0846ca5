"""The scenario of ``tiphys demo``: faults in one training run, and a comparison with an undisturbed run.

Each act injects one fault and then checks in storage how Tiphys recovered: the demo
trusts only what remains when its processes are gone. If a check fails, the act raises
`PromiseBrokenError`, and the command ends with exit code 1.
"""

import hashlib
import os
import shutil
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.text import Text

from hera_pipelines.cli.look.lineage import draw_lineage
from hera_pipelines.demo import digits
from hera_pipelines.demo.processes import TiphysProcess, check, damage_checkpoint, wait_until_dead
from tiphys.lineage.run_history import RunHistory
from tiphys.lineage.tree import read_lineage_tree
from tiphys.records import AttemptEnd, AttemptEndOutcome, CheckpointRef
from tiphys.store import Attempt, DirectoryStore, LineageLayout, lineage_name, read_events

BROKEN_RUN, UNDISTURBED_RUN = "digits", "digits-undisturbed"
TRAIN_STEP = "train"
# Steps between two checkpoints, so that each kill loses work.
_KILL_TRAINER_STEP, _KILL_ENGINE_STEP = round(0.62 * digits.STEPS), round(0.83 * digits.STEPS)


class ExecutedStep(NamedTuple):
    """One execution of one global step."""

    attempt: int
    pid: int
    global_step: int


@dataclass(frozen=True)
class DemoRun:
    """One run of the demo, whose files are in ``folder``."""

    folder: Path
    run: str

    @property
    def store(self) -> DirectoryStore:
        return DirectoryStore(self.folder / "store")

    @property
    def step_log(self) -> Path:
        """A file with a line for each executed step."""
        return self.folder / f"{self.run}.steps"

    def start(self, *arguments: str, log: str) -> TiphysProcess:
        """Run a command of ``tiphys`` over its store."""
        storage = ("--store", str(self.folder / "store"), "--state", str(self.folder / f"state-{self.run}"))
        return TiphysProcess([*arguments, *storage], self.folder / log)

    def executed_steps(self) -> list[ExecutedStep]:
        """All executed steps in their order; a line that a kill cut short is skipped."""
        lines = self.step_log.read_text().splitlines(keepends=True) if self.step_log.exists() else []
        return [ExecutedStep(*map(int, line.split())) for line in lines if line.endswith("\n")]

    def last_step(self) -> ExecutedStep:
        """The step that was executed last; its ``pid`` is that of the trainer."""
        return (self.executed_steps() or [ExecutedStep(0, 0, 0)])[-1]

    def count_repeated_steps(self) -> int:
        """Number of executions that repeated an already executed global step."""
        steps = self.executed_steps()
        return len(steps) - len({step.global_step for step in steps})

    def newest_checkpoint(self, attempt: int) -> CheckpointRef | None:
        """The newest checkpoint that this attempt of the training step has committed."""
        layout = LineageLayout(lineage_name(self.run, TRAIN_STEP))
        refs = (layout.parse_checkpoint(info.key) for info in self.store.list(layout.manifests))
        return next((ref for ref in refs if ref and ref.attempt == attempt), None)

    def attempts(self) -> dict[str, list[Attempt]]:
        return RunHistory(self.store, self.run).attempts

    def find_result(self, step: str) -> AttemptEnd:
        """End of the attempt that finished ``step``. Raises `PromiseBrokenError` if none did."""
        ends = [attempt.end for attempt in self.attempts().get(step, []) if attempt.end]
        results = [end for end in ends if end.outcome == AttemptEndOutcome.DONE]
        check(bool(results), f"run {self.run}: step {step} has no result")
        return results[-1]

    def digest_model(self) -> str:
        """SHA-256 of the model's bytes in storage, computed now and not taken from a record."""
        return hashlib.sha256(self.store.read(self.find_result(TRAIN_STEP).outputs[0].key)).hexdigest()


class DemoScenario:
    """One execution of the demo in the empty folder ``folder``, which prints what it does and observes."""

    def __init__(self, folder: Path, seed: int, console: Console) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._seed = seed
        self._console = console
        self._started_at = time.monotonic()
        self._actions = 0
        self.broken, self.undisturbed = DemoRun(folder, BROKEN_RUN), DemoRun(folder, UNDISTURBED_RUN)

    def run(self) -> None:
        """Run all acts in order. Raises `PromiseBrokenError` if a guarantee of Tiphys does not hold."""
        self._print(
            "Two runs train a classifier of handwritten digits from the same seed. "
            "The demo breaks one of them three times; both must end with the same bits."
        )
        with self._submit(self.undisturbed) as twin, self._submit(self.broken) as engine:
            self._act(f"Submitted one pipeline twice: {BROKEN_RUN}, which the demo breaks, and {UNDISTURBED_RUN}.")
            self._print(f"   validate → preprocess → train ({digits.STEPS} steps) → register, seed {self._seed}")
            self._watch_restart(engine, *self._break_training(engine))
            self._kill_engine(engine)
            self._resume()
            self._compare(twin)
        self._print_details()

    def _print(self, sentence: str, style: str = "") -> None:
        self._console.print(Text(sentence, style), soft_wrap=True)

    def _act(self, sentence: str) -> None:
        """Print the next action, with the seconds since the start."""
        self._actions += 1
        text = Text.assemble((f"\n{self._actions}  ", "bold cyan"), (sentence, "bold"))
        text.append(f"  [{time.monotonic() - self._started_at:.1f} s]", style="dim")
        self._console.print(text, soft_wrap=True)

    def _submit(self, run: DemoRun) -> TiphysProcess:
        parameters = ("-p", f"seed={self._seed}", "-p", f"step-log={run.step_log}")
        return run.start("run", str(digits.__file__), "--run", run.run, *parameters, log=f"{run.run}.log")

    def _break_training(self, engine: TiphysProcess) -> tuple[int, CheckpointRef]:
        """Damage the newest checkpoint and kill the trainer; return its process id, and the damaged checkpoint."""
        self._train_until(engine, _KILL_TRAINER_STEP)
        # The trainer is frozen first, so that it cannot commit a newer checkpoint before the damage.
        pid = self.broken.last_step().pid
        os.kill(pid, signal.SIGSTOP)
        newest = self.broken.newest_checkpoint(1)
        assert newest is not None, "it was waited for"
        damage_checkpoint(self._folder / "store", newest)
        os.kill(pid, signal.SIGKILL)
        wait_until_dead(pid)
        self._act(f"Killed the training process (SIGKILL, pid {pid}) at step {self.broken.last_step().global_step}.")
        self._act(f"Damaged its newest checkpoint, step {newest.global_step}: inverted some bytes, same size.")
        return pid, newest

    def _watch_restart(self, engine: TiphysProcess, killed: int, damaged: CheckpointRef) -> None:
        """Check that the next process in the pod detects the damage, reports it, and restores the checkpoint before."""
        with self._console.status("waiting for the next process…"):
            engine.wait_for(lambda: self.broken.last_step().pid != killed, "the first step of the next process")
        events = {event.name for event in read_events(self.broken.store, BROKEN_RUN)}
        check("checkpoint.skipped" in events, "no event reports that the newest checkpoint is damaged")
        before = damaged.global_step - digits.SAVE_EVERY
        first = next(step.global_step for step in self.broken.executed_steps() if step.pid != killed)
        check(first == before + 1, f"training went on at step {first}; the newest valid checkpoint is step {before}")
        self._print(
            f"   started again in the same pod, it found that checkpoint {damaged.global_step} does not match its "
            f"SHA-256, quarantined it, and continued from checkpoint {before}"
        )

    def _kill_engine(self, engine: TiphysProcess) -> None:
        """Kill the engine, which also ends its trainer, and delete the engine's state folder."""
        self._train_until(engine, _KILL_ENGINE_STEP)
        trainer = self.broken.last_step().pid
        engine.kill()
        engine.wait()
        wait_until_dead(trainer)
        shutil.rmtree(self._folder / f"state-{BROKEN_RUN}")
        self._act(f"Killed the engine itself at step {self.broken.last_step().global_step} and deleted its state.")
        self._print("   only the objects in storage remain")

    def _resume(self) -> None:
        """Resume from storage alone, and check that finished steps did not run again."""
        before = self.broken.attempts()
        self._act(f"Resumed from storage: tiphys resume {BROKEN_RUN}")
        engine = self.broken.start("resume", BROKEN_RUN, log=f"{BROKEN_RUN}-resumed.log")
        with engine, self._console.status("resuming…"):
            engine.wait_for_success()
        after = self.broken.attempts()
        for step in ("validate", "preprocess"):
            check(len(after[step]) == len(before[step]), f"step {step} was finished and ran again")
        last, others = after[TRAIN_STEP][-1].claim, after[TRAIN_STEP][:-1]
        start = last.starts_from.global_step if last.starts_from else 0
        is_resumed = last.submission == 2 and len(others) == len(before[TRAIN_STEP]) and start > 0
        check(is_resumed, f"the resumed training did not start from a checkpoint: {last}")
        self._print("   validate and preprocess were finished and did not run again")
        self._print(f"   training continued from checkpoint {start}, and register tested the model")

    def _compare(self, twin: TiphysProcess) -> None:
        """Check that the broken run ends with the same bits as the undisturbed run."""
        with self._console.status(f"waiting for {UNDISTURBED_RUN}…"):
            twin.wait_for_success()
        check(self.undisturbed.count_repeated_steps() == 0, "the undisturbed run repeated steps")
        self._act("Compared the two models byte by byte.")
        digests = [run.digest_model() for run in (self.broken, self.undisturbed)]
        self._print(f"   sha256 {digests[0]}  {BROKEN_RUN}\n   sha256 {digests[1]}  {UNDISTURBED_RUN}")
        check(digests[0] == digests[1], "the models differ: the resumed run did not reproduce the undisturbed one")

    def _print_details(self) -> None:
        picture, store = self._folder / "lineage.svg", self._folder / "store"
        picture.write_text(draw_lineage(read_lineage_tree(RunHistory(self.broken.store, BROKEN_RUN))), encoding="utf-8")
        self._act("More details:")
        self._print(f"   test accuracy: {float(self.broken.find_result('register').outputs[0].value or ''):.2%}")
        self._print(f"   picture of the lineage: {picture}")
        self._print(f"   what happened: tiphys events {BROKEN_RUN} --store {store}")
        self._print(f"   cost of the faults: tiphys report {BROKEN_RUN} --store {store}")
        self._print(f"   as web pages: tiphys ui {store}")
        self._print(
            f"\n{self.broken.count_repeated_steps()} of {digits.STEPS} steps were executed again, and the two models "
            f"are bit-identical (sha256 {self.broken.digest_model()[:16]}…).",
            "bold green",
        )

    def _train_until(self, engine: TiphysProcess, global_step: int) -> None:
        """Wait until the first attempt has executed ``global_step`` and committed a checkpoint."""

        def is_reached() -> bool:
            last = self.broken.last_step()
            status.update(f"training: step {last.global_step} of {digits.STEPS}")
            return last.global_step >= global_step and self.broken.newest_checkpoint(1) is not None

        with self._console.status("validating and preparing data…") as status:
            engine.wait_for(is_reached, f"step {global_step}")

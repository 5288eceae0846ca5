"""Real programs under ``tiphys-exec``: they know nothing of Tiphys, and are killed and told to stop.

| what happens | promise |
|---|---|
| the program ends | its exit code, the last whole checkpoint committed |
| it dies while it writes | the torn checkpoint is never committed, and never seen by the next attempt |
| SIGTERM | passed on; what became whole is committed; exit 75, never 0 |
| it does not end in time | killed within the grace period, exit 75 |
| another attempt took its place | killed, exit 76 |
| the wrapper dies at any write | the next attempt goes on, and ends as if nothing had been |
| a folder in the shape of a library, killed at any time | never torn or mixed, and no acknowledged step is lost |
"""

import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from support.builders.lineage import LINEAGE, RUN, STEP, claim_of, end_of, ref, write_claim, write_end
from support.processes.forking import ForkedProcess, ForkingProcess
from support.processes.polling import until
from support.processes.process import children_of
from support.programs.file_trainer import after
from support.programs.folder_shapes import COUNTED, SHAPES

from tiphys.lineage.quarantine import list_quarantined
from tiphys.lineage.select import choose_checkpoint, list_commits
from tiphys.lineage.validity import read_manifest
from tiphys.store import DirectoryStore, LineageLayout, read_events, read_step_attempts

STEPS = 20
EXEC = (sys.executable, "-m", "tiphys.checkpoint.exec")
WRAPPER = "import runpy; runpy.run_module('tiphys.checkpoint.exec', run_name='__main__', alter_sys=True)"
MARKER = ("--marker", "checkpoint-*/DONE", "--step-from", r"checkpoint-(\d+)")
QUIET = ("--quiet", "300ms", "--step-from", r"checkpoint-(\d+)")
EACH_QUIET = ("--checkpoint", "checkpoint-*", *QUIET)


@dataclass
class Run:
    """Attempts of one step, opened and ended as the plugin does it, each in a pod with an empty folder."""

    root: Path
    wrappers: ForkingProcess
    attempt: int = 0
    started: list[ForkedProcess] = field(default_factory=list)

    def __post_init__(self):
        self.store = DirectoryStore(self.root / "store")
        self.folder = self.root / "ckpt"
        self.result = self.root / "result"
        self.log = self.root / "failpoints.log"
        self.gate = self.root / "gate"
        self.manifests = self.root / "store" / LineageLayout(LINEAGE).manifests
        # For a program that goes on once its checkpoint is committed: nothing depends on how fast the machine is.
        self.steady = {"FILE_AWAIT": str(self.manifests)}

    def environ(self, start, **others):
        own = {
            "TIPHYS_STORE": self.store.url,
            "TIPHYS_RUN": RUN,
            "TIPHYS_STEP": STEP,
            "TIPHYS_ATTEMPT": str(self.attempt),
            "TIPHYS_LINEAGE": LINEAGE,
            "TIPHYS_RESUME_FROM": str(start) if start else "",
            "TIPHYS_GRACE_SECONDS": "120",
            "TIPHYS_FAILPOINTS_LOG": str(self.log),
            "FILE_RESULT": str(self.result),
            "FILE_STEPS": str(STEPS),
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        kept = {key: value for key, value in os.environ.items() if not key.startswith("TIPHYS_")}
        return {**kept, **own, **others}

    def start(self, *options, command=None, new_pod=True, **environ):
        """Open the next attempt where the choice says, and run its program."""
        choice = choose_checkpoint(self.store, LINEAGE, read_step_attempts(self.store, RUN, STEP))
        self.attempt += 1
        write_claim(self.store, claim_of(self.attempt, choice.checkpoint))
        if new_pod:
            shutil.rmtree(self.folder, ignore_errors=True)
        program = command or [sys.executable, "-m", "support.programs.file_trainer", str(self.folder)]
        process = self.wrappers.start(
            WRAPPER,
            ["--dir", str(self.folder), "--interval", "20ms", *(options or MARKER), "--", *program],
            environ=self.environ(choice.checkpoint, **environ),
            new_session=True,
        )
        self.started.append(process)
        return process

    def finish(self, process):
        """Wait for the end of the attempt, and record it unless it succeeded."""
        out, err = process.communicate(timeout=120)
        if process.returncode != 0:
            write_end(self.store, end_of(self.attempt))
        return process.returncode, out, err

    def attempt_until_end(self, *options, **environ):
        return self.finish(self.start(*options, **environ))

    @property
    def commits(self):
        return list_commits(self.store, LINEAGE)


@pytest.fixture(scope="module")
def wrappers():
    """Forks processes that have imported all that ``tiphys-exec`` needs; two tests below start a new one."""
    parts = ("options", "output", "runtime", "store", "supervise")
    with ForkingProcess(*(f"tiphys.checkpoint.exec.{part}" for part in parts)) as process:
        yield process


@pytest.fixture
def run(tmp_path, wrappers):
    one = Run(tmp_path, wrappers)
    yield one
    for process in one.started:
        # The program is in the wrapper's session, and may have outlived it.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=60)


def says(process, line):
    """Wait until the program says ``line``."""
    for said in process.stdout:
        if said.strip() == line:
            return
    raise AssertionError(f"it ended without saying {line!r}: {process.stderr.read()}")


def starts(out):
    return int(re.search(r"starts (\d+)", out)[1])


def test_the_trace_context_reaches_the_program_unchanged(run):
    context = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    program = [sys.executable, "-c", "import os; print('context', os.environ['TRACEPARENT'], os.environ['TRACESTATE'])"]
    code, out, err = run.finish(run.start(command=program, TRACEPARENT=context, TRACESTATE="argo=1"))
    assert (code, f"context {context} argo=1" in out) == (0, True), err


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(MARKER, id="marker"),
        pytest.param(QUIET, id="quiet", marks=pytest.mark.heavy),
        pytest.param(EACH_QUIET, id="each-quiet", marks=pytest.mark.heavy),
    ],
)
def test_a_program_that_ends_has_its_last_checkpoint_committed(run, options):
    code, _, err = run.attempt_until_end(*options)
    assert code == 0, err
    assert run.result.read_text() == after(STEPS)
    assert run.commits[0] == ref(1, STEPS)
    manifest = read_manifest(run.store, ref(1, STEPS))
    assert (manifest.framework, manifest.reason) == ("files", "due")
    assert [path.name for path in run.folder.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("place", ["folder", "cache"])
def test_a_program_that_starts_again_finds_its_checkpoint_near(run, place):
    """In the folder of the same pod, or on the disk of the node: the shards in the store are damaged."""
    cache = {"TIPHYS_CACHE": str(run.root / "cache")} if place == "cache" else {}
    assert run.attempt_until_end(FILE_EXIT="1", FILE_STEPS="10", **cache)[0] == 1
    shards = read_manifest(run.store, ref(1, 10)).shards  # the first is the index, which no folder has
    for shard in shards if cache else shards[1:]:
        (run.root / "store" / shard.key).write_bytes(b"damaged".ljust(shard.size))
    code, out, err = run.finish(run.start(new_pod=bool(cache), **cache))
    assert code == 0, err
    assert starts(out) == 10
    assert run.result.read_text() == after(STEPS)
    assert list_quarantined(run.store, LINEAGE) == set()
    assert ("shards of checkpoint 10 of attempt 1 were still in" in err) is not bool(cache)


@pytest.mark.heavy
def test_commits_are_counted_where_names_hold_no_step(run):
    code, _, err = run.attempt_until_end("--layout", "whole", "--quiet", "300ms", FILE_STEPS="10", **run.steady)
    assert code == 0, err
    assert run.commits == [ref(1, 2), ref(1, 1)]


@pytest.mark.parametrize(
    ("options", "new_pod"),
    [
        pytest.param(MARKER, True, id="marker-new-pod"),
        pytest.param(MARKER, False, id="marker-same-folder", marks=pytest.mark.heavy),
        pytest.param(QUIET, False, id="quiet-same-folder", marks=pytest.mark.heavy),
        pytest.param(EACH_QUIET, True, id="each-quiet-new-pod", marks=pytest.mark.heavy),
    ],
)
def test_a_program_that_dies_while_it_writes_goes_on_from_what_was_whole(run, options, new_pod):
    process = run.start(*options, FILE_TEAR_AT="15", **run.steady)
    code, _, err = run.finish(process)
    assert code == 128 + signal.SIGKILL, err
    assert (run.folder / "checkpoint-15" / "model.bin").exists()
    assert run.commits[0] == ref(1, 10)

    code, out, err = run.finish(run.start(*options, new_pod=new_pod))
    assert code == 0, err
    assert starts(out) == 10
    assert run.result.read_text() == after(STEPS)
    assert run.commits[0] == ref(2, STEPS)
    assert list_quarantined(run.store, LINEAGE) == set()
    assert "attempt 2 resumes from step 10" in err


@pytest.mark.parametrize(
    "options", [pytest.param(MARKER, id="marker"), pytest.param(QUIET, id="quiet", marks=pytest.mark.heavy)]
)
def test_program_that_dies_while_it_writes_goes_on_in_its_pod(run, options):
    line = f"test -z $TIPHYS_INCARNATION || unset FILE_TEAR_AT; {sys.executable} -m support.programs.file_trainer"
    restarts = {"TIPHYS_RESTART_CAUSES": "hang,infrastructure", "FILE_TEAR_AT": "15"}
    command = ["sh", "-c", f"{line} {run.folder}; exit $?"]
    code, out, err = run.finish(run.start(*options, command=command, **restarts, **run.steady))
    assert code == 0, err
    assert re.findall(r"starts (\d+)", out) == ["0", "10"]
    assert run.result.read_text() == after(STEPS)
    assert run.commits[0] == ref(1, STEPS)
    assert "attempt 1 goes on in its pod, as process 2: its program ended with 137 (infrastructure)" in err


def test_sigterm_commits_what_the_program_saves_and_is_never_a_success(run):
    process = run.start(FILE_ON_SIGTERM="save", FILE_PAUSE="0.02", FILE_STEPS="100000")
    says(process, "wrote 5")
    process.send_signal(signal.SIGTERM)
    code, out, err = run.finish(process)
    assert code == 75, err
    step = int(re.findall(r"wrote (\d+)", out)[-1])
    assert run.commits[0] == ref(1, step)
    assert read_manifest(run.store, ref(1, step)).reason == "sigterm"
    report = next(event for event in read_events(run.store, RUN) if event.name == "checkpoint.preempted")
    assert report.data["committed"] == f"1-{step}"
    assert report.data["spare_seconds"] > 0
    assert f"the program ended with 0; the newest checkpoint is checkpoint {step} of attempt 1" in err

    code, out, err = run.attempt_until_end(FILE_STEPS=str(step + 7))
    assert code == 0, err
    assert starts(out) == step
    assert run.result.read_text() == after(step + 7)


@pytest.mark.heavy
def test_program_below_a_shell_that_dies_of_sigterm_has_its_last_save_committed(run):
    line = f"{sys.executable} -m support.programs.file_trainer {run.folder}; echo after"
    pauses = {"FILE_ON_SIGTERM": "save", "FILE_PAUSE": "0.02", "FILE_STEPS": "100000"}
    process = run.start("--quiet", "10m", *QUIET[2:], command=["sh", "-c", line], **pauses)
    says(process, "wrote 5")
    process.send_signal(signal.SIGTERM)
    code, out, err = run.finish(process)
    assert code == 75, err
    assert run.commits[:1] == [ref(1, int(re.findall(r"wrote (\d+)", out)[-1]))], err


LEAVER = """
import os, pathlib, signal, subprocess, sys, time
folder, ending = pathlib.Path(sys.argv[1]), sys.argv[2]
helper = (
    "import signal, sys, time, os; signal.signal(15, {deaf})\\n"
    "with open(sys.argv[1], 'wb', buffering=0) as stream:\\n"
    "    for _ in range(10_000): stream.write(b'x' * 100); time.sleep(0.01)"
).format(deaf="signal.SIG_IGN" if ending == "deaf" else "signal.SIG_DFL")
def begin():
    torn = folder / "step_3.bin"
    subprocess.Popen([sys.executable, "-c", helper, str(torn)])
    while not (torn.exists() and torn.stat().st_size): time.sleep(0.01)
def leave(*_):
    if ending == "default": begin()
    (folder / "step_2.bin").write_bytes(b"y" * 1000)
    os._exit(75)
if ending == "deaf": begin()
signal.signal(15, leave)
(folder / "step_1.bin").write_bytes(b"x" * 1000)
print("wrote 1", flush=True)
while True: time.sleep(0.01)
"""


@pytest.mark.heavy
@pytest.mark.parametrize("ending", ["deaf", "default"])
def test_file_of_a_process_that_is_left_behind_and_killed_is_not_committed(run, ending):
    program = [sys.executable, "-c", LEAVER, str(run.folder), ending]
    process = run.start("--quiet", "10m", command=program)
    says(process, "wrote 1")
    process.send_signal(signal.SIGTERM)
    code, _, err = run.finish(process)
    assert code == 75, err
    assert run.commits[:1] == [ref(1, 2)], err
    assert "step_3.bin" in err


def test_a_program_that_sigterm_ends_leaves_what_was_whole(run):
    # It waits for one commit more than there will be.
    process = run.start(FILE_AWAIT=str(run.root / "none"))
    says(process, "wrote 5")
    process.send_signal(signal.SIGTERM)
    code, _, err = run.finish(process)
    assert code == 75, err
    assert f"the program ended with {128 + signal.SIGTERM}" in err
    assert run.commits == [ref(1, 5)]


@pytest.mark.heavy
def test_a_program_that_does_not_end_is_killed_within_the_grace_period(run):
    process = run.start(FILE_ON_SIGTERM="ignore", FILE_AWAIT=str(run.root / "none"), TIPHYS_GRACE_SECONDS="4")
    until(lambda: run.commits)
    process.send_signal(signal.SIGTERM)
    code, _, err = run.finish(process)
    assert code == 75, err
    assert "did not end in time after SIGTERM, so it is killed" in err
    assert run.commits == [ref(1, 5)]


def test_other_signals_reach_the_program_and_change_nothing(run):
    process = run.start(FILE_ON_SIGTERM="ignore", FILE_GATE=str(run.gate))
    says(process, "starts 0")
    process.send_signal(signal.SIGUSR1)
    says(process, f"signal {signal.SIGUSR1.value}")
    run.gate.touch()
    code, _, err = run.finish(process)
    assert code == 0, err


def test_a_program_whose_attempt_was_replaced_is_killed(run):
    process = run.start(FILE_ON_SIGTERM="ignore", FILE_PAUSE="0.02", FILE_STEPS="100000")
    until(lambda: run.commits)
    write_end(run.store, end_of(1))
    write_claim(run.store, claim_of(2))
    process.communicate(timeout=120)  # the pipe closes only once the program is gone as well
    assert process.returncode == 76


@pytest.mark.parametrize(
    ("point", "passage"),
    [
        ("before_manifest", 3),
        *(
            pytest.param(point, passage, marks=pytest.mark.heavy)
            for point, passage in (
                ("before_shard", 1),
                ("after_shard", 3),
                ("before_manifest", 1),
                ("after_manifest", 2),
            )
        ),
    ],
)
def test_a_wrapper_that_dies_at_any_write_loses_nothing_that_was_committed(run, point, passage):
    process = run.start(TIPHYS_FAILPOINTS=f"checkpoint.{point}=crash@{passage}", **run.steady)
    process.wait(timeout=120)
    assert process.returncode == -signal.SIGKILL
    assert run.log.read_text() == f"checkpoint.{point}=crash\n"
    process.communicate(timeout=120)  # the kernel ends the program with the wrapper
    write_end(run.store, end_of(1))
    committed = max((commit.global_step for commit in run.commits), default=0)

    code, out, err = run.attempt_until_end()
    assert code == 0, err
    assert starts(out) == committed
    assert run.result.read_text() == after(STEPS)
    assert list_quarantined(run.store, LINEAGE) == set()


@pytest.mark.heavy
def test_a_corrupt_checkpoint_costs_one_and_not_the_run(run):
    code, _, err = run.attempt_until_end(FILE_EXIT="3", **run.steady)
    assert code == 3, err
    assert run.commits[:2] == [ref(1, 20), ref(1, 15)]
    shard = run.root / "store" / read_manifest(run.store, ref(1, 20)).shards[1].key
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)

    code, out, err = run.attempt_until_end()
    assert code == 0, err
    assert starts(out) == 15
    assert list_quarantined(run.store, LINEAGE) == {ref(1, 20)}
    assert "checkpoint 20 of attempt 1 is corrupt" in err
    assert run.result.read_text() == after(STEPS)


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (["sh", "-c", "exit 9"], 9),
        (["sh", "-c", "kill -9 $$"], 137),
        (["no-such-program-anywhere"], 127),
        (["/etc"], 126),
        (["sh", "-c", 'test -z "$TIPHYS_LINEAGE"'], 0),
    ],
)
def test_the_exit_code_is_that_of_the_program(run, command, code):
    assert run.finish(run.start(*MARKER, command=command))[0] == code


def test_an_unusable_folder_is_reported_once_and_costs_nothing_else(run):
    script = (
        'mkdir -p "$0"/checkpoint-1; ln -s /etc/passwd "$0"/checkpoint-1/link; touch "$0"/checkpoint-1/DONE; sleep 0.3'
    )
    code, _, err = run.finish(run.start(*MARKER, command=["sh", "-c", script, str(run.folder)]))
    assert code == 0, err
    assert run.commits == []
    assert err.count("links to '/etc/passwd'") == 1


def test_checkpoints_of_a_session_are_not_taken_for_files(run):
    from support.builders.lineage import commit

    write_claim(run.store, claim_of(1))
    commit(run.store, ref(1, 3), framework="numpy")
    write_end(run.store, end_of(1))
    run.attempt = 1
    code, out, err = run.attempt_until_end()
    assert (code, out) == (2, "")
    assert "was written by the framework 'numpy'" in err


def test_without_the_run_in_storage_the_program_is_not_started(run):
    code, out, err = run.finish(run.start(TIPHYS_STORE=str(run.root / "elsewhere")))
    assert (code, out) == (3, "")
    assert "there is no store at" in err


def test_a_folder_that_cannot_be_made_is_worth_another_try(run):
    run.folder.parent.joinpath("file").write_text("")
    run.folder = run.root / "file" / "ckpt"
    code, out, err = run.finish(run.start())
    assert (code, out) == (69, "")
    assert "check --dir" in err


def test_outside_of_tiphys_it_is_as_if_it_were_not_there(run):
    command = [*EXEC, "--dir", str(run.folder), "--", "sh", "-c", "exit 5"]
    environ = {name: value for name, value in run.environ(None).items() if not name.startswith("TIPHYS_")}
    done = subprocess.run(command, env=environ, timeout=120, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (5, "tiphys: outside of a Tiphys step nothing is restored or saved\n")
    assert not run.folder.exists()


def test_step_without_checkpoints_says_that_nothing_is_kept(run):
    command = [*EXEC, "--dir", str(run.folder), "--", "sh", "-c", "exit 5"]
    environ = {
        name: value for name, value in run.environ(None).items() if name in ("PATH", "TIPHYS_RUN", "TIPHYS_STEP")
    }
    done = subprocess.run(command, env=environ, timeout=120, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 5
    assert "keeps no checkpoints, so nothing is restored or saved" in done.stderr


SEED = 20261129
KILLS_PER_SHAPE = int(os.environ.get("KILLS_PER_SHAPE", "5"))


ENDLESS = {"best", "lightning", "orbax", "sb3"}
"""Shapes whose last file does not show that it was written to its end, and that have no marker or pointer: a program
that dies of its signal right after a save may lose that save, and the log names the file."""


def shape_command(run, shape, *, steps=100_000, pause=0.02, handler=False):
    program = [sys.executable, "-m", "support.programs.folder_shapes", shape, str(run.folder), str(steps), str(pause)]
    return [*program, *(["--handler"] if handler else [])]


def killed_attempt(run, shape, rng, kinds):
    """One attempt that a fault ends; the step that it started from."""
    handler = rng.random() < 0.5
    promised = run.commits[0].global_step if run.commits else 0
    process = run.start("--quiet", "1s", command=shape_command(run, shape, handler=handler), TIPHYS_GRACE_SECONDS="60")
    lines = iter(process.stdout)
    started = int(re.fullmatch(r"starts (\d+)\n", line)[1]) if (line := next(lines, "")).startswith("starts") else line
    assert isinstance(started, int), (shape, started, process.communicate(timeout=120))
    if shape in COUNTED:
        assert bool(started) == bool(promised), (shape, started, promised)
    else:
        assert started == promised, (shape, started, promised)
    saves = rng.randint(1, 3)
    while saves and next(lines):
        saves -= 1
    time.sleep(rng.random() * 0.4)
    kind = rng.choice(["SIGTERM", "program killed", "all killed"])
    kinds[kind] += 1
    if kind == "SIGTERM":
        process.send_signal(signal.SIGTERM)
    elif kind == "all killed":
        os.killpg(process.pid, signal.SIGKILL)
    else:
        for pid in children_of(process.pid):
            with contextlib.suppress(ProcessLookupError):  # the launcher has helpers too, which may end by themselves
                os.kill(pid, signal.SIGKILL)
    saved = [int(number) for number in re.findall(r"saved (\d+)", "".join(lines))]
    code, _, err = run.finish(process)
    assert code in (75, 128 + signal.SIGKILL, -signal.SIGKILL), err
    if kind == "SIGTERM" and handler and saved and shape not in COUNTED:
        newest = run.commits[0].global_step if run.commits else 0
        is_said = shape in ENDLESS and re.search(r"may be half written|was held open for writing by process", err)
        assert newest == saved[-1] or is_said, f"{shape} {saved}\n{err}"
    return started


def finish_attempt(run, shape, steps):
    """One attempt of so many steps to its end: it starts from what was promised, and its last folder is committed."""
    promised = run.commits[:1]
    process = run.start("--quiet", "1s", command=shape_command(run, shape, steps=steps))
    code, out, err = run.finish(process)
    assert code == 0, (out, err)
    assert bool(int(re.search(r"starts (\d+)", out)[1])) == bool(promised), err
    assert run.commits[:1] != promised, err


@pytest.mark.heavy
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("shape", SHAPES)
def test_kills_at_any_time_tear_no_folder_and_lose_no_acknowledged_step(run, shape, capsys):
    rng = random.Random(f"{SEED}-{shape}-heavy")
    kinds: Counter[str] = Counter()
    starts = [killed_attempt(run, shape, rng, kinds) for _ in range(KILLS_PER_SHAPE)]
    assert starts == sorted(starts)
    with capsys.disabled():
        sys.stderr.write(f"\n{shape}: seed {SEED}, {dict(kinds)}, {len(run.commits)} commits, reached {starts[-1]}\n")
    finish_attempt(run, shape, 150)

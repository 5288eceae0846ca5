"""The program as a child: signals wait until they are asked for, and its end is passed on as a shell does.

All in a process of its own: the signals of a process may go to any of its threads, and a test run has several.
"""

import os
import shlex
import subprocess
import sys

import pytest

from tiphys.launch.process_table import Process, choose_receivers
from tiphys.launch.session_registry import PREEMPTED, SessionRegistry, register_session

BEGIN = """
import os, signal, subprocess, sys
from tiphys.launch.processes import ChildProcess, SignalQueue

def ended(child, signals):
    while child.exit_code is None:
        signals.wait_next(60)
        child.reap()
    return child.exit_code

signals = SignalQueue().__enter__()
"""


def run(script):
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + script], env=environ, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("script", "expected"), [("exit 0", "0 True"), ("exit 7", "7 False"), ("kill -TERM $$", "143 False")]
)
def test_the_exit_code_of_the_program_is_passed_on(script, expected):
    assert (
        run(f"""
child = ChildProcess(["sh", "-c", {script!r}], os.environ)
print(ended(child, signals), child.has_finished)
""")
        == f"{expected}\n"
    )


def test_a_signal_waits_and_can_be_passed_on():
    assert (
        run("""
child = ChildProcess(["sleep", "600"], os.environ)
os.kill(os.getpid(), signal.SIGTERM)
before, arrived = signals.is_stop_requested, signals.wait_next(60) == signal.SIGTERM
print(before, arrived, signals.is_stop_requested, signals.wait_next(0))
child.send_signal(signal.SIGTERM)
print(ended(child, signals))
child.send_signal(signal.SIGTERM)  # to nobody
""")
        == "True True True None\n143\n"
    )


def test_the_program_begins_with_the_signals_of_a_program():
    assert (
        run("""
show = "import signal; print(len(signal.pthread_sigmask(signal.SIG_BLOCK, [])))"
print(ended(ChildProcess([sys.executable, "-c", show], os.environ), signals))
""")
        == "0\n0\n"
    )


def test_a_program_that_is_not_there_is_an_error():
    assert (
        run("""
try:
    ChildProcess(["no-such-program-anywhere"], os.environ)
except FileNotFoundError:
    print("not found")
""")
        == "not found\n"
    )


def test_helpers_of_the_launcher_are_no_children_of_the_program():
    """A thread of tiphys-exec may have started one, and waits for it itself."""
    assert (
        run("""
earlier = subprocess.Popen(["sleep", "600"], start_new_session=True)
helper = subprocess.Popen(["true"])
child = ChildProcess(["true"], os.environ)
later = subprocess.Popen(["false"])
print(ended(child, signals), helper.wait(), later.wait(), earlier.poll())
earlier.kill()
earlier.wait()
""")
        == "0 0 1 None\n"
    )


@pytest.mark.parametrize(("code", "end"), [(75, "75 True"), (0, "143 True"), (3, "143 False")])
def test_program_that_was_stopped_ends_as_what_it_left_behind(code, end):
    stop = f"import signal, sys, time; signal.signal(15, lambda *_: sys.exit({code}))"
    trainer = f"{stop}; print('ready', flush=True)\nwhile True: time.sleep(0.01)"
    line = f"{shlex.join([sys.executable, '-c', trainer])}; true"
    assert (
        run(f"""
reader, writer = os.pipe()
command = ["sh", "-c", {line!r}]
child = ChildProcess(command, os.environ, [(os.POSIX_SPAWN_DUP2, writer, 1)])
os.read(reader, 100)
child.send_signal(signal.SIGTERM)
print(ended(child, signals), child.has_finished)
""")
        == f"{end}\n"
    )


@pytest.mark.parametrize(("seconds_left", "exit_code"), [(1.6, None), (1.4, 75)])
def test_program_that_stays_after_its_training_has_saved_ends_in_time_for_argo(seconds_left, exit_code):
    """Argo's executor looks once a second. The grace period is 60 s here, of a clock that only the test moves."""
    assert (
        run(f"""
import types
from tiphys.launch import processes
clock = [0.0]
processes.time = types.SimpleNamespace(monotonic=lambda: clock[0])
trainer = '''
import os, signal, sys, time
from tiphys.launch.session_registry import PREEMPTED, register_session
signal.signal(signal.SIGTERM, lambda *_: (register_session(os.environ, PREEMPTED), sys.exit(75)))
register_session(os.environ)
print("ready", flush=True)
while True: time.sleep(0.01)
'''
reader, writer = os.pipe()
script = 'trap "" TERM; "$0" -c "$1"; echo saved; sleep 600'
environ = {{**os.environ, "TIPHYS_GRACE_SECONDS": "60"}}
child = ChildProcess(["sh", "-c", script, sys.executable, trainer], environ, [(os.POSIX_SPAWN_DUP2, writer, 1)])
try:
    words = os.fdopen(reader)
    print(words.readline(), end="")
    child.send_signal(signal.SIGTERM)
    clock[0] = 2.0
    child.reap()
    print(words.readline(), end="")
    clock[0] = 60 - {seconds_left}
    child.reap()
    while {exit_code} and child.exit_code is None and signals.wait_next(60):
        child.reap()
    print(child.exit_code)
finally:
    child.send_signal(signal.SIGKILL)
    ended(child, signals)  # what the shell starts while it is killed would keep the pipes of this test open
""")
        == f"ready\nsaved\n{exit_code}\n"
    )


@pytest.mark.parametrize(
    ("last_words", "failures"),
    [
        ("", "['infrastructure']"),
        ("register_session(os.environ, CLOSED)", "[]"),
        ("note_failure(os.environ, 'user_error')", "['user_error']"),
    ],
)
def test_rank_that_is_killed_below_a_launcher_of_ranks_counts_as_killed(last_words, failures):
    """As below torchrun, which ends with 1 whatever became of its ranks."""
    assert (
        run(f"""
rank = '''
import os, signal
from tiphys.launch.session_registry import CLOSED, note_failure, register_session
register_session(os.environ)
{last_words}
os.kill(os.getpid(), signal.SIGKILL)
'''
child = ChildProcess(["sh", "-c", '"$0" -c "$1"; exit 1', sys.executable, rank], os.environ)
print(ended(child, signals), sorted(child.failures))
""")
        == f"1 {failures}\n"
    )


@pytest.mark.parametrize(("stacks", "failures"), [("", []), ("Thread 0x1 (most recent call first):", ["hang"])])
def test_program_that_sigalrm_ends_hung_if_its_stacks_are_in_the_termination_log(tmp_path, stacks, failures):
    log = tmp_path / "termination-log"
    log.write_text(stacks)
    assert (
        run(f"""
from tiphys.launch import processes
has_words = processes._has_words
processes._has_words = lambda: has_words({str(log)!r})
child = ChildProcess(["sh", "-c", "kill -ALRM $$"], os.environ)
print(ended(child, signals), sorted(child.failures))
""")
        == f"142 {failures}\n"
    )


T = 100.0


def process(pid, name="python", *children, **others):
    return Process(pid, name, children=children, **others)


WORKERS = (process(2), process(3))
TEE = process(9, "tee", reads_pipe=True)


@pytest.mark.parametrize(
    ("orphans", "sent", "sessions", "chosen"),
    [
        pytest.param([process(1, "python", *WORKERS)], {}, set(), [1], id="the program, not its workers"),
        pytest.param([process(1, "python", *WORKERS)], {1: T - 50}, set(), [], id="each once"),
        pytest.param([process(1, "sh", process(2))], {}, {2}, [1], id="a shell dies of it, its child comes next"),
        pytest.param([process(2, "python", process(3))], {1: T}, {2}, [2], id="what the shell left, not its workers"),
        pytest.param([process(1, "bash", process(2), TEE)], {1: T - 1}, {2}, [], id="a shell has a moment"),
        pytest.param([process(1, "bash", process(2), TEE)], {1: T - 2}, set(), [2], id="a shell waits for its child"),
        pytest.param(
            [process(1, "bash", process(2, "bash", process(3)))], {1: T - 9, 2: T - 2}, set(), [3], id="a shell in one"
        ),
        pytest.param([TEE, process(2)], {}, set(), [2], id="a reader ends by itself"),
        pytest.param([process(2, reads_pipe=True)], {}, {2}, [2], id="a session that reads is no reader"),
        pytest.param([process(1, "python", *WORKERS)], {}, {2, 3}, [2, 3], id="sessions before their launcher"),
        pytest.param([process(1, "python", *WORKERS)], {2: T, 3: T}, {2, 3}, [], id="a launcher waits for them"),
        pytest.param([process(1, "python")], {2: T, 3: T}, set(), [1], id="a launcher after its sessions"),
        pytest.param([process(1, "python", *WORKERS)], {}, {1, 3}, [1], id="a session is no launcher"),
        pytest.param([process(1, "bash", process(2, "torchrun", *WORKERS))], {1: T - 2}, {3}, [3], id="below a trap"),
    ],
)
def test_receivers_of_sigterm(orphans, sent, sessions, chosen):
    assert choose_receivers(orphans, sent, sessions, now=T) == chosen


@pytest.mark.parametrize(("handles_sigterm", "chosen"), [(False, []), (True, [1])])
def test_launcher_that_handles_sigterm_gets_it_when_the_first_of_its_sessions_has_ended(handles_sigterm, chosen):
    launcher = process(1, "python", *WORKERS, handles_sigterm=handles_sigterm)
    sent = {2: T, 3: T}
    assert choose_receivers([launcher], sent, {2, 3}, now=T) == []
    assert choose_receivers([launcher], sent, {3}, now=T, has_session_ended=True) == chosen


def test_launcher_imports_no_module_that_is_slow_to_import():
    script = "import sys; before = set(sys.modules); import tiphys.launch.__main__; print(*set(sys.modules) - before)"
    imported = {*subprocess.check_output([sys.executable, "-P", "-c", script], text=True).split()}
    assert "tiphys.launch.processes" in imported
    slow = {
        "asyncio",
        "difflib",
        "inspect",
        "logging",
        "pathlib",
        "pydantic",
        "re",
        "subprocess",
        "typing",
        "urllib.parse",
    }
    assert slow & imported == set()


def test_name_of_a_process_may_look_like_the_end_of_one():
    script = "open('/proc/self/comm', 'w').write('a) b'); from tiphys.launch.process_table import ProcessStat\n"
    assert run(f"{script}stat = ProcessStat('self'); print(stat.name, stat.pid == os.getpid())") == "a) b True\n"


def test_note_of_a_preemption_before_sigterm_says_nothing_about_what_follows():
    registry = SessionRegistry(tells_sessions=True)
    register_session(registry.variables, PREEMPTED)
    assert registry.has_preempted()
    registry.forget_preempted()
    assert not registry.has_preempted()
    register_session(registry.variables, PREEMPTED)
    assert registry.has_preempted()
    registry.close()

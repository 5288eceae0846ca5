"""The program as a child: signals wait until they are asked for, and its end is passed on as a shell does.

All in a process of its own: the signals of a process may go to any of its threads, and a test run has several.
"""

import os
import subprocess
import sys

import pytest

BEGIN = """
import os, signal, sys, time
from tiphys.processes import ChildProcess, SignalQueue

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
    ("script", "told"), [("exit 0", "0 False"), ("exit 7", "7 False"), ("kill -TERM $$", "143 True")]
)
def test_how_it_ended_is_passed_on(script, told):
    assert (
        run(f"""
child = ChildProcess(["sh", "-c", {script!r}], os.environ)
print(ended(child, signals), child.was_signalled)
""")
        == f"{told}\n"
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
        == "True True False None\n143\n"
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


def test_process_1_reaps_what_others_left_behind():
    assert (
        run("""
orphan = os.posix_spawnp("true", ["true"], os.environ)
child = ChildProcess(["true"], os.environ)
os.getpid = lambda: 1
ended(child, signals)
while True:
    child.reap()
    try:
        os.kill(orphan, 0)
    except ProcessLookupError:
        break
    time.sleep(0.01)
print("reaped", child.exit_code)
""")
        == "reaped 0\n"
    )

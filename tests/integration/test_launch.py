"""Real programs below the launcher, whose whole process group gets SIGTERM, as Argo and the local engine send it.

| program | outcome |
|---|---|
| with workers that die of SIGTERM | it saves before they get it |
| below a shell that has more to do | the shell ends, the program saves |
| below a shell with a trap | it gets SIGTERM, although bash waits for it |
| before ``tee`` | all that it prints is in the log |
| below a launcher of ranks that does not know SIGTERM | the sessions get it first |
| with a daemon, or deaf to SIGTERM | nothing is left when the launcher has ended |

Each program prints ``ready`` when it may be signalled.
"""

import os
import signal
import subprocess
import sys

import pytest
from support.processes.launched_program import PATIENCE_SECONDS, Launched
from support.processes.polling import until
from support.processes.process import children_of

pytestmark = pytest.mark.heavy

# A stand-in for a training with a session: it saves for a while, and leaves with 75.
TRAINING = """
import os, signal, sys, time
from tiphys.launch.session_registry import PREEMPTED, register_session
stopped = []
signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
register_session(os.environ)
def say(word): os.write(1, f"{word}{chr(10)}".encode())  # at once, since two ranks may speak
def train(saved="saved"):
    say("ready")
    while not stopped: time.sleep(0.01)
    time.sleep(0.5)
    say(saved)
    register_session(os.environ, PREEMPTED)
    sys.exit(75)
"""

# Not signal.pause: a signal that comes just before it would be waited for forever.
WAIT_FOR_SIGNAL = "while True: time.sleep(0.01)"


def python(script, *arguments):
    return [sys.executable, "-c", script, *arguments]


@pytest.fixture
def training(tmp_path):
    """A file with a training; its name has what names of scripts have."""
    path = tmp_path / "träning v1.2.py"
    path.write_text(f"{TRAINING}\ntrain()\n")
    return path


def test_exit_code_is_that_of_the_program():
    assert Launched(["sh", "-c", "exit 7"], ready=0).ended() == (7, "")
    assert Launched(["sh", "-c", "kill -KILL $$"], ready=0).ended() == (137, "")


@pytest.mark.parametrize(
    ("environ", "is_said"),
    [
        ({"TIPHYS_LINEAGE": "r/fit"}, True),
        ({"TIPHYS_LINEAGE": "r/fit", "TIPHYS_RESUME_FROM": "1-5"}, False),
        ({}, False),
    ],
    ids=["first", "resumed", "keeps none"],
)
def test_training_that_fails_without_a_session_is_told_that_nothing_is_saved(environ, is_said):
    code, out = Launched(["sh", "-c", "exit 7"], ready=0, **environ).ended()
    assert code == 7
    assert ("ended with 7, and no session has saved anything in this attempt; open" in out) is is_said
    assert "no session" not in Launched(["true"], ready=0, **environ).ended()[1]


def test_training_that_fails_with_a_session_is_not_told_that_it_has_none():
    script = f"{TRAINING}\nsys.exit(7)"
    assert Launched(python(script), ready=0, TIPHYS_LINEAGE="r/fit").ended() == (7, "")


@pytest.mark.parametrize(("program", "code"), [("no-such-programme", 127), ("/etc/passwd", 126)])
def test_program_that_cannot_be_started_is_named(program, code):
    ended, out = Launched([program], ready=0).ended()
    assert ended == code
    assert f"{program} cannot be started" in out
    assert "check the command of the step and its image" in out


@pytest.mark.parametrize("words", [[], ["--"], ["--mlfow", "--", "true"], ["true"]])
def test_command_line_without_a_program_or_with_an_unknown_option_is_refused(words):
    command = [sys.executable, "-P", "-m", "tiphys.launch", *words]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=PATIENCE_SECONDS)
    assert ended.returncode == 2
    assert "write: python -P -m tiphys.launch [--mlflow] -- PROGRAM" in ended.stderr


def test_sigterm_of_a_program_without_handler_ends_it_as_a_shell_says():
    launched = Launched(["sh", "-c", "echo ready; exec sleep 600"])
    launched.signal_group()
    assert launched.ended()[0] == 143


@pytest.mark.parametrize(("code", "reported"), [(1, 143), (3, 3), (0, 75)])
def test_program_without_a_session_that_ends_after_sigterm_has_neither_failed_nor_succeeded(code, reported):
    launched = Launched(
        python(
            f"import signal, sys, time; signal.signal(15, lambda *_: sys.exit({code})); print('ready', flush=True)\n"
            "while True: time.sleep(60)"
        )
    )
    launched.signal_group()
    ended, out = launched.ended()
    assert ended == reported
    assert (f"the program ended with {code} after SIGTERM" in out) == (code != 3)


def test_program_saves_although_its_workers_would_die_of_sigterm():
    launched = Launched(
        python(
            f"""{TRAINING}
children = []
for _ in range(2):
    child = os.fork()
    if not child:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(600)
    children.append(child)
def check(*_):
    stopped.append(1)
signal.signal(signal.SIGTERM, check)
import atexit
try:
    train()
finally:
    print("workers", [os.waitpid(child, os.WNOHANG)[0] for child in children], flush=True)
"""
        )
    )
    launched.signal_group()
    assert launched.ended() == (75, "saved\nworkers [0, 0]\n")


def test_pool_whose_workers_are_deaf_ends_with_its_program():
    launched = Launched(
        python(
            f"""{TRAINING}
for _ in range(2):
    if not os.fork():
        while True: time.sleep(1)
train()
"""
        )
    )
    launched.signal_group()
    assert launched.ended() == (75, "saved\n")


def test_program_below_a_shell_with_more_to_do_saves(training):
    launched = Launched(["sh", "-c", f"{sys.executable} '{training}'; echo never"])
    launched.signal_group()
    assert launched.ended() == (75, "saved\n")


def test_program_before_tee_saves_and_its_last_words_are_kept(training, tmp_path):
    log = tmp_path / "log"
    launched = Launched(["bash", "-c", f"{sys.executable} '{training}' | tee {log}"])
    launched.signal_group()
    assert launched.ended() == (75, "saved\n")
    assert log.read_text() == "ready\nsaved\n"


def test_program_below_bash_with_a_trap_saves(training):
    launched = Launched(["bash", "-c", f"trap 'echo trapped' TERM; {sys.executable} '{training}'; echo $?; exit 3"])
    launched.signal_group()
    assert launched.ended() == (75, "saved\ntrapped\n75\n")


def test_program_below_a_script_with_a_trap_saves(training, tmp_path):
    """The name of such a process is that of the script, not that of its shell."""
    script = tmp_path / "entry point"
    script.write_text(f"#!/bin/bash\ntrap 'echo trapped' TERM\n{sys.executable} '{training}'\necho $?\nexit 3\n")
    script.chmod(0o755)
    launched = Launched([str(script)])
    launched.signal_group()
    assert launched.ended() == (75, "saved\ntrapped\n75\n")


def test_slower_of_two_programs_without_a_session_saves():
    """The exit code 75 of the other one means that its own workers may go, and no more."""
    program = """
import os, signal, sys, time
stopped, other = [], os.path.join("/proc", *sys.argv[1:], "exe")
signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
os.write(1, b"ready" + bytes([10]))
while not stopped: time.sleep(0.01)
if len(sys.argv) > 1:
    while os.path.exists(other): time.sleep(0.01)  # False whatever error a process that just goes answers with
    time.sleep(3.5)
    os.write(1, b"saved" + bytes([10]))
sys.exit(75)
"""
    shell = 'python=$1 program=$2; "$python" -c "$program" & "$python" -c "$program" $! & wait'
    launched = Launched(["sh", "-c", shell, "sh", sys.executable, program], ready=2)
    launched.signal_group()
    assert launched.ended() == (75, "saved\n")


def test_program_behind_a_pipe_gets_sigterm_when_it_is_all_that_is_left():
    launched = Launched(["sh", "-c", f"sleep 600 | {sys.executable} -c 'print(\"ready\", flush=True); input()'"])
    launched.signal_group()
    assert launched.ended()[0] in (143, 1)


def test_training_that_reads_a_pipe_saves(training):
    launched = Launched(["sh", "-c", f"yes | {sys.executable} '{training}'"])
    launched.signal_group()
    assert launched.ended() == (75, "saved\n")


def test_daemon_in_a_session_of_its_own_ends_with_its_program():
    launched = Launched(
        ["sh", "-c", "setsid sleep 600 & (setsid sh -c 'sleep 600; true' &) ; echo ready; sleep 0.2; exit 4"]
    )
    assert launched.ended() == (4, "")


def test_deaf_daemon_ends_with_its_program():
    launched = Launched(["sh", "-c", "trap '' TERM HUP; setsid sleep 600 & echo ready; exit 5"])
    assert launched.ended() == (5, "")


def test_program_that_is_deaf_is_killed_when_the_grace_is_over():
    launched = Launched(["sh", "-c", "trap '' TERM; sleep 600 & echo ready; sleep 601; sleep 602"], grace="3")
    launched.signal_group()
    assert launched.ended()[0] == 137


LAUNCHER_OF_RANKS = """
import ctypes, os, signal, subprocess, sys
rank = '''{training}
ctypes = __import__("ctypes")
ctypes.CDLL(None).prctl(1, signal.SIGINT)  # as torch.multiprocessing does: a lost parent interrupts its ranks
train("saved " + sys.argv[1])
'''
ranks = [subprocess.Popen([sys.executable, "-c", rank, str(number)], start_new_session=True) for number in range(2)]
sys.exit(max(rank.wait() != 0 for rank in ranks))
"""


def test_ranks_save_below_a_launcher_that_does_not_know_sigterm():
    """Its death would interrupt them, and its own exit code is 1, whatever theirs are."""
    launched = Launched(python(LAUNCHER_OF_RANKS.replace("{training}", TRAINING)), ready=2)
    launched.signal_group()
    code, out = launched.ended()
    assert sorted(out.splitlines()) == ["saved 0", "saved 1"]
    assert code == 75


def test_ranks_save_below_a_launcher_that_keeps_sigterm_to_itself():
    deaf = "signal.signal(signal.SIGTERM, lambda *_: None)\nranks ="
    script = LAUNCHER_OF_RANKS.replace("{training}", TRAINING).replace("ranks =", deaf, 1)
    launched = Launched(python(script), ready=2)
    launched.signal_group()
    code, out = launched.ended()
    assert sorted(out.splitlines()) == ["saved 0", "saved 1"]
    assert code == 75


LAUNCHER_WITH_HANDLER = """
import os, signal, subprocess, sys, time
rank = '''{training}
say("ready")
while len(stopped) <= int(sys.argv[1]): time.sleep(0.01)
say("saved " + sys.argv[1])
register_session(os.environ, PREEMPTED)
sys.exit(75)
'''
stopped = []
signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
ranks = [subprocess.Popen([sys.executable, "-c", rank, str(number)], start_new_session=True) for number in range(2)]
while not stopped: time.sleep(0.01)
os.write(1, f"SIGTERM after {[rank.poll() for rank in ranks]}{chr(10)}".encode())
for rank in ranks: rank.terminate()
sys.exit(max(rank.wait() != 0 for rank in ranks))
"""


def test_launcher_that_handles_sigterm_gets_it_while_its_slower_ranks_save():
    """A torchrun without it kills them 30 s after the first rank has ended. Rank 1 needs one more, of its launcher."""
    launched = Launched(python(LAUNCHER_WITH_HANDLER.replace("{training}", TRAINING)), ready=2)
    launched.signal_group()
    assert launched.ended() == (75, "saved 0\nSIGTERM after [75, None]\nsaved 1\n")


LAUNCHER_OF_COMPLETE_RANKS = """
import os, signal, subprocess, sys, time
rank = '''{training}
from tiphys.launch.session_registry import CLOSED
say("ready")
while not stopped: time.sleep(0.01)
time.sleep(float(sys.argv[1]))
register_session(os.environ, CLOSED)
say("complete " + sys.argv[1])
'''
signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
ranks = [subprocess.Popen([sys.executable, "-c", rank, seconds], start_new_session=True) for seconds in ("0", "1")]
codes = [rank.wait() for rank in ranks]
time.sleep(1)  # torchrun looks from time to time
sys.exit(max(codes))
"""


def test_launcher_of_ranks_that_complete_their_training_after_sigterm_ends_with_0():
    """torchrun at SIGTERM ends its slower ranks, and with 1, also when none is left."""
    launched = Launched(python(LAUNCHER_OF_COMPLETE_RANKS.replace("{training}", TRAINING)), ready=2)
    launched.signal_group()
    assert launched.ended() == (0, "complete 0\ncomplete 1\n")


def test_worker_with_the_number_of_an_ended_session_is_no_session():
    script = """
import os, signal, sys, time
worker = os.fork()
if not worker: time.sleep(600)
with open(os.environ["TIPHYS_LAUNCHER"], "a") as file: print(worker, 1, file=file)
def save(*_): sys.exit(75 if os.waitpid(worker, os.WNOHANG)[0] == 0 else 1)
signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
time.sleep(600)
"""
    launched = Launched(python(script))
    launched.signal_group()
    assert launched.ended() == (75, "")


def test_program_that_has_saved_and_ends_with_0_is_not_complete(training):
    launched = Launched(["bash", "-c", f"trap : TERM; {sys.executable} '{training}'; exit 0"])
    launched.signal_group()
    code, out = launched.ended()
    assert code == 75
    assert "ended with 0 after SIGTERM, but its training is not complete" in out


def test_program_with_a_session_that_completes_after_sigterm_keeps_its_exit_code():
    end = f"signal.signal(15, lambda *_: sys.exit(0)); say('ready')\n{WAIT_FOR_SIGNAL}"
    launched = Launched(python(f"{TRAINING}\n{end}"))
    launched.signal_group()
    assert launched.ended() == (0, "")


def test_second_sigterm_changes_nothing(training):
    launched = Launched([sys.executable, str(training)])
    launched.signal_group()
    launched.signal_group()
    assert launched.ended() == (75, "saved\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2])
def test_other_signals_reach_the_program_alone(number):
    script = f"""
import os, signal, sys, time
child = os.fork()
if not child: signal.pause()
signal.signal({int(number)}, lambda *_: (print(os.waitpid(child, os.WNOHANG)[0]), sys.exit(9)))
print("ready", flush=True)
{WAIT_FOR_SIGNAL}
"""
    launched = Launched(python(script))
    launched.signal_group(number)
    assert launched.ended() == (9, "0\n")


def test_program_dies_with_a_launcher_that_is_killed():
    launched = Launched(["sh", "-c", "echo ready; exec sleep 600"])
    launched.signal_group(signal.SIGKILL)
    launched.process.communicate(timeout=PATIENCE_SECONDS)
    until(lambda: not launched.alive(), PATIENCE_SECONDS)


UNSHARE = ["unshare", "--pid", "--fork", "--kill-child"]


@pytest.fixture(scope="session")
def namespaces():
    try:
        allowed = subprocess.run([*UNSHARE, "--mount-proc", "true"], check=False).returncode == 0
    except FileNotFoundError:
        allowed = False
    if not allowed:
        pytest.skip("new namespaces of processes are not permitted here")


def test_launcher_that_is_process_1_of_its_container_gets_sigterm(namespaces, training):
    """As in the pods of a gang. The kernel ignores signals of process 1 that it neither handles nor blocks."""
    inner = [sys.executable, "-P", "-m", "tiphys.launch", "--"]
    shell = f"setsid sleep 600 & exec {sys.executable} '{training}'"
    launched = Launched([*UNSHARE, "--mount-proc", *inner, "sh", "-c", shell])
    [process_1] = [
        pid for pid, line in launched.lines().items() if "tiphys.launch -- sh" in line and "unshare" not in line
    ]
    os.kill(process_1, signal.SIGTERM)
    assert launched.ended() == (75, "saved\n")


def test_session_in_another_namespace_of_processes_saves(namespaces, training):
    """Its own number is not the one that the launcher knows."""
    launched = Launched([*UNSHARE, sys.executable, str(training)])
    launched.signal_group()
    assert launched.ended() == (75, "saved\n")


def test_orphan_is_reaped_while_the_program_runs():
    launched = Launched(["sh", "-c", "(sleep 0.1 &); echo ready; exec sleep 600"])
    until(lambda: len(children_of(launched.process.pid)) == 1, PATIENCE_SECONDS)
    assert launched.names("sleep 600")
    launched.signal_group()
    assert launched.ended()[0] == 143


def test_program_has_the_group_the_signals_and_the_streams_of_a_program_of_its_own():
    script = """
import os, signal
masks = [int(line.split()[1], 16) for line in open("/proc/self/status") if line.startswith(("SigBlk", "SigIgn"))]
masks = [sorted(number for number in range(1, 32) if mask >> number - 1 & 1) for mask in masks]  # 32 is the C library's
print(os.getpgrp() == os.getpid(), masks, sorted(os.listdir("/proc/self/fd")), os.environ["PET_SHUTDOWN_TIMEOUT"])
"""
    code, out = Launched([sys.executable, "-S", "-E", "-c", script], grace="300", ready=0).ended()
    # Python itself ignores SIGPIPE (13) and SIGXFSZ (25); 3 is the folder that it lists.
    assert (code, out) == (0, "True [[], [13, 25]] ['0', '1', '2', '3'] 300\n")


def test_timeout_of_torchrun_that_the_author_chose_is_kept():
    command = ["sh", "-c", "echo $PET_SHUTDOWN_TIMEOUT"]
    assert Launched(command, ready=0, PET_SHUTDOWN_TIMEOUT="7").ended() == (0, "7\n")


def test_launchers_may_be_nested(training):
    inner = [sys.executable, "-P", "-m", "tiphys.launch", "--", "sh", "-c", f"{sys.executable} '{training}'; true"]
    launched = Launched(inner)
    launched.signal_group()
    assert launched.ended() == (75, "saved\n")

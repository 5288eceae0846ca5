"""What a forked child of a training has of its session: nothing.

| in the child | outcome |
|---|---|
| SIGTERM | does what the program had installed before the session, by default it ends the child |
| a call of the session, or a session of its own | refused, with the remedy |
| the end of the ``with`` block, by an error or an exit | no save, no crash report, the same exit code |
"""

import contextlib
import faulthandler
import os
import signal
import sys
import time

import pytest
from support.builders.lineage import LINEAGE, RUN, STEP
from support.stories.sessions import open_session, state_at

from tiphys import checkpoint
from tiphys.checkpoint.lifecycle.hang_watchdog import CrashLog
from tiphys.checkpoint.telemetry.output_copy import OutputCopy
from tiphys.errors import UsageError
from tiphys.lineage.select import list_commits
from tiphys.store import RunLayout
from tiphys.store.incarnations import crash_key

PATIENCE_SECONDS = 120
REFUSED = 3

# Python warns of a fork in a process with threads, which is what a data loader does.
pytestmark = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")


def fork(work):
    """Start ``work`` in a forked child, which ends as a program would; return its number."""
    if child := os.fork():
        return child
    code = 70
    try:
        signal.alarm(PATIENCE_SECONDS)
        work()
        code = 0
    except UsageError as error:
        code = REFUSED if "forked from process" in str(error) else 71
    except SystemExit as end:
        code = end.code
    finally:
        os._exit(code)


def end_of(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def sleep_until_signalled():
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        time.sleep(0.05)


def test_sigterm_ends_a_child_as_if_there_were_no_session(store):
    with open_session(store):
        child = fork(sleep_until_signalled)
        os.kill(child, signal.SIGTERM)
        assert end_of(child) == -signal.SIGTERM


def test_a_child_has_the_handler_that_the_program_had_before_the_session(store):
    before = signal.signal(signal.SIGTERM, lambda *_: os._exit(42))
    try:
        with open_session(store) as session:
            child = fork(sleep_until_signalled)
            os.kill(child, signal.SIGTERM)
            assert end_of(child) == 42
            assert not session.should_stop
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("call", ["restore", "flush"])
def test_a_session_call_in_a_forked_child_is_refused(store, call):
    with open_session(store) as session:
        session.step(1, state_at(1))
        assert end_of(fork(getattr(session, call))) == REFUSED


@pytest.mark.parametrize("call", ["step", "save", "report"])
def test_a_step_in_a_child_is_refused_and_stores_nothing(store, call):
    with open_session(store) as session:
        session.step(1, state_at(1))
        objects = dict(store.objects)
        assert end_of(fork(lambda: getattr(session, call)(2, state_at(2)))) == REFUSED
        assert store.objects == objects
        session.step(2, state_at(2))
    assert [ref.global_step for ref in list_commits(store, LINEAGE)] == [2, 1]


@pytest.mark.parametrize("error", [ValueError("a helper failed"), SystemExit(9), None])
def test_the_end_of_a_child_is_not_that_of_the_session(store, error):
    with open_session(store, asynchronous=True) as session:
        session.step(1, state_at(1))

        def leave():
            with contextlib.suppress(ValueError), session:
                if error:
                    raise error

        def leave_inherited():
            session.__exit__(type(error) if error else None, error, None)
            if isinstance(error, SystemExit):
                raise error

        assert end_of(fork(leave)) == REFUSED
        assert end_of(fork(leave_inherited)) == (9 if isinstance(error, SystemExit) else 0)
        session.step(2, state_at(2))
    assert list_commits(store, LINEAGE)[0].global_step == 2
    assert crash_key(RunLayout(RUN), STEP, 1) not in store.objects


def test_a_child_opens_no_session_of_its_own(tmp_path, store):
    environ = {
        "TIPHYS_STORE": str(tmp_path),
        "TIPHYS_RUN": RUN,
        "TIPHYS_STEP": STEP,
        "TIPHYS_ATTEMPT": "1",
        "TIPHYS_LINEAGE": LINEAGE,
    }
    with open_session(store):
        assert end_of(fork(lambda: checkpoint.session(environ=environ).restore())) == REFUSED
        assert end_of(fork(lambda: checkpoint.session(environ={}).step(1, {}))) == 0
    # After its end a child is as free as before.
    assert end_of(fork(lambda: checkpoint.session(environ={**environ, "TIPHYS_STEP": "other"}))) == 0


def test_a_crash_of_a_child_is_not_written_to_the_termination_log(tmp_path):
    log = tmp_path / "termination-log"
    log.touch()
    was_enabled = faulthandler.is_enabled()
    faulthandler.disable()
    crash_log = CrashLog(log)
    try:
        crash_log.open()
        assert end_of(fork(lambda: os.kill(os.getpid(), signal.SIGSEGV))) == -signal.SIGSEGV
        assert log.read_text() == ""
    finally:
        crash_log.close()
        if was_enabled:
            faulthandler.enable(sys.__stderr__)


def test_a_child_neither_waits_for_nor_repeats_the_copy_of_the_output(store):
    copy = OutputCopy(store, RUN, STEP, 1, interval_seconds=PATIENCE_SECONDS)
    copy.write("before the fork\n")
    with copy._starting:  # as if another thread started the writer during the fork
        child = fork(copy.close)
    assert end_of(child) == 0
    assert store.objects == {}
    copy.close()
    assert len(store.objects) == 1

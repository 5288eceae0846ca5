"""A session that the program opens without a ``with`` block begins with its first call and ends with the program.

| the program | outcome |
|---|---|
| calls the session first | it handles SIGTERM, as after a ``with`` |
| opens a ``with`` block afterwards | the block's end closes it, once |
| uses it after its end | refused |
| is replaced, or loses its storage | exit codes 76 and 69, as in a ``with`` block |
| is imported again by multiprocessing | its session is refused there |
"""

import atexit
import contextlib
import multiprocessing
import os
import signal
from typing import Any

import pytest
from support.builders.lineage import LINEAGE, RUN, STEP, claim_of, ref, write_claim
from support.stories.sessions import open_session, state_at

from tiphys import checkpoint
from tiphys.errors import StoreError, UsageError
from tiphys.lineage.select import list_commits


@pytest.fixture
def session(store, monkeypatch):
    before, registered = signal.getsignal(signal.SIGTERM), []
    monkeypatch.setattr(atexit, "register", registered.append)
    session: Any = open_session(store, opens_itself=True, asynchronous=True)
    session.registered = registered
    yield session
    with contextlib.suppress(SystemExit):
        session.__exit__(None, None, None)
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("call", ["restore", "step", "save", "report", "flush"])
def test_the_first_call_handles_sigterm(store, session, call):
    getattr(session, call)(*((1, state_at(1)) if call in ("step", "save") else (1,) if call == "report" else ()))
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(SystemExit) as end:
        session.step(2, state_at(2))
    assert end.value.code == 75
    assert list_commits(store, LINEAGE)[0] == ref(1, 2)


def test_the_end_of_the_program_waits_for_the_last_save_and_closes_the_session(store, session):
    session.step(1, state_at(1))
    session.step(2, state_at(2))
    (end_program,) = session.registered
    end_program()
    assert list_commits(store, LINEAGE) == [ref(1, 2), ref(1, 1)]
    with pytest.raises(UsageError, match="has ended"):
        session.step(3, state_at(3))


def test_a_with_block_after_the_first_call_closes_the_session_once(store, session):
    state = session.restore(default=state_at(0))
    with session:
        session.step(1, state)
    (end_program,) = session.registered
    end_program()
    assert list_commits(store, LINEAGE) == [ref(1, 1)]


def test_a_replaced_attempt_exits_with_76_without_a_with_block(store, session):
    session.step(1, state_at(1)).wait()
    write_claim(store, claim_of(2))
    with pytest.raises(SystemExit) as end:
        session.step(2, state_at(2)).wait()
        session.step(3, state_at(3))
    assert end.value.code == 76


def test_storage_that_fails_at_the_restore_exits_with_69_without_a_with_block(store, session, monkeypatch):
    def fail(*_, **__):
        raise StoreError("no answer")

    monkeypatch.setattr(store, "read", fail)
    monkeypatch.setattr(store, "list", fail)
    with pytest.raises(SystemExit) as end:
        session.restore()
    assert end.value.code == 69


def test_a_program_that_multiprocessing_imports_again_has_no_session_there(tmp_path, monkeypatch):
    environ = {
        "TIPHYS_STORE": str(tmp_path / "runs"),
        "TIPHYS_RUN": RUN,
        "TIPHYS_STEP": STEP,
        "TIPHYS_ATTEMPT": "1",
        "TIPHYS_LINEAGE": LINEAGE,
    }
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    session = checkpoint.session(environ=environ)  # a module may open it for the functions below
    with pytest.raises(UsageError, match='below if __name__ == "__main__"'):
        session.restore()
    with pytest.raises(UsageError, match="which would train once more"), session:
        raise AssertionError("not reached")

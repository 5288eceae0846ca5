"""Every error ends as one line on stderr and the exit code that is documented for it."""

import errno
import os

import pytest

from hera_pipelines.cli.error_messages import EXIT_CODES, RunFailedError, RunInterruptedError, report_error
from hera_pipelines.cli.screen import Screen
from tiphys import errors


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.UsageError("what, where, why"), 2),
        (errors.NotFoundError("what, where, why"), 3),
        (errors.ConflictError("what, where, why"), 4),
        (errors.IntegrityError("what, where, why"), 5),
        (errors.StoreError("what, where, why"), 75),
        (errors.SettingsError("what, where, why"), 78),
        (RunFailedError("what, where, why"), 1),
        (RunInterruptedError("what, where, why"), 130),
    ],
)
def test_expected_errors_are_their_own_sentence(
    error: errors.TiphysError, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report_error(error, Screen()) == code
    assert capsys.readouterr() == ("", "tiphys: what, where, why\n")
    assert code in EXIT_CODES


def test_lines_of_a_message_are_joined(capsys: pytest.CaptureFixture[str]) -> None:
    report_error(errors.UsageError("one\n   two"), Screen())
    assert capsys.readouterr().err == "tiphys: one two\n"


def test_an_interrupt_has_its_own_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert report_error(KeyboardInterrupt(), Screen()) == 130
    assert capsys.readouterr().err == "tiphys: interrupted\n"


def test_the_unexpected_is_called_a_bug_without_its_trace(capsys: pytest.CaptureFixture[str]) -> None:
    assert report_error(KeyError("fit"), Screen()) == 1
    said = capsys.readouterr().err
    assert said.startswith("tiphys: this is a bug in Tiphys: KeyError: 'fit'; ")
    assert "--verbose" in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("number", "code", "remedy"),
    [
        (errno.ENOSPC, 75, "free space, and try again"),
        (errno.EACCES, 78, "grant access, or name another folder"),
        (errno.EROFS, 78, "grant access, or name another folder"),
    ],
)
def test_a_full_or_forbidden_disk_is_no_bug(
    number: int, code: int, remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report_error(OSError(number, os.strerror(number), "/state/x"), Screen()) == code
    assert capsys.readouterr().err == f"tiphys: /state/x: {os.strerror(number)}; {remedy}\n"


def test_any_other_system_error_is_a_bug(capsys: pytest.CaptureFixture[str]) -> None:
    assert report_error(OSError(errno.EBADF, "Bad file descriptor"), Screen()) == 1
    assert "this is a bug" in capsys.readouterr().err


def test_verbose_adds_the_trace(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        raise KeyError("fit")
    except KeyError as error:
        report_error(error, Screen(verbose=True))
    said = capsys.readouterr().err
    assert "Traceback" in said
    assert "test_error_messages.py" in said

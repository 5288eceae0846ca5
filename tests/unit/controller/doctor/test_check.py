"""The frame of all checks: their findings get its name, and a value that could not be read ends it.

| the check | findings |
|---|---|
| yields some | those, under its name |
| needs a value that could not be read | what it yielded before, then that it was not checked, and why |
| raises | the error: a bug is no finding |
"""

from collections.abc import Iterator

import pytest
from tiphys_controller.doctor.check import (
    CheckStatus,
    Finding,
    UnknownValue,
    check,
    failed,
    failed_checks,
    known,
    not_checked,
    passed,
    warning,
)


@check("sizes")
def check_sizes(first: int, second: int | UnknownValue) -> Iterator[Finding]:
    yield passed(f"{10 // first}", "ml")
    yield warning(f"{known(second)}", "less")


def test_findings_have_the_name_of_their_check_and_their_own_place() -> None:
    found = check_sizes(5, 3)
    assert [(one.name, one.state, one.sentence) for one in found] == [
        ("ml/sizes", "ok", "2"),
        ("sizes", "warning", "3"),
    ]


def test_a_value_that_could_not_be_read_ends_the_check_and_is_no_failure() -> None:
    found = check_sizes(5, UnknownValue("it is forbidden"))
    assert [(one.check, one.state) for one in found] == [("sizes", CheckStatus.OK), ("sizes", CheckStatus.UNKNOWN)]
    assert found[1].sentence == "not checked: it is forbidden"
    assert failed_checks(found) == []


def test_a_bug_of_a_check_is_no_finding() -> None:
    with pytest.raises(ZeroDivisionError):
        check_sizes(0, 1)


def test_a_check_that_failed_in_several_places_is_named_once() -> None:
    found = [failed("no", "x", place)._replace(check="rights") for place in ("ml", "vision")]
    assert failed_checks([*found, not_checked("why")]) == ["rights"]

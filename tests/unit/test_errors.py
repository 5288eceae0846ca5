"""The tree of errors: what a script branches on, and what the page at its top says."""

import re

import pytest
import yaml

from tiphys import errors
from tiphys.errors import TiphysError


def all_errors() -> list[type[TiphysError]]:
    return [
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, TiphysError) and kind.__module__ == errors.__name__
    ]


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (errors.TiphysError, 1),
        (errors.UsageError, 2),
        (errors.NotFoundError, 3),
        (errors.ObjectMissingError, 3),
        (errors.ConflictError, 4),
        (errors.ObjectExistsError, 4),
        (errors.FencedError, 4),
        (errors.IntegrityError, 5),
        (errors.StoreError, 75),
        (errors.SettingsError, 78),
        (errors.ForbiddenError, 78),
    ],
)
def test_errors_have_their_exit_codes(kind: type[TiphysError], code: int) -> None:
    assert kind.exit_code == code


def test_an_unknown_name_comes_with_the_nearest_one() -> None:
    rate = errors.unknown_name_message("step 'fit'", "input", "rat", ["rate", "data"])
    assert rate == "step 'fit' has no input 'rat'; did you mean 'rate'? It has: rate, data"
    assert errors.unknown_name_message("it", "input", "x", ["rate"]) == "it has no input 'x'; it has: rate"
    assert errors.unknown_name_message("it", "input", "x", []) == "it has no input 'x'; it has: none"
    many = [f"name-{number}" for number in range(30)]
    assert (
        errors.unknown_name_message("it", "input", "name7", many) == "it has no input 'name7'; did you mean 'name-7'?"
    )


def test_yaml_that_cannot_be_parsed_is_named_with_its_line() -> None:
    with pytest.raises(yaml.YAMLError) as caught:
        yaml.safe_load("queues:\n  - {name: a\n")
    sentence = errors.yaml_error_message("queue file q.yaml", caught.value)
    assert (
        sentence
        == "queue file q.yaml, line 3, column 1, is not valid YAML: expected ',' or '}', but got '<stream end>'"
    )
    assert errors.yaml_error_message("f", ValueError("a\n b")) == "f is not valid YAML: a b"


def test_temporary_errors_have_an_exit_code_of_their_own() -> None:
    """A wrapper script repeats on EX_TEMPFAIL; nothing may share it that stays wrong for ever."""
    assert [kind.__name__ for kind in all_errors() if kind.exit_code == 75] == ["StoreError", "StoreFullError"]


def test_the_tree_in_the_documentation_is_the_tree() -> None:
    drawn: dict[str, int] = {}
    for line in (errors.__doc__ or "").splitlines():
        if match := re.match(r"^ {4}([│├└─ ]*)(\w+Error)\b", line):
            drawn[match[2]] = len(match[1]) // 4

    depths = {kind.__name__: len(kind.__mro__) - len(TiphysError.__mro__) for kind in all_errors()}
    assert drawn == depths

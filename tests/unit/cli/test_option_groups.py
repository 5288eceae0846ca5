"""A dataclass declares options that several commands take together.

| field | command line |
|---|---|
| with an option | that option, in the place of the parameter |
| with a group | the options of the group |
| with neither | none; it keeps its default |
| that the command does not choose | none; it keeps its default, also beside a parameter of its name |
"""

from dataclasses import dataclass, field
from typing import Annotated

import pytest
import typer
from typer.main import get_command
from typer.testing import CliRunner

from hera_pipelines.cli.shared_options import with_option_groups

NameOption = Annotated[str, typer.Option("--name", help="Name of it.")]
SpeedOption = Annotated[float, typer.Option("--speed", help="Speed of it.")]


@dataclass(frozen=True)
class _Inner:
    speed: SpeedOption = 1.0


@dataclass(frozen=True)
class _Outer:
    name: NameOption = "none"
    inner: _Inner = field(default_factory=_Inner)
    note: str = "kept"


@pytest.fixture
def taken() -> list[tuple[str, bool, _Outer]]:
    return []


@pytest.fixture
def application(taken: list[tuple[str, bool, _Outer]]) -> typer.Typer:
    application = typer.Typer(rich_markup_mode=None)

    @application.command()
    @with_option_groups
    def move(
        thing: Annotated[str, typer.Argument(help="What to move.")],
        *,
        twice: Annotated[bool, typer.Option("--twice", help="Move it twice.")] = False,
        options: _Outer,
    ) -> None:
        """Move a thing."""
        taken.append((thing, twice, options))

    return application


@pytest.mark.parametrize(
    ("line", "options"),
    [
        (["box"], _Outer()),
        (["box", "--speed", "2.5", "--name", "east"], _Outer("east", _Inner(2.5))),
    ],
)
def test_options_of_nested_groups_reach_the_command(
    application: typer.Typer, taken: list[tuple[str, bool, _Outer]], line: list[str], options: _Outer
) -> None:
    assert CliRunner().invoke(application, line).exit_code == 0
    assert taken == [("box", False, options)]


def test_help_lists_the_options_in_the_place_of_the_group(application: typer.Typer) -> None:
    names = [parameter.name for parameter in get_command(application).params]
    assert names[:4] == ["thing", "twice", "name", "speed"]
    assert "Move a thing." in CliRunner().invoke(application, ["--help"]).output


def test_command_takes_the_options_of_a_group_that_it_chooses() -> None:
    taken: list[tuple[list[str], _Outer]] = []
    application = typer.Typer(rich_markup_mode=None)

    @application.command()
    @with_option_groups
    def move(
        *,
        name: Annotated[list[str], typer.Option("--name", help="Names of its own.")],
        options: Annotated[_Outer, "speed"],
    ) -> None:
        """Move things."""
        taken.append((name, options))

    assert [parameter.name for parameter in get_command(application).params][:2] == ["name", "speed"]
    assert CliRunner().invoke(application, ["--speed", "2.5", "--name", "a", "--name", "b"]).exit_code == 0
    assert taken == [(["a", "b"], _Outer(inner=_Inner(2.5)))]

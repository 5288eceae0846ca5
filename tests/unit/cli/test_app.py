"""The help of ``tiphys``: commands under the headings of what people look for, in whole sentences, with examples."""

from collections.abc import Iterator
from typing import Any

import pytest

from hera_pipelines.cli.app import COMMAND_GROUPS, COMMANDS, main


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["--help"]) == 0
    return capsys.readouterr().out


def test_commands_stand_under_one_heading_each() -> None:
    names = [name for group in COMMAND_GROUPS.values() for name in group]
    assert sorted(names) == sorted(COMMANDS)


def test_help_has_all_commands_in_the_order_of_their_headings(shown: str) -> None:
    headings = [f"\n{heading}:\n" for heading in COMMAND_GROUPS]
    positions = [shown.index(heading) for heading in headings]
    assert positions == sorted(positions)
    sections = [shown[start:end] for start, end in zip(positions, [*positions[1:], None], strict=True)]
    for section, group in zip(sections, COMMAND_GROUPS.values(), strict=True):
        found = [line.split()[0] for line in section.splitlines()[2:] if line.startswith("  ") and line[2] != " "]
        assert found[: len(group)] == list(group)


@pytest.mark.parametrize("name", COMMANDS)
def test_summary_of_a_command_is_shown_to_its_end(shown: str, name: str) -> None:
    assert COMMANDS[name].summary in " ".join(shown.split())


def all_commands() -> Iterator[tuple[str, Any]]:
    """Each command and each command of a group, by the words that call it."""
    for name, source in COMMANDS.items():
        command = source.load(name)
        yield name, command
        for inner, inner_command in getattr(command, "commands", {}).items():
            yield f"{name} {inner}", inner_command


def test_help_of_each_command_has_an_example_of_its_own_words() -> None:
    lacking = [words for words, command in all_commands() if f"  tiphys {words}" not in (command.epilog or "")]
    assert not lacking

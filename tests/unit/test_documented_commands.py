"""Each ``tiphys`` command that a page, an example or the notes of the chart show exists, and has its options."""

import re
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from hera_pipelines.cli.app import COMMANDS

ROOT = Path(__file__).parents[2]
PAGES = subprocess.run(
    ["git", "ls-files", "*.md", "*NOTES.txt", "examples/*.py"], cwd=ROOT, capture_output=True, text=True, check=True
).stdout.split()
SHOWN = re.compile(r"(?:^(?:\$ )?|`|[|] )tiphys ((?:[^\n`]|\\\n)*)", re.MULTILINE)
EVERYWHERE = {"--help", "--quiet", "--verbose", "--no-color", "--version", "--install-completion"}
PLACEHOLDERS = {"…", "KIND"}


@cache
def command(name: str) -> Any:
    return COMMANDS[name].load(name)


def words_of(shown: str) -> list[str]:
    """The words of one command: up to a comment, a pipe, a column of explanations, or the end of an alternative."""
    text = re.split(r"  |[|>;#]|&&", shown.replace("\\\n", " "))[0]
    return [word.strip("'\"[](),") for word in text.split()]


def complaint(shown: str) -> str:
    """What is wrong with a command; empty if nothing is."""
    words = words_of(shown)
    if not words or words[0].startswith("-") or words[0] in PLACEHOLDERS:
        return "" if not words or words[0].partition("=")[0] in EVERYWHERE | PLACEHOLDERS else f"no option {words[0]}"
    if words[0] not in COMMANDS:
        return f"no command {words[0]}"
    found = command(words[0])
    if (inner := getattr(found, "commands", {})) and len(words) > 1 and words[1] in inner:
        found = inner[words[1]]
    known = {name for one in found.params for name in (*one.opts, *one.secondary_opts)} | EVERYWHERE
    given = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
    return f"no option {sorted(given - known)}" if given - known else ""


def test_every_command_that_is_shown_exists_with_its_options() -> None:
    shown = [(page, command) for page in PAGES for command in SHOWN.findall((ROOT / page).read_text())]
    assert not [f"{page}: tiphys {command}: {wrong}" for page, command in shown if (wrong := complaint(command))]


def test_documented_commands_are_found() -> None:
    shown = [command for page in PAGES for command in SHOWN.findall((ROOT / page).read_text())]
    assert len(shown) > 200
    assert {words_of(command)[0] for command in shown if words_of(command)} >= set(COMMANDS)


@pytest.mark.parametrize(
    ("shown", "wrong"),
    [
        ("runs rm digits --yes", ""),
        ("get RUN -o json | jq", ""),
        ("gte RUN", "no command gte"),
        ("get RUN --jsno", "no option ['--jsno']"),
        ("runs diff A B --everything", "no option ['--everything']"),
    ],
)
def test_a_command_that_does_not_exist_is_noticed(shown: str, wrong: str) -> None:
    assert complaint(shown) == wrong

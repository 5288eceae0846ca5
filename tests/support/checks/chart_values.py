"""The values of the chart as their own file documents them: a comment that starts with `# --` stands above a key."""

import json
import re
from collections.abc import Iterator
from typing import Any

import yaml

from support.checks.chart import CHART

_KEY = re.compile(r"(?P<indent> *)(?P<key>[A-Za-z_]+):")
_BEGIN, _END = "<!-- values: begin -->\n", "<!-- values: end -->\n"


def defaults() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
    return loaded


def documented() -> dict[str, str]:
    """What each documented key is for, by its dotted path."""
    found: dict[str, str] = {}
    path: list[str] = []
    comment: list[str] = []
    for line in (CHART / "values.yaml").read_text().splitlines():
        if line.strip().startswith("#"):
            comment.append(line.strip().lstrip("# "))
        elif match := _KEY.match(line):
            path = [*path[: len(match["indent"]) // 2], match["key"]]
            if comment and comment[0].startswith("-- "):
                found[".".join(path)] = " ".join(comment).removeprefix("-- ")
            comment = []
        else:
            comment = []
    return found


def value_at(values: Any, path: str) -> Any:
    for part in path.split("."):
        values = values[part]
    return values


def leaves(values: Any, path: str = "") -> Iterator[str]:
    """Dotted paths of everything that is no mapping, or an empty one."""
    if not isinstance(values, dict) or not values:
        yield path
        return
    for key, value in values.items():
        yield from leaves(value, f"{path}.{key}".lstrip("."))


def table() -> str:
    """The table of the chart's README."""
    rows = [
        f"| `{path}` | `{json.dumps(value_at(defaults(), path))}` | {text.replace('|', '&#124;')} |"
        for path, text in documented().items()
    ]
    return "\n".join(["| value | default | what it is for |", "|---|---|---|", *rows, ""])


def with_table(readme: str) -> str:
    """The README with the table as it should be."""
    before, _, rest = readme.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    return f"{before}{_BEGIN}\n{table()}\n{_END}{after}"

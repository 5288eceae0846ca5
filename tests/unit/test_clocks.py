"""Defaults of clocks, which tests replace: durations by a clock that never jumps, stored times by one in UTC."""

import ast
from collections.abc import Iterator
from pathlib import Path

from support.checks import storeys

ROOT = storeys.ROOT
MODULES = [path for top in storeys.FOLDERS.values() for path in sorted(top.rglob("*.py"))]
DEFAULTS = {
    "Callable[[], float]": {"time.monotonic"},
    "Callable[[], datetime]": {"utc_now", "lambda: datetime.now(UTC)"},
}
WALL_CLOCKS = [("tiphys/checkpoint/ranks/step_time.py", "wall_clock: Callable[[], float]=time.time")]
"""Seconds since the epoch, which the members of a gang share."""
FILE_CLOCKS = [
    ("tiphys/checkpoint/exec/supervise.py", "time.time_ns"),
    ("tiphys/checkpoint/exec/watch.py", "time.time_ns"),
]
"""The clock that stamps files, against which their times are compared."""
STORED_TIMES = [("tiphys/launch/restart.py", "time.time")]
"""A time for people, by the standard library's leanest clock: the launcher hands it to the next process."""


def parse_modules(*texts: str) -> Iterator[tuple[Path, ast.AST]]:
    """The modules in which one of the texts stands: to parse all of them takes seconds."""
    for path in MODULES:
        source = path.read_text()
        if any(text in source for text in texts):
            yield path, ast.parse(source)


def defaults(tree: ast.AST) -> Iterator[tuple[str, str, str]]:
    """Name, annotation and default of each parameter and field that has both."""
    for node in ast.walk(tree):
        if isinstance(node, ast.arguments):
            positional = [*node.posonlyargs, *node.args]
            pairs = [*zip(reversed(positional), reversed(node.defaults), strict=False)]
            for argument, default in [*pairs, *zip(node.kwonlyargs, node.kw_defaults, strict=True)]:
                if argument.annotation is not None and default is not None:
                    yield argument.arg, ast.unparse(argument.annotation), ast.unparse(default)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            yield ast.unparse(node.target), ast.unparse(node.annotation), ast.unparse(node.value)


def test_the_default_of_a_clock_is_monotonic_for_seconds_and_utc_for_times() -> None:
    found, others = 0, []
    for path, tree in parse_modules(*DEFAULTS):
        for name, annotation, default in defaults(tree):
            if annotation in DEFAULTS and default not in ("None", "..."):
                found += 1
                if default not in DEFAULTS[annotation]:
                    others.append((str(path.relative_to(ROOT)), f"{name}: {annotation}={default}"))
    assert found >= 30
    assert others == WALL_CLOCKS


def test_no_duration_is_measured_by_a_clock_that_jumps() -> None:
    jumping = ("time.time", "time.time_ns", "datetime.utcnow")
    uses = [
        (str(path.relative_to(ROOT)), clock)
        for path, tree in parse_modules(*jumping)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and (clock := ast.unparse(node)) in jumping
    ]
    assert uses == [*FILE_CLOCKS, *((place, "time.time") for place, _ in WALL_CLOCKS), *STORED_TIMES]

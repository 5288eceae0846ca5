"""No regular expression of the product takes more than linear time: a tenant writes the text that it meets.

Every pattern in the sources is tried, also one that was written today, on texts that are made from
its own parse tree (`support.checks.patterns`). Time is CPU time of the thread, the least of several tries, and
compared between two lengths of which one is sixteen times the other.
"""

import re
import time
from collections.abc import Callable

import pytest
from support.checks.patterns import SOURCES, FoundPattern, attack_texts, find_patterns

from tiphys.protocol.compiled_workflow import replace_tags, split_tags, substitute_tags
from tiphys.protocol.variables import find_variables, map_variables

SHORT, LONG = 375, 6_000
MAX_RATIO = 60.0
"""For texts of which one is sixteen times as long: 16 is linear, 256 quadratic."""
NOTICEABLE_SECONDS = 0.01
TRIES = 3

BOUNDED = {
    "tiphys_controller.kubernetes.events.description._WAIT": 2_000,  # the text is cut to _MAX_SEARCHED_CHARACTERS
}
"""Patterns whose text cannot be longer, with the number of its characters: so much may take `NOTICEABLE_SECONDS`."""

Measured = Callable[[str], object]


def least_seconds(measured: Measured, text: str, tries: int = 1) -> float:
    found = []
    for _ in range(tries):
        before = time.thread_time()
        measured(text)
        found.append(time.thread_time() - before)
    return min(found)


def is_noticeable(measured: Measured, text: str) -> bool:
    """Whether it takes that long each time: a collection of garbage takes as long, once."""
    return all(least_seconds(measured, text) > NOTICEABLE_SECONDS for _ in range(TRIES))


def is_superlinear(measured: Measured, text: Callable[[int], str], bound: int = LONG) -> bool:
    length = 12.0
    while length < SHORT:  # slowly, because one that is exponential would not come back from a long text
        if is_noticeable(measured, text(int(length))):
            return True
        length *= 1.2
    if bound < LONG:
        return is_noticeable(measured, text(bound))
    long_seconds = least_seconds(measured, text(LONG))
    if long_seconds < NOTICEABLE_SECONDS:
        return False
    long_seconds = min(long_seconds, least_seconds(measured, text(LONG), TRIES - 1))
    return long_seconds > MAX_RATIO * least_seconds(measured, text(SHORT), 3 * TRIES)


def method_of(pattern: "re.Pattern[str]", name: str) -> Measured:
    method = getattr(pattern, name)
    if isinstance(pattern.pattern, bytes):
        assert name not in ("sub", "subn"), "give the replacement as bytes"
        return lambda text: next(iter(method(text.encode())), None) if name == "finditer" else method(text.encode())
    if name in ("sub", "subn"):
        return lambda text: method("", text)
    return (lambda text: list(method(text))) if name == "finditer" else method


def find_bad_text(found: FoundPattern, bound: int = LONG) -> str:
    for text in attack_texts(found.pattern):
        for name in found.methods:
            if is_superlinear(method_of(found.pattern, name), text, bound):
                return f"{name} of {text(30)!r}"
    return ""


def test_patterns_of_the_product_take_linear_time() -> None:
    patterns = {folder: list(find_patterns(folder)) for folder in SOURCES}
    assert all(len(found) > 5 for found in patterns.values()), "they are found"
    # Many modules import one pattern, or write it again: it is tried once.
    distinct = {
        (found.pattern, found.methods, BOUNDED.get(found.place, LONG)): found
        for package in patterns.values()
        for found in package
    }
    bad = {found.place: find_bad_text(found, bound) for (_, _, bound), found in distinct.items()}
    assert {place: text for place, text in bad.items() if text} == {}


@pytest.mark.parametrize(
    ("pattern", "method"),
    [
        (r"\{\{(.*?)\}\}", "findall"),
        (r"(a+)+b", "match"),
        (r"(x|xx)*y", "fullmatch"),
        (r"^\s*(?:\S+ => )?(/\S+)$", "search"),
        (r"(.+?)\.\.(.+)", "fullmatch"),
    ],
)
def test_bad_pattern_is_noticed(pattern: str, method: str) -> None:
    found = FoundPattern("planted", re.compile(pattern, re.MULTILINE), (method,))
    assert any(find_bad_text(found) for _ in range(TRIES)), (
        "beside load the short text may take as long as the long one"
    )


PUMPS = ("{{", "{", "{{a", "}}", "{{}}", "{{ü}", "{{{", "{{=a.b['c']}}", "'\\", "/*", "a.", "{{a.b}}")


@pytest.mark.parametrize(
    "measured",
    [
        lambda text: list(split_tags(text)),
        lambda text: replace_tags(text, str.upper),
        lambda text: substitute_tags({"a": [text]}, {"ü": "x"}.get),
        lambda text: list(find_variables({"a": [text], "expression": text})),
        lambda text: map_variables({"a": [text], "expression": text}, lambda variable: ("new", *variable.names)),
    ],
    ids=["split", "replace", "substitute", "find", "map"],
)
def test_placeholders_take_linear_time(measured: Measured) -> None:
    texts = {pump: lambda length, pump=pump: pump * (length // len(pump)) for pump in PUMPS}  # characters, as elsewhere
    assert not [pump for pump, text in texts.items() if is_superlinear(measured, text)]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{{",
        "}}",
        "a",
        "{{a}}",
        "x{{a}}y{{ b\n}}z",
        "{{{a}}}",
        "{{{{a}}b}}",
        "{{}}",
        "{{=a}}{{",
        "}}{{a}}",
        "{{ü}} }}",
    ],
)
def test_placeholders_are_those_of_the_shortest_match(text: str) -> None:
    oracle = re.compile(r"\{\{(.*?)\}\}", re.DOTALL)
    assert [tag for _, tag in split_tags(text) if tag is not None] == oracle.findall(text)
    assert replace_tags(text, lambda tag: f"<{tag}>") == oracle.sub(lambda match: f"<{match[1]}>", text)

"""Argo's ``depends`` conditions: parse them, evaluate them, and remove finished tasks from them.

The local engine and the planner read the same conditions; one parser keeps both on Argo's meaning. Argo starts a task
once **all** tasks that its condition names have ended, and omits it if the condition is then false. Removing finished
tasks from a Workflow must change neither.

Source: Argo Workflows v4.1 ``workflow/common/ancestry.go`` and ``workflow/controller/dag.go``.
"""

import re
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tiphys.errors import UsageError

RESULTS = ("Succeeded", "Failed", "Errored", "Skipped", "Omitted", "Daemoned")
_GROUP_RESULTS = ("AnySucceeded", "AllFailed")
_MAX_NESTING = 50
"""Brackets and negations inside each other. Argo's own examples have three; each is a call of the parser."""
_MAX_SHOWN_CHARACTERS = 300
_TOKEN = re.compile(r"\s*(&&|\|\||!|\(|\)|[A-Za-z0-9][-A-Za-z0-9]*(?:\.[A-Za-z]+)?)")

KnownResults = Mapping[str, frozenset[str]]
"""Results that hold for each task that has ended for good; "" stands for the bare task name."""

DONE_RESULTS = frozenset({"", "Succeeded"})
DONE_FAN_OUT_RESULTS = DONE_RESULTS | {"AnySucceeded"}
OMITTED_RESULTS = frozenset({"Omitted"})


@dataclass(frozen=True)
class TaskResult:
    """``fit.Failed``, or a bare ``fit`` when ``result`` is empty."""

    task: str
    result: str

    def __str__(self) -> str:
        return f"{self.task}.{self.result}" if self.result else self.task


@dataclass(frozen=True)
class Not:
    term: "DependsExpression"

    def __str__(self) -> str:
        return f"!{_with_brackets(self.term)}"


@dataclass(frozen=True)
class AllOf:
    terms: "tuple[DependsExpression, ...]"

    def __str__(self) -> str:
        return " && ".join(_with_brackets(term) for term in self.terms)


@dataclass(frozen=True)
class AnyOf:
    terms: "tuple[DependsExpression, ...]"

    def __str__(self) -> str:
        return " || ".join(_with_brackets(term) for term in self.terms)


DependsExpression = TaskResult | Not | AllOf | AnyOf


def parse_depends(text: str) -> DependsExpression:
    """Parse a ``depends`` condition.

    Raises:
        UsageError: the condition is not made of task results, ``!``, ``&&``, ``||`` and brackets, or is nested too
            deeply.
    """
    tokens = _tokens(text)
    expression = _parse_alternatives(tokens, text, _MAX_NESTING)
    if tokens:
        raise _syntax_error(text, f"{tokens[0]!r} is not expected there")
    return expression


def awaited_tasks(task: Mapping[str, Any]) -> frozenset[str]:
    """Names of the tasks that a task of a DAG waits for, by its ``depends`` and ``dependencies``.

    Raises:
        UsageError: its ``depends`` cannot be read.
    """
    depends = tasks_in(parse_depends(task["depends"])) if task.get("depends") else ()
    return frozenset({*depends, *(task.get("dependencies") or ())})


def tasks_in(expression: DependsExpression) -> Iterator[str]:
    """Tasks that a condition names, in the order written, with repetitions."""
    match expression:
        case TaskResult(task):
            yield task
        case Not(term):
            yield from tasks_in(term)
        case AllOf(terms) | AnyOf(terms):
            for term in terms:
                yield from tasks_in(term)


def simplify(expression: DependsExpression, known_results: KnownResults) -> DependsExpression | bool:
    """Simplify a condition with the known results; a bool if they decide it."""
    match expression:
        case TaskResult(task, result):
            return (result in known_results[task]) if task in known_results else expression
        case Not(term):
            inner = simplify(term, known_results)
            return not inner if isinstance(inner, bool) else Not(inner)
        case AllOf(terms):
            return _simplify_terms(terms, known_results, decisive=False, kind=AllOf)
        case AnyOf(terms):
            return _simplify_terms(terms, known_results, decisive=True, kind=AnyOf)


def drop_known_tasks(text: str, known_results: KnownResults) -> str | bool:
    """The condition for a Workflow without the tasks of ``known_results``.

    A bool if it names no other task. Every other task stays named, because Argo
    waits for all tasks that a condition names.
    """
    expression = parse_depends(text)
    kept = list(dict.fromkeys(task for task in tasks_in(expression) if task not in known_results))
    rest = simplify(expression, known_results)
    if not kept:
        return rest if isinstance(rest, bool) else str(rest)
    if isinstance(rest, bool):
        # Argo knows no constants: one task never has two results.
        never = () if rest else (AllOf((TaskResult(kept[0], "Succeeded"), TaskResult(kept[0], "Failed"))),)
        return str(_conjoin((*map(_any_result, kept), *never)))
    still_named = set(tasks_in(rest))
    return str(_conjoin((rest, *(_any_result(task) for task in kept if task not in still_named))))


def _any_result(task: str) -> DependsExpression:
    return AnyOf(tuple(TaskResult(task, result) for result in RESULTS))


def _conjoin(terms: tuple[DependsExpression, ...]) -> DependsExpression:
    return terms[0] if len(terms) == 1 else AllOf(terms)


def _simplify_terms(
    terms: tuple[DependsExpression, ...], known_results: KnownResults, decisive: bool, kind: type[AllOf] | type[AnyOf]
) -> DependsExpression | bool:
    remaining: list[DependsExpression] = []
    for term in terms:
        rest = simplify(term, known_results)
        if rest is decisive:
            return decisive
        if not isinstance(rest, bool):
            remaining.append(rest)
    if not remaining:
        return not decisive
    return remaining[0] if len(remaining) == 1 else kind(tuple(remaining))


def _with_brackets(expression: DependsExpression) -> str:
    return f"({expression})" if isinstance(expression, AllOf | AnyOf) else str(expression)


def _tokens(text: str) -> deque[str]:
    tokens, position, text = deque[str](), 0, text.strip()
    while position < len(text):
        if not (match := _TOKEN.match(text, position)):
            raise _syntax_error(text, f"{text[position : position + 60].split()[0]!r} is not expected there")
        tokens.append(match[1])
        position = match.end()
    return tokens


def _parse_alternatives(tokens: deque[str], text: str, depth: int) -> DependsExpression:
    terms = [_parse_conjunction(tokens, text, depth)]
    while tokens and tokens[0] == "||":
        tokens.popleft()
        terms.append(_parse_conjunction(tokens, text, depth))
    return terms[0] if len(terms) == 1 else AnyOf(tuple(terms))


def _parse_conjunction(tokens: deque[str], text: str, depth: int) -> DependsExpression:
    terms = [_parse_term(tokens, text, depth)]
    while tokens and tokens[0] == "&&":
        tokens.popleft()
        terms.append(_parse_term(tokens, text, depth))
    return _conjoin(tuple(terms))


def _parse_term(tokens: deque[str], text: str, depth: int) -> DependsExpression:
    """Parse one term; ``depth`` is how many brackets and negations it may hold inside each other."""
    word = tokens.popleft() if tokens else ""
    if word in ("!", "(") and not depth:
        raise _syntax_error(text, f"more than {_MAX_NESTING} brackets and negations are inside each other")
    if word == "!":
        return Not(_parse_term(tokens, text, depth - 1))
    if word == "(":
        inner = _parse_alternatives(tokens, text, depth - 1)
        if not tokens or tokens.popleft() != ")":
            raise _syntax_error(text, "a bracket is not closed")
        return inner
    task, dot, result = word.partition(".")
    if word in ("", ")", "&&", "||"):
        raise _syntax_error(text, f"a task is missing{f' before {word!r}' if word else ' at the end'}")
    if dot and result not in RESULTS + _GROUP_RESULTS:
        raise _syntax_error(
            text, f"{result!r} is no result of a task; results are {', '.join(RESULTS + _GROUP_RESULTS)}"
        )
    return TaskResult(task, result)


def _syntax_error(text: str, why: str) -> UsageError:
    shown = text if len(text) <= _MAX_SHOWN_CHARACTERS else f"{text[:_MAX_SHOWN_CHARACTERS]}…"
    return UsageError(f"depends {shown!r} cannot be read: {why}; write task results joined by &&, ||, ! and brackets")

"""Argo's ``depends``, with what is known about some of its tasks put in.

Argo starts a task once **all** tasks that its condition names have ended, and
omits it if the condition is false then. Leaving finished tasks out of a
Workflow must change neither. Source: Argo Workflows v4.1
``workflow/common/ancestry.go`` and ``workflow/controller/dag.go``.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tiphys.errors import UsageError

RESULTS = ("Succeeded", "Failed", "Errored", "Skipped", "Omitted", "Daemoned")
_GROUP_RESULTS = ("AnySucceeded", "AllFailed")
_TOKEN = re.compile(r"\s*(&&|\|\||!|\(|\)|[A-Za-z0-9][-A-Za-z0-9]*(?:\.[A-Za-z]+)?)")

Facts = Mapping[str, frozenset[str]]
"""Tasks that have ended for good, each with the results that hold for it; "" is the bare name."""

DONE = frozenset({"", "Succeeded"})
DONE_GROUP = DONE | {"AnySucceeded"}
OMITTED = frozenset({"Omitted"})


@dataclass(frozen=True)
class Result:
    """``fit.Failed``, or a bare ``fit`` when ``result`` is empty."""

    task: str
    result: str

    def __str__(self) -> str:
        return f"{self.task}.{self.result}" if self.result else self.task


@dataclass(frozen=True)
class Not:
    term: "Expression"

    def __str__(self) -> str:
        return f"!{_bracketed(self.term)}"


@dataclass(frozen=True)
class AllOf:
    terms: "tuple[Expression, ...]"

    def __str__(self) -> str:
        return " && ".join(_bracketed(term) for term in self.terms)


@dataclass(frozen=True)
class AnyOf:
    terms: "tuple[Expression, ...]"

    def __str__(self) -> str:
        return " || ".join(_bracketed(term) for term in self.terms)


Expression = Result | Not | AllOf | AnyOf


def parse(text: str) -> Expression:
    """Read a ``depends`` condition.

    Raises:
        UsageError: it is not made of task results, ``!``, ``&&``, ``||`` and brackets.
    """
    tokens = _tokens(text)
    expression = _alternatives(tokens, text)
    if tokens:
        raise _unreadable(text, f"{tokens[0]!r} is not expected there")
    return expression


def tasks_in(expression: Expression) -> Iterator[str]:
    """Tasks that a condition names, in the order written, repeated where they are."""
    match expression:
        case Result(task):
            yield task
        case Not(term):
            yield from tasks_in(term)
        case AllOf(terms) | AnyOf(terms):
            for term in terms:
                yield from tasks_in(term)


def simplify(expression: Expression, facts: Facts) -> Expression | bool:
    """The condition with the results of ``facts`` put in."""
    match expression:
        case Result(task, result):
            return (result in facts[task]) if task in facts else expression
        case Not(term):
            inner = simplify(term, facts)
            return not inner if isinstance(inner, bool) else Not(inner)
        case AllOf(terms):
            return _join(terms, facts, decisive=False, kind=AllOf)
        case AnyOf(terms):
            return _join(terms, facts, decisive=True, kind=AnyOf)


def without(text: str, facts: Facts) -> str | bool:
    """The condition for a Workflow in which the tasks of ``facts`` are left out.

    A bool when no other task is named. Every other task stays named, since the
    condition also says what to wait for.
    """
    expression = parse(text)
    kept = list(dict.fromkeys(task for task in tasks_in(expression) if task not in facts))
    rest = simplify(expression, facts)
    if not kept:
        return rest if isinstance(rest, bool) else str(rest)
    if isinstance(rest, bool):
        never = () if rest else (AllOf((Result(kept[0], "Succeeded"), Result(kept[0], "Failed"))),)
        return str(_all((*map(_ended, kept), *never)))
    still = set(tasks_in(rest))
    return str(_all((rest, *(_ended(task) for task in kept if task not in still))))


def _ended(task: str) -> Expression:
    return AnyOf(tuple(Result(task, result) for result in RESULTS))


def _all(terms: tuple[Expression, ...]) -> Expression:
    return terms[0] if len(terms) == 1 else AllOf(terms)


def _join(
    terms: tuple[Expression, ...], facts: Facts, decisive: bool, kind: type[AllOf] | type[AnyOf]
) -> Expression | bool:
    left: list[Expression] = []
    for term in terms:
        rest = simplify(term, facts)
        if rest is decisive:
            return decisive
        if not isinstance(rest, bool):
            left.append(rest)
    if not left:
        return not decisive
    return left[0] if len(left) == 1 else kind(tuple(left))


def _bracketed(expression: Expression) -> str:
    return f"({expression})" if isinstance(expression, AllOf | AnyOf) else str(expression)


def _tokens(text: str) -> list[str]:
    tokens, position, text = [], 0, text.strip()
    while position < len(text):
        if not (match := _TOKEN.match(text, position)):
            raise _unreadable(text, f"{text[position:].split()[0]!r} is not expected there")
        tokens.append(match[1])
        position = match.end()
    return tokens


def _alternatives(tokens: list[str], text: str) -> Expression:
    terms = [_conjunction(tokens, text)]
    while tokens and tokens[0] == "||":
        tokens.pop(0)
        terms.append(_conjunction(tokens, text))
    return terms[0] if len(terms) == 1 else AnyOf(tuple(terms))


def _conjunction(tokens: list[str], text: str) -> Expression:
    terms = [_term(tokens, text)]
    while tokens and tokens[0] == "&&":
        tokens.pop(0)
        terms.append(_term(tokens, text))
    return _all(tuple(terms))


def _term(tokens: list[str], text: str) -> Expression:
    word = tokens.pop(0) if tokens else ""
    if word == "!":
        return Not(_term(tokens, text))
    if word == "(":
        inner = _alternatives(tokens, text)
        if not tokens or tokens.pop(0) != ")":
            raise _unreadable(text, "a bracket is not closed")
        return inner
    task, dot, result = word.partition(".")
    if word in ("", ")", "&&", "||"):
        raise _unreadable(text, f"a task is missing{f' before {word!r}' if word else ' at the end'}")
    if dot and result not in RESULTS + _GROUP_RESULTS:
        raise _unreadable(text, f"{result!r} is no result of a task; results are {', '.join(RESULTS + _GROUP_RESULTS)}")
    return Result(task, result)


def _unreadable(text: str, why: str) -> UsageError:
    return UsageError(f"depends {text!r} cannot be read: {why}; write task results joined by &&, ||, ! and brackets")

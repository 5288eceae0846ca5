"""expr-lang, the language of ``{{=…}}``, ``depends`` and ``retryStrategy.expression``.

The subset covers what pipelines use; a construct or function outside it is
refused before the workflow starts. Precedence follows expr-lang's own table
(``parser/operator``): ``??`` binds tightest, a ``!`` binds tighter than ``==``.
"""

from functools import cache, lru_cache
from typing import Any

from lark import Lark
from lark.exceptions import LarkError

from hera_pipelines.local.expressions.evaluate import FUNCTIONS, EvaluationError, Expression, evaluate, functions
from tiphys.errors import UsageError

_GRAMMAR = r"""
?start: expression
?expression: disjunction
    | disjunction "?" expression ":" expression -> ternary
?disjunction: conjunction
    | disjunction ("||" | "or") conjunction -> either
?conjunction: comparison
    | conjunction ("&&" | "and") comparison -> both
?comparison: sum
    | comparison "==" sum -> equal
    | comparison "!=" sum -> unequal
    | comparison "<" sum -> less
    | comparison "<=" sum -> less_equal
    | comparison ">" sum -> greater
    | comparison ">=" sum -> greater_equal
    | comparison "in" sum -> contained
    | comparison "not" "in" sum -> not_contained
    | comparison "matches" sum -> matches
    | comparison "contains" sum -> has
    | comparison "startsWith" sum -> starts
    | comparison "endsWith" sum -> ends
?sum: denial
    | sum "+" denial -> plus
    | sum "-" denial -> subtract
?denial: product
    | ("!" | "not") denial -> negation
?product: signed
    | product "*" signed -> times
    | product "/" signed -> divide
    | product "%" signed -> modulo
?signed: power
    | "-" signed -> minus
?power: fallback
    | fallback ("**" | "^") power -> power
?fallback: postfix
    | fallback "??" postfix -> coalesce
?postfix: atom
    | postfix "." NAME -> member
    | postfix "?." NAME -> optional_member
    | postfix "[" expression "]" -> member
    | postfix "[" expression ":" expression "]" -> slice
?atom: NUMBER | STRING | CONSTANT
    | "(" expression ")"
    | "[" [expression ("," expression)*] "]" -> list
    | NAME "(" [expression ("," expression)*] ")" -> call
    | NAME -> name
CONSTANT.2: /(true|false|nil)\b/
NAME: /[A-Za-z_$][A-Za-z0-9_]*/
NUMBER: /\d+(\.\d+)?([eE][+-]?\d+)?/
STRING: /"(\\.|[^"\\])*"/s | /'(\\.|[^'\\])*'/s
%import common.WS
%ignore WS
"""


@cache
def _parser() -> Lark:
    """Made when it is first needed, since that takes as long as many a command."""
    return Lark(_GRAMMAR, parser="lalr", maybe_placeholders=False)


@lru_cache(maxsize=512)
def parse(text: str) -> Expression:
    """The tree of ``text``.

    Raises:
        UsageError: it is not an expression of the subset, or calls an unknown function.
    """
    try:
        tree: Expression = _parser().parse(text)
    except LarkError as error:
        raise UsageError(f"the expression {text!r} cannot be read: {str(error).splitlines()[0]}") from error
    unknown = sorted(functions(tree) - FUNCTIONS.keys())
    if unknown:
        raise UsageError(
            f"the expression {text!r} calls {', '.join(unknown)}, which the local engine does not know; "
            f"it knows {', '.join(sorted(FUNCTIONS))}"
        )
    return tree


def value_of(text: str, environment: dict[str, Any]) -> Any:
    """Value of the expression ``text``; None is expr-lang's nil."""
    return evaluate(parse(text), environment)


def truth_of(text: str, environment: dict[str, Any]) -> bool:
    """Like `value_of`, for an expression that must say true or false."""
    result = value_of(text, environment)
    if not isinstance(result, bool):
        raise EvaluationError(f"the expression {text!r} gives {result!r}, not true or false")
    return result


def nested(variables: dict[str, Any]) -> dict[str, Any]:
    """Dotted names as nested maps, as an expression sees them: ``steps.run.id`` → ``steps['run'].id``.

    Where a name is both a value and a prefix of others, the longer ones win,
    since only they can be told apart by a member.
    """
    root: dict[str, Any] = {}
    for name in sorted(variables, key=lambda key: key.count(".")):
        *parents, leaf = name.split(".")
        branch = root
        for parent in parents:
            if not isinstance(branch.get(parent), dict):
                branch[parent] = {}
            branch = branch[parent]
        branch[leaf] = variables[name]
    return root

"""Parses expr-lang, the language of ``{{=…}}``, ``depends`` and ``retryStrategy.expression``.

The supported subset covers what pipelines use; a construct or function outside it
is refused before the workflow starts. The precedence is that of expr-lang
(``parser/operator``): ``??`` binds tightest, and ``!`` binds tighter than ``==``.
"""

from functools import lru_cache
from typing import Any

from lark.exceptions import LarkError

from hera_pipelines.local.expressions.evaluate import (
    FUNCTIONS,
    EvaluationError,
    Expression,
    MissingNameError,
    build_parser,
    called_functions,
    check_json_paths,
    evaluate,
    used_names,
)
from tiphys.errors import UsageError

_GRAMMAR = r"""
?start: expression
    | "let" NAME "=" expression ";" start -> let
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
    | postfix "?." "[" expression "]" -> optional_member
    | postfix "[" expression ":" expression "]" -> slice
?atom: NUMBER | STRING | CONSTANT
    | "(" expression ")"
    | "[" [expression ("," expression)*] "]" -> list
    | NAME "(" [_argument ("," _argument)*] ")" -> call
    | "sprig" "." NAME "(" [expression ("," expression)*] ")" -> sprig
    | NAME -> name
    | "#" -> element
    | "." NAME -> element_member
_argument: expression | "{" expression "}"
CONSTANT.2: /(true|false|nil)\b/
NAME: /[A-Za-z_$][A-Za-z0-9_]*/
NUMBER: /\d+(\.\d+)?([eE][+-]?\d+)?/
STRING: /"(\\.|[^"\\])*"/s | /'(\\.|[^'\\])*'/s
%import common.WS
%ignore WS
"""


@lru_cache(maxsize=512)
def parse_expression(text: str) -> Expression:
    """Parse an expression.

    Raises:
        UsageError: ``text`` is outside the supported subset, or calls an unknown function.
    """
    try:
        tree: Expression = build_parser(_GRAMMAR).parse(text)
    except LarkError as error:
        raise UsageError(
            f"the expression {text!r} is invalid, or beyond what the local engine reads: {str(error).splitlines()[0]}"
        ) from error
    unknown = sorted(called_functions(tree) - FUNCTIONS.keys())
    if unknown:
        raise UsageError(
            f"the expression {text!r} calls {', '.join(unknown)}, which the local engine does not support; "
            f"supported are {', '.join(sorted(FUNCTIONS))}"
        )
    check_json_paths(tree)
    return tree


def evaluate_expression(text: str, environment: dict[str, Any]) -> Any:
    """Evaluate the expression ``text``; None is expr-lang's nil.

    Raises:
        MissingNameError: a name has no value, even if it stands in a branch that is not taken, as in Argo, which
            compiles an expression against its environment.
        UsageError: as `parse_expression` and `evaluate`.
    """
    tree = parse_expression(text)
    for name in used_names(tree):
        if name not in environment:
            raise MissingNameError(name)
    return evaluate(tree, environment)


def evaluate_condition(text: str, environment: dict[str, Any]) -> bool:
    """Evaluate an expression that must be true or false; raises `EvaluationError` if it is neither."""
    result = evaluate_expression(text, environment)
    if not isinstance(result, bool):
        raise EvaluationError(f"the expression {text!r} gives {result!r}, not true or false")
    return result


def nest_variables(variables: dict[str, Any]) -> dict[str, Any]:
    """Turn dotted names into nested maps for an expression: ``steps.run.id`` → ``steps['run'].id``.

    If a name is both a value and a prefix of longer names, the longer names win and its own value is dropped.
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

"""Parses govaluate, the language of ``when``, in which a word without quotes is a text.

Argo substitutes the variables before it evaluates the condition, so
``{{steps.admit.outputs.parameters.run}} == true`` becomes ``true == true``. As in
Argo, a text with hyphens needs quotes.
"""

from functools import lru_cache

from lark.exceptions import LarkError

from hera_pipelines.local.expressions.evaluate import EvaluationError, Expression, build_parser, evaluate
from tiphys.errors import UsageError

_GRAMMAR = r"""
?start: disjunction
?disjunction: conjunction
    | disjunction "||" conjunction -> either
?conjunction: comparison
    | conjunction "&&" comparison -> both
?comparison: sum
    | comparison "==" sum -> equal
    | comparison "!=" sum -> unequal
    | comparison "<" sum -> less
    | comparison "<=" sum -> less_equal
    | comparison ">" sum -> greater
    | comparison ">=" sum -> greater_equal
    | comparison "=~" sum -> matches
    | comparison "!~" sum -> matches_not
    | comparison ("in" | "IN") choices -> contained
choices: "(" sum ("," sum)* ")" -> list
?sum: product
    | sum "+" product -> plus
    | sum "-" product -> subtract
?product: prefixed
    | product "*" prefixed -> times
    | product "/" prefixed -> divide
    | product "%" prefixed -> modulo
?prefixed: atom
    | "!" prefixed -> negation
    | "-" prefixed -> minus
?atom: NUMBER | STRING | CONSTANT | WORD
    | "(" disjunction ")"
CONSTANT.2: /(true|false)\b/
WORD: /[^\W\d]\w*/
NUMBER: /\d+(\.\d+)?/
STRING: /"(\\.|[^"\\])*"/s | /'(\\.|[^'\\])*'/s
%import common.WS
%ignore WS
"""


@lru_cache(maxsize=512)
def _parse_condition(text: str) -> Expression:
    try:
        tree: Expression = build_parser(_GRAMMAR).parse(text)
    except LarkError as error:
        raise UsageError(
            f"invalid 'when' expression {text!r}: {str(error).splitlines()[0]}; "
            "hint: put quotes around texts that are not plain words"
        ) from error
    return tree


def check_condition(text: str) -> None:
    """Raise `UsageError` if ``text`` is not a valid condition."""
    _parse_condition(text)


def condition_holds(when: str) -> bool:
    """Whether a step with this ``when`` runs. Its variables are substituted already; an empty condition holds.

    Raises:
        UsageError: the condition is invalid, or neither true nor false.
    """
    if not when:
        return True
    try:
        result = evaluate(_parse_condition(when), {})
    except EvaluationError as error:
        raise EvaluationError(f"the condition {when!r} cannot be evaluated: {error}") from error
    if not isinstance(result, bool):
        raise EvaluationError(f"expected true or false from 'when: {when}', got {result!r}")
    return result

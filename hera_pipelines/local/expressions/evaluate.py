"""Evaluates expressions of a Workflow.

`expr` parses expr-lang (``{{=…}}``, ``depends``, ``retryStrategy``), and
`govaluate` parses ``when``; `evaluate` evaluates the trees of both.
"""

import base64
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

from lark import Lark, Token, Tree

from tiphys.errors import UsageError
from tiphys.protocol.fan_out import argo_text, go_json, parse_go_json

_ELEMENT = "#"
_MAP, _FILTER = "map", "filter"
_JSON_PATH = "jsonpath"
_JSON_PATH_PART = re.compile(r"""\.([\w-]+)|\[\s*(?:(-?\d+)|'([^']*)'|"([^"]*)")\s*\]|(\.\*|\[\*\])""")

Environment = Mapping[str, Any]
Branch = Tree[Token]
Expression = Branch | Token


class EvaluationError(UsageError):
    """The expression is valid, but its operands have no value or the wrong types."""


class MissingNameError(EvaluationError):
    """The expression uses a name that has no value (yet)."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name} has no value here")
        self.name = name


@cache
def build_parser(grammar: str) -> Lark:
    """Build the parser of a language on its first use, because that takes as long as a whole command."""
    return Lark(grammar, parser="lalr", maybe_placeholders=False)


def evaluate(tree: Expression, environment: Environment) -> Any:
    """Evaluate ``tree``; ``environment`` holds its `used_names`.

    Raises:
        EvaluationError: an operator or a function does not accept its operands.
    """
    if isinstance(tree, Token):
        return _literal(tree)
    rule = _RULES.get(str(tree.data))
    if rule is not None:
        return rule(tree, environment)
    values = [evaluate(child, environment) for child in tree.children]
    return _OPERATORS[str(tree.data)](*values)


def called_functions(tree: Expression) -> set[str]:
    """Names of all functions that ``tree`` calls."""
    if isinstance(tree, Token):
        return set()
    sprig = {f"sprig.{call.children[0]}" for call in tree.find_data("sprig")}
    return sprig | {str(call.children[0]) for call in tree.find_data("call")}


def check_json_paths(tree: Expression) -> None:
    """Raise `EvaluationError` for a path of ``jsonpath`` that is written in ``tree`` and is not supported."""
    for call in () if isinstance(tree, Token) else tree.find_data("call"):
        path = call.children[-1]
        if call.children[0] == _JSON_PATH and isinstance(path, Token) and path.type == "STRING":
            list(_split_json_path(_literal(path)))


def used_names(tree: Expression) -> list[str]:
    """Names of all variables in ``tree`` that it does not declare itself."""
    if isinstance(tree, Token):
        return []
    declared = {str(declaration.children[0]) for declaration in tree.find_data("let")}
    return [name for found in tree.find_data("name") if (name := str(found.children[0])) not in declared]


def _literal(token: Token) -> Any:
    match token.type:
        case "NUMBER":
            return float(token) if any(c in token for c in ".eE") else int(token)
        case "STRING":
            return _unescape(str(token)[1:-1])
        case "WORD":  # govaluate variables are texts in Argo, so that `foo == bar` needs no quotes
            return str(token)
    return {"true": True, "false": False, "nil": None}[str(token)]


def _unescape(text: str) -> str:
    escapes = {"n": "\n", "t": "\t", "r": "\r"}

    def character(match: re.Match[str]) -> str:
        return chr(int(match[1], 16)) if match[1] else escapes.get(match[2], match[2])

    return re.sub(r"\\(?:u([0-9a-fA-F]{4})|(.))", character, text, flags=re.DOTALL)


def _name(tree: Branch, environment: Environment) -> Any:
    return environment[str(tree.children[0])]


class _ChainEndError(Exception):
    """The owner before a ``?.`` is nil, so the rest of the chain is not evaluated."""


def _member(tree: Branch, environment: Environment) -> Any:
    try:
        return _follow_chain(tree, environment)
    except _ChainEndError:
        return None


def _follow_chain(tree: Branch, environment: Environment) -> Any:
    target, key = tree.children
    if isinstance(target, Tree) and target.data in ("member", "optional_member"):
        owner = _follow_chain(target, environment)
    else:
        owner = evaluate(target, environment)
    name = str(key) if isinstance(key, Token) and key.type == "NAME" else evaluate(key, environment)
    if owner is None:
        if tree.data == "optional_member":
            raise _ChainEndError
        raise EvaluationError(f"cannot take {name!r} of nil")
    if isinstance(owner, Mapping):
        return owner.get(name)
    if isinstance(owner, list) and isinstance(name, int) and -len(owner) <= name < len(owner):
        return owner[name]
    raise EvaluationError(f"cannot take {name!r} of {owner!r}")


def _ternary(tree: Branch, environment: Environment) -> Any:
    condition, yes, no = tree.children
    return evaluate(yes if _require_bool(evaluate(condition, environment)) else no, environment)


def _coalesce(tree: Branch, environment: Environment) -> Any:
    first = evaluate(tree.children[0], environment)
    return evaluate(tree.children[1], environment) if first is None else first


def _both(tree: Branch, environment: Environment) -> bool:
    return all(_require_bool(evaluate(child, environment)) for child in tree.children)


def _either(tree: Branch, environment: Environment) -> bool:
    return any(_require_bool(evaluate(child, environment)) for child in tree.children)


def _let(tree: Branch, environment: Environment) -> Any:
    name, value, body = tree.children
    return evaluate(body, {**environment, str(name): evaluate(value, environment)})


def _element(_tree: Branch, environment: Environment) -> Any:
    if _ELEMENT not in environment:
        raise EvaluationError("# stands for an element only in the second argument of map and filter")
    return environment[_ELEMENT]


def _element_member(tree: Branch, environment: Environment) -> Any:
    return evaluate(Tree("member", [Tree("element", []), tree.children[0]]), environment)


def _map_or_filter(name: str, elements: Expression, each: Expression, environment: Environment) -> list[Any]:
    whole = evaluate(elements, environment)
    if not isinstance(whole, list):
        raise EvaluationError(f"{name} needs a list, not {whole!r}")
    values = [evaluate(each, {**environment, _ELEMENT: element}) for element in whole]
    if name == _MAP:
        return values
    return [element for element, value in zip(whole, values, strict=True) if _require_bool(value)]


def _call(tree: Branch, environment: Environment) -> Any:
    function, *arguments = tree.children
    name = f"sprig.{function}" if tree.data == "sprig" else str(function)
    if name in (_MAP, _FILTER) and len(arguments) == 2:
        return _map_or_filter(name, arguments[0], arguments[1], environment)
    values = [evaluate(argument, environment) for argument in arguments]
    try:
        return FUNCTIONS[name](*values)
    except (TypeError, ValueError, AttributeError) as error:
        raise EvaluationError(f"{name}({', '.join(map(repr, values))}): {error}") from error


def _require_bool(value: Any) -> bool:
    if not isinstance(value, bool):
        raise EvaluationError(f"{value!r} is not true or false")
    return value


def _comparison(compare: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    def operator(left: Any, right: Any) -> bool:
        if not (_is_number(left) and _is_number(right)) and not (isinstance(left, str) and isinstance(right, str)):
            raise EvaluationError(f"cannot compare {left!r} with {right!r}: one number and one text")
        return compare(left, right)

    return operator


def _equal(left: Any, right: Any) -> bool:
    return bool(left == right) and isinstance(left, bool) == isinstance(right, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _plus(left: Any, right: Any) -> Any:
    if isinstance(left, str) and isinstance(right, str):
        return left + right
    return _require_number(left) + _require_number(right)


def _require_number(value: Any) -> Any:
    if not _is_number(value):
        raise EvaluationError(f"{value!r} is not a number")
    return value


def _divide(left: Any, right: Any) -> Any:
    if _require_number(right) == 0:
        raise EvaluationError("division by zero")
    return _require_number(left) / right


def _modulo(left: Any, right: Any) -> Any:
    if _require_number(right) == 0:
        raise EvaluationError("division by zero")
    return _require_number(left) % right


def _contains(member: Any, collection: Any) -> bool:
    if not isinstance(collection, list | Mapping):
        raise EvaluationError(f"'in' needs a list, not {collection!r}")
    return any(_equal(member, element) for element in collection)


def _require_text(value: Any) -> str:
    if not isinstance(value, str):
        raise EvaluationError(f"{value!r} is not a text")
    return value


def _require_sliceable(value: Any) -> Any:
    if not isinstance(value, str | list):
        raise EvaluationError(f"{value!r} is neither a text nor a list, and has no parts")
    return value


def _to_int(value: Any) -> int:
    return int(value)


def _not_a_map(*arguments: Any) -> Any:
    raise EvaluationError(f"it takes a list and an expression over its elements, not {len(arguments)} arguments")


def _split_json_path(path: str) -> Iterator[str | int | None]:
    """Keys and indices of a path such as ``$.items[*]['a b'][0]``; None stands for all elements of a list."""
    position = 1
    while path.startswith("$") and (part := _JSON_PATH_PART.match(path, position)):
        position = part.end()
        key = next((text for text in (part[1], part[3], part[4]) if text is not None), None)
        yield int(part[2]) if part[2] else key
    if not path.startswith("$") or position < len(path):
        raise EvaluationError(
            f"jsonpath {path!r}: the local engine supports keys, indices and [*], such as $.items[0]['a b']; write "
            "fromJSON(…) and the members instead"
        )


def _query_json(document: str, path: str) -> Any:
    """Argo's ``jsonpath`` (evilmonkeyinc/jsonpath): a key or an index that does not exist is an error."""
    return _follow_json_path(parse_go_json(_require_text(document)), [*_split_json_path(_require_text(path))])


def _follow_json_path(value: Any, parts: list[str | int | None]) -> Any:
    for place, part in enumerate(parts):
        if part is None and isinstance(value, list):
            return [_follow_json_path(element, parts[place + 1 :]) for element in value]
        is_key = isinstance(value, Mapping) and part in value
        is_index = isinstance(value, list) and isinstance(part, int) and -len(value) <= part < len(value)
        if not is_key and not is_index:
            raise EvaluationError(f"jsonpath: there is no {'[*]' if part is None else part!r} in {value!r}")
        value = value[part]
    return value


_TYPES = {
    type(None): "nil",
    bool: "bool",
    int: "int",
    float: "float",
    str: "string",
    list: "array",
    dict: "map",
}

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "asInt": _to_int,
    "int": _to_int,
    "asFloat": float,
    "float": float,
    "string": argo_text,
    "toJson": go_json,
    "toJSON": go_json,
    "fromJSON": parse_go_json,
    "type": lambda value: _TYPES[type(value)],
    "len": len,
    "upper": str.upper,
    "lower": str.lower,
    "trim": str.strip,
    _MAP: _not_a_map,
    _FILTER: _not_a_map,
    _JSON_PATH: _query_json,
    "first": lambda elements: elements[0] if elements else None,
    "last": lambda elements: elements[-1] if elements else None,
    "join": lambda elements, separator="": separator.join(elements),
    "split": str.split,
    "replace": str.replace,
    "hasPrefix": str.startswith,
    "hasSuffix": str.endswith,
    "trimPrefix": str.removeprefix,
    "trimSuffix": str.removesuffix,
    # Those of Sprig have the text that they work on as their last argument.
    "sprig.trim": str.strip,
    "sprig.upper": str.upper,
    "sprig.lower": str.lower,
    "sprig.toString": argo_text,
    "sprig.trimPrefix": lambda prefix, text: text.removeprefix(prefix),
    "sprig.trimSuffix": lambda suffix, text: text.removesuffix(suffix),
    "sprig.hasPrefix": lambda prefix, text: text.startswith(prefix),
    "sprig.hasSuffix": lambda suffix, text: text.endswith(suffix),
    "sprig.contains": lambda part, text: part in _require_text(text),
    "sprig.replace": lambda old, new, text: text.replace(old, new),
    "sprig.join": lambda separator, elements: separator.join(map(argo_text, elements)),
    "sprig.splitList": lambda separator, text: text.split(separator),
    "sprig.trunc": lambda length, text: text[length:] if length < 0 else text[:length],
    "sprig.repeat": lambda count, text: text * count,
    "sprig.default": lambda default, value="": value or default,
    "sprig.sha256sum": lambda text: hashlib.sha256(text.encode()).hexdigest(),
    "sprig.b64enc": lambda text: base64.b64encode(text.encode()).decode(),
    "sprig.b64dec": lambda text: base64.b64decode(text).decode(),
}
"""Functions that the local engine supports; any other is refused before a workflow starts."""

_RULES: dict[str, Callable[[Branch, Environment], Any]] = {
    "name": _name,
    "member": _member,
    "optional_member": _member,
    "ternary": _ternary,
    "coalesce": _coalesce,
    "both": _both,
    "either": _either,
    "call": _call,
    "sprig": _call,
    "let": _let,
    "element": _element,
    "element_member": _element_member,
}

_OPERATORS: dict[str, Callable[..., Any]] = {
    "slice": lambda whole, begin, end: _require_sliceable(whole)[
        int(_require_number(begin)) : int(_require_number(end))
    ],
    "list": lambda *elements: list(elements),
    "equal": _equal,
    "unequal": lambda left, right: not _equal(left, right),
    "less": _comparison(lambda left, right: left < right),
    "less_equal": _comparison(lambda left, right: left <= right),
    "greater": _comparison(lambda left, right: left > right),
    "greater_equal": _comparison(lambda left, right: left >= right),
    "contained": _contains,
    "not_contained": lambda member, collection: not _contains(member, collection),
    "matches": lambda text, pattern: re.search(_require_text(pattern), _require_text(text)) is not None,
    "matches_not": lambda text, pattern: re.search(_require_text(pattern), _require_text(text)) is None,
    "has": lambda text, part: _require_text(part) in _require_text(text),
    "starts": lambda text, part: _require_text(text).startswith(_require_text(part)),
    "ends": lambda text, part: _require_text(text).endswith(_require_text(part)),
    "negation": lambda value: not _require_bool(value),
    "minus": lambda value: -_require_number(value),
    "plus": _plus,
    "subtract": lambda left, right: _require_number(left) - _require_number(right),
    "times": lambda left, right: _require_number(left) * _require_number(right),
    "divide": _divide,
    "modulo": _modulo,
    "power": lambda left, right: _require_number(left) ** _require_number(right),
}

"""The changes of a program that `make mutants` plants: each is a mistake of a tired engineer, by kind.

Most change what a line says, such as ``<`` in the place of ``<=``. The others are of kinds that tests have missed:
a key that lacks a part of an identity, two writes in the other order, a sum where a maximum matters, the first of
several in the place of the last, and the other of two settings where both are given.
"""

import ast
import copy
import enum
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

_COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_ARITHMETIC = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult}
_OPPOSITES = {"min": "max", "max": "min", "any": "all", "all": "any", "reversed": "iter"}
_OTHER_ENDS = {"partition": "rpartition", "rpartition": "partition", "split": "rsplit", "rsplit": "split"}
"""Methods that look from the first or from the last of several separators."""
_KEYED_METHODS = {
    "get", "pop", "setdefault", "add", "discard", "remove", "move_to_end", "hold", "lookup", "is_overdue",
    "waited_seconds", "clear", "give_up", "has_given_up",
}  # fmt: skip
"""Methods whose first argument is a key, if it is a tuple or a formatted string."""
_GENERIC_TYPES = {"defaultdict", "dict", "list", "set", "frozenset", "tuple", "type"}
_KEY_NAMES = ("key", "identity", "shape")
_OWN_CODE = (ast.Lambda, ast.GeneratorExp, ast.ListComp, ast.SetComp, ast.DictComp)
"""Expressions with a code object, whose order must stay that of the program."""


class Kind(enum.StrEnum):
    LINE = "line"
    KEY = "key"
    ORDER = "order"
    SUM = "sum"
    END = "end"
    """First for last of several, or last for first."""
    PRECEDENCE = "precedence"


class Change(NamedTuple):
    """Nodes of a program, each with what stands in its place; the text is for people."""

    kind: Kind
    nodes: tuple[ast.expr | ast.stmt, ...]
    replacements: tuple[ast.AST, ...]
    before: str
    after: str

    @property
    def line(self) -> int:
        return self.nodes[0].lineno

    @property
    def last_line(self) -> int:
        return self.nodes[-1].end_lineno or self.nodes[-1].lineno


def plant(change: Change, tree: ast.Module) -> ast.Module:
    """The program ``tree``, of which ``change`` was listed, with the change."""
    planted = {
        id(node): ast.fix_missing_locations(ast.copy_location(replacement, node))
        for node, replacement in zip(change.nodes, map(copy.copy, change.replacements), strict=True)
    }

    class Plant(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> ast.AST:
            return planted.get(id(node)) or self.generic_visit(node)

    return Plant().visit(tree)  # type: ignore[no-any-return]


def list_changes(tree: ast.Module) -> Iterator[Change]:
    """Each change of each node of the program that can be changed, in their order."""
    conditions = {id(part) for node in ast.walk(tree) for part in _conditions(node)}
    for node in _program_nodes(tree):
        changed = _changed_expression(node) if isinstance(node, ast.expr) else _changed_statement(node)
        if changed is not None:
            yield _change(Kind.LINE, node, changed)
        for key in _keys(node):
            yield from (_change(Kind.KEY, key, lacking) for lacking in _lacking_a_part(key))
        yield from _swapped_calls(node)
        if (changed := _with_sum(node)) is not None:
            yield _change(Kind.SUM, node, changed)
        if (changed := _from_other_end(node)) is not None:
            yield _change(Kind.END, node, changed)
        if id(node) not in conditions and (changed := _with_other_precedence(node)) is not None:
            yield _change(Kind.PRECEDENCE, node, changed)


def _change(kind: Kind, node: ast.AST, changed: ast.AST) -> Change:
    return Change(kind, (node,), (changed,), _text(node), _text(changed))  # type: ignore[arg-type]


def _changed_statement(node: ast.AST) -> ast.AST | None:
    match node:
        case ast.If() | ast.While():
            return _negated(node)
        case ast.Expr(value=ast.Call()) | ast.Raise() | ast.AugAssign() | ast.Continue() | ast.Break():
            return ast.Pass()
        case ast.Return(value=ast.expr()) if not isinstance(node.value, ast.Constant):
            return ast.Return(ast.Constant(None))
    return None


def _changed_expression(node: ast.expr) -> ast.AST | None:
    match node:
        case ast.Compare(ops=[operator]) if type(operator) in _COMPARISONS:
            return _with(node, ops=[_COMPARISONS[type(operator)]()])
        case ast.BoolOp():
            return _with(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())
        case ast.UnaryOp(op=ast.Not()):
            return node.operand
        case ast.BinOp() if type(node.op) in _ARITHMETIC:
            return _with(node, op=_ARITHMETIC[type(node.op)]())
        case ast.IfExp():
            return _negated(node)
        case _:
            return _changed_value(node)


def _changed_value(node: ast.expr) -> ast.AST | None:
    match node:
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=1)):
            return ast.Constant(0)  # the first in the place of the last
        case ast.Constant(value=bool()):
            return ast.Constant(not node.value)
        case ast.Constant(value=int()):
            return ast.Constant(node.value + 1)
        case ast.Call(func=ast.Name(id=name)) if name in _OPPOSITES:
            return _with(node, func=ast.Name(_OPPOSITES[name], ast.Load()))
    return None


def _negated(node: ast.If | ast.While | ast.IfExp) -> ast.AST | None:
    """With the other branch; None where a change of the condition itself does the same."""
    simple = not isinstance(node.test, ast.Compare | ast.UnaryOp)
    return _with(node, test=ast.UnaryOp(ast.Not(), node.test)) if simple else None


def _keys(node: ast.AST) -> Iterator[ast.expr]:
    """What ``node`` uses as a key of a dictionary, a set, a cache or a lock."""
    match node:
        case ast.Subscript(value=of, slice=key) if not ast.unparse(of).lstrip("_")[:1].isupper():
            yield from () if isinstance(of, ast.Name) and of.id in _GENERIC_TYPES else (key,)
        case ast.Call(func=ast.Attribute(attr=method), args=[key, *_]) if method in _KEYED_METHODS:
            yield key
        case ast.Compare(left=key, ops=[ast.In() | ast.NotIn()]) | ast.DictComp(key=key) | ast.SetComp(elt=key):
            yield key
        case ast.Dict():
            yield from (key for key in node.keys if key is not None)
        case ast.Set():
            yield from node.elts
        case ast.Assign(targets=[ast.Name(id=name), *_], value=key) if name.endswith(_KEY_NAMES):
            yield key
        case ast.FunctionDef(name=name, body=[*_, ast.Return(value=ast.expr() as key)]) if name.endswith(_KEY_NAMES):
            yield key


def _lacking_a_part(key: ast.expr) -> Iterator[ast.expr]:
    """The key once without each of its parts; of a tuple the part is None, so that it can still be unpacked."""
    match key:
        case ast.Tuple(elts=parts) if len(parts) > 1 and not any(isinstance(part, ast.Slice) for part in parts):
            for number, part in enumerate(parts):
                if not isinstance(part, ast.Constant | ast.Starred):
                    yield _with(key, elts=[*parts[:number], ast.Constant(None), *parts[number + 1 :]])
        case ast.JoinedStr(values=parts):
            formatted = [number for number, part in enumerate(parts) if isinstance(part, ast.FormattedValue)]
            for number in formatted if len(formatted) > 1 else ():
                yield _with(key, values=[*parts[:number], *parts[number + 1 :]])


def _swapped_calls(node: ast.AST) -> Iterator[Change]:
    """Two statements of one block in the other order, where each has an effect and at least one is a call."""
    for field in ("body", "orelse", "finalbody"):
        block = getattr(node, field, None)
        for first, second in pairwise(block if isinstance(block, list) else []):
            if _has_effect(first) and _has_effect(second) and (_is_call(first) or _is_call(second)):
                text = f"{_text(first)}; {_text(second)}", f"{_text(second)}; {_text(first)}"
                yield Change(Kind.ORDER, (first, second), (second, first), *text)


def _has_effect(statement: ast.AST) -> bool:
    if _is_left_out(statement) or ast.unparse(statement).startswith("super().__init__("):
        return False
    if any(isinstance(part, _OWN_CODE) for part in ast.walk(statement)):
        return False
    match statement:
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]) | ast.AugAssign() | ast.Delete():
            return True
    return _is_call(statement)


def _is_call(statement: ast.AST) -> bool:
    match statement:
        case ast.Expr(value=ast.Call() | ast.Await(value=ast.Call())):
            return True
    return False


def _with_sum(node: ast.AST) -> ast.AST | None:
    """A sum in the place of a maximum, or a maximum in the place of a sum."""
    match node:
        case ast.Call(func=ast.Name(id="max"), keywords=keywords) if all(given.arg == "default" for given in keywords):
            values = node.args[0] if len(node.args) == 1 else ast.Tuple(node.args, ast.Load())
            return ast.Call(ast.Name("sum", ast.Load()), [values], [])
        case ast.Call(func=ast.Name(id="sum"), args=[_], keywords=[]):
            nothing = ast.keyword("default", ast.Constant(0))
            return ast.Call(ast.Name("max", ast.Load()), node.args, [nothing])
    return None


def _from_other_end(node: ast.AST) -> ast.AST | None:
    match node:
        case ast.Subscript(slice=ast.Constant(value=0) as first) if type(first.value) is int:
            return _with(node, slice=ast.UnaryOp(ast.USub(), ast.Constant(1)))
        case ast.Call(func=ast.Attribute(attr=method)) if method in _OTHER_ENDS:
            cut_anywhere = "split" not in method or len(node.args) > 1 or node.keywords
            return _with(node, func=_with(node.func, attr=_OTHER_ENDS[method])) if cut_anywhere else None
    return None


def _with_other_precedence(node: ast.AST) -> ast.AST | None:
    """With the other setting where both are given: ``b or a``, and what a later entry of a dictionary replaces."""
    match node:
        case ast.BoolOp(op=ast.Or(), values=[_, *_, last]) if not (_is_empty(last) or any(map(_is_truth, node.values))):
            return _with(node, values=node.values[::-1])
        case ast.Dict() if None in node.keys and len(node.keys) > 1:
            return _with(node, keys=node.keys[::-1], values=node.values[::-1])
        case ast.BinOp(op=ast.BitOr()) if any(isinstance(side, ast.Dict) for side in (node.left, node.right)):
            return _with(node, left=node.right, right=node.left)
    return None


def _conditions(node: ast.AST) -> Iterator[ast.expr]:
    """Parts of the node of which only the truth matters."""
    match node:
        case ast.If() | ast.While() | ast.IfExp() | ast.Assert():
            yield node.test
        case ast.comprehension():
            yield from node.ifs
        case ast.UnaryOp(op=ast.Not()):
            yield node.operand
        case ast.BoolOp():
            yield from node.values


def _is_truth(node: ast.expr) -> bool:
    match node:
        case ast.Compare() | ast.UnaryOp(op=ast.Not()):
            return True
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
            return name.startswith(("is_", "has_", "isinstance", "any", "all", "bool", "startswith", "endswith"))
    return False


def _is_empty(node: ast.expr) -> bool:
    match node:
        case ast.Constant():
            return not node.value
        case ast.List(elts=[]) | ast.Tuple(elts=[]) | ast.Dict(keys=[]):
            return True
        case ast.Call(args=[], keywords=[]):
            return True
    return False


def _program_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes below ``node`` in their order, without types, decorators and what `_is_left_out` names."""
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list", "type_params", "bases"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not _is_left_out(child):
                yield child
                yield from _program_nodes(child)


def _is_left_out(node: ast.AST) -> bool:
    """Log messages, fault points, imports of types, the call of a script's `main`, and `strict` of `zip`."""
    match node:
        case ast.Expr():
            return ast.unparse(node).startswith(("_log.", "log_message(", "failpoint("))
        case ast.If():
            return ast.unparse(node.test) in ("TYPE_CHECKING", "__name__ == '__main__'")
        case ast.keyword():
            return node.arg == "strict"
    return False


def _with(node: ast.AST, **fields: object) -> ast.AST:
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed


def _text(node: ast.AST) -> str:
    return ast.unparse(ast.fix_missing_locations(node)).splitlines()[0]

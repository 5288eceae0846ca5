"""How Go writes a JSON value, because the text of a fan-out item goes into names and keys.

Argo keeps an item as raw JSON that has passed the API server, so ``1e-5`` reads
``0.00001`` and ``1.0`` reads ``1``.
"""

import json
from decimal import Decimal
from typing import Any


def go_json(value: Any) -> str:
    """Compact JSON with sorted keys and Go's form of numbers."""
    match value:
        case dict():
            pairs = (f"{json.dumps(key, ensure_ascii=False)}:{go_json(value[key])}" for key in sorted(value))
            return "{" + ",".join(pairs) + "}"
        case list():
            return "[" + ",".join(go_json(element) for element in value) + "]"
        case float():
            return _number(value)
    return json.dumps(value, ensure_ascii=False)


def go_text(value: Any) -> str:
    """The value as Go prints it: a string without quotes, a list as ``[a b]``, the rest as JSON."""
    match value:
        case str():
            return value
        case list():
            return "[" + " ".join(element if isinstance(element, str) else go_json(element) for element in value) + "]"
    return go_json(value)


def _number(value: float) -> str:
    if value.is_integer() and abs(value) < 1e21:
        return str(int(value))
    if 1e-6 <= abs(value) < 1e21:
        return format(Decimal(repr(value)), "f")
    mantissa, _, exponent = repr(value).partition("e")
    return f"{mantissa}e{'-' if exponent.startswith('-') else '+'}{exponent.lstrip('+-').lstrip('0')}"

"""Argo's part in a training on several nodes: fill in the manifest of a resource template, and create what it says."""

import json
import re
from collections.abc import Mapping
from typing import Any

from hera_pipelines.local.expressions.expr import evaluate_expression, nest_variables

_TAG = re.compile(r"\{\{(.*?)\}\}")
_ESCAPED = re.compile(r"=toJson\(string\((.*)\)\)\[1:-1\]")
_QUOTED = re.compile(r"\['([^']*)'\]")


def filled_in(text: str, values: Mapping[str, str]) -> dict[str, Any]:
    """The manifest that Argo hands to its executor. ``values`` are by plain names, as ``inputs.parameters.lr``.

    Of expressions it knows those that compile writes.
    """

    def value(tag: re.Match[str]) -> str:
        if escaped := _ESCAPED.fullmatch(tag[1]):
            return json.dumps(values[_QUOTED.sub(r".\1", escaped[1])])[1:-1]
        if tag[1].startswith("="):
            return str(evaluate_expression(tag[1][1:], nest_variables(dict(values))))
        return values[tag[1]]

    made: dict[str, Any] = json.loads(_TAG.sub(value, text))
    return made

"""``-p name=value``: workflow parameters, given on the command line."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Annotated

import typer

from tiphys.errors import UsageError
from tiphys.protocol.pipeline import Manifest

ParameterOption = Annotated[
    list[str] | None,
    typer.Option("--parameter", "-p", metavar="NAME=VALUE", help="Value of a workflow parameter; may be repeated."),
]


def parse(given: Sequence[str]) -> dict[str, str]:
    """Names and values; `UsageError` for what is not ``name=value``."""
    values = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise UsageError(f"parameter {text!r} is not NAME=VALUE; write, for example, -p lr=0.1")
        values[name] = value
    return values


def with_parameters(manifest: Manifest, values: Mapping[str, str]) -> Manifest:
    """``manifest`` (a Workflow or CronWorkflow) with these values in force; the others keep theirs.

    Raises:
        UsageError: the workflow has no such parameter.
    """
    filled = deepcopy(manifest)
    declared = _declared(filled)
    names = [parameter["name"] for parameter in declared]
    if unknown := sorted(set(values) - set(names)):
        raise UsageError(f"the pipeline has no parameter {unknown[0]!r}; it has: {', '.join(_own(names)) or 'none'}")
    for parameter in declared:
        if parameter["name"] in values:
            parameter["value"] = values[parameter["name"]]
    return filled


def require_values(manifest: Manifest) -> None:
    """Raise `UsageError` for a parameter that nobody gives a value: Argo would refuse it too, but later."""
    for parameter in _declared(manifest):
        if parameter.get("value") is None and not parameter.get("valueFrom"):
            raise UsageError(f"parameter {parameter['name']!r} has no value; give one with -p {parameter['name']}=…")


def _declared(manifest: Manifest) -> list[Manifest]:
    spec = manifest["spec"].get("workflowSpec", manifest["spec"])
    declared: list[Manifest] = (spec.get("arguments") or {}).get("parameters") or []
    return declared


def _own(names: Sequence[str]) -> list[str]:
    return [name for name in names if not name.startswith("tiphys-")]

"""What a finished task left for others: its values by path, as Argo would answer for them."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tiphys.protocol.fan_out import aggregate
from tiphys.records import AttemptEnd, OutputKind


class TaskOutputs(NamedTuple):
    """``values`` by path below ``tasks.<name>``; ``artifacts`` are keys in storage, by name."""

    values: Mapping[str, str]
    artifacts: Mapping[str, str] = {}


OMITTED = TaskOutputs({"status": "Omitted"})


def outputs_of_step(end: AttemptEnd) -> TaskOutputs:
    """Outputs of a step that is not fanned out."""
    parameters = {f"outputs.parameters.{name}": value for name, value in _parameters(end).items()}
    artifacts = {output.name: output.key for output in end.outputs if output.kind is OutputKind.ARTIFACT}
    return TaskOutputs(_literal({"status": "Succeeded", **parameters}), artifacts)


def outputs_of_items(ends: Sequence[AttemptEnd]) -> TaskOutputs:
    """Outputs of a fan-out whose items, in their order, ended with ``ends``. Argo gathers no artifacts."""
    return TaskOutputs(_literal({"status": "Succeeded", **aggregate([_parameters(end) for end in ends])}))


def _parameters(end: AttemptEnd) -> dict[str, str]:
    given = (output for output in end.outputs if output.kind is OutputKind.PARAMETER)
    return {output.name: output.value for output in given if output.value is not None}


def _literal(values: dict[str, str]) -> dict[str, str]:
    """Values that can stand in a manifest: Argo would read braces as a tag of its own."""
    return {path: value for path, value in values.items() if "{{" not in value}

"""Find the declared outputs of an attempt in a listing. Pure, because a wrong match publishes wrong bytes.

A training attempt has one try of its container, a `Step` several below one
attempt, each with a folder of its own; only the last try's outputs count. A
failed try may have left outputs, so "last" comes from the pods where they are
known, and is never below the highest folder listed.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from tiphys.protocol.policy import Kind, StepSpec
from tiphys.records import Output, OutputKind
from tiphys.store import ObjectInfo

_KINDS = {OutputKind.PARAMETER: "parameters", OutputKind.ARTIFACT: "artifacts"}
_TRY = re.compile(r"(\d+)/")


class Located(NamedTuple):
    """Where one declared output lies. ``objects`` is empty if it is missing."""

    output: Output
    objects: tuple[ObjectInfo, ...]


def locate(spec: StepSpec, prefix: str, rows: Sequence[ObjectInfo], last_try: int = 0) -> list[Located]:
    """Each declared output of ``spec`` in ``rows``, the listing below ``prefix`` (with a final slash)."""
    root = f"{prefix}{_last_try(prefix, rows, last_try)}/" if spec.kind is Kind.STEP else prefix
    wanted = [(name, OutputKind.PARAMETER) for name in spec.parameters]
    wanted += [(name, OutputKind.ARTIFACT) for name in spec.artifacts]
    return [_locate(name, kind, f"{root}{_KINDS[kind]}/{name}", rows) for name, kind in wanted]


def _last_try(prefix: str, rows: Sequence[ObjectInfo], at_least: int) -> int:
    tries = (_TRY.match(row.key.removeprefix(prefix)) for row in rows)
    return max([at_least, *(int(match[1]) for match in tries if match)])


def _locate(name: str, kind: OutputKind, key: str, rows: Sequence[ObjectInfo]) -> Located:
    single = tuple(row for row in rows if row.key == key)
    if single or kind is OutputKind.PARAMETER:
        return Located(Output(name=name, kind=kind, key=key), single)
    below = tuple(row for row in rows if row.key.startswith(f"{key}/"))
    return Located(Output(name=name, kind=kind, key=key, directory=bool(below)), below)

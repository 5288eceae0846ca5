"""How a node ended."""

from typing import NamedTuple

from hera_pipelines.local.changes import NodePhase
from hera_pipelines.local.nodes import Outputs


class Verdict(NamedTuple):
    """The final phase of a node, and why."""

    phase: NodePhase
    message: str = ""
    outputs: Outputs | None = None
    log_tail: tuple[str, ...] = ()

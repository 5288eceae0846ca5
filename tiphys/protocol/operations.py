"""Bodies of the plugin operations: admit, conclude, finalize and reuse.

The compiler writes the body ``{"tiphys": {"op": …}}`` with Argo's placeholders
into plugin templates. Argo substitutes the placeholders and sends the body to
the plugin, which validates it with the models of this module.
"""

import re
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from tiphys.protocol.gang import GangSpec

PLUGIN_BODY_KEY = "tiphys"
REPORT_ARTIFACT = "report"
"""Name of the output artifact of finalize, a page that Argo's UI shows."""
WAKE_TEMPLATE = "tiphys-wake"
"""Template of the timers, which say nothing about a run."""
REUSE_TEMPLATE = "tiphys-reuse"
"""The task and the template that take over results at the start of a Workflow, and how the entry DAG with it begins."""
NOTHING_LEFT = "tiphys-nothing-left"
"""The only task of a Workflow of which everything is taken over: a timer."""


class _Operation(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    run: str = ""
    """Name of the run; empty: a new run named after the workflow."""
    submission: str = ""
    """Number of the submission; empty: the first."""
    uid: str
    """uid of the Workflow."""
    node: str
    """Unique name of this node. The plugin derives the fan-out item, the retry and the replay key from it."""


class _StepOperation(_Operation):
    step: str
    """Name of the step, as compiled."""
    item: str = ""
    """Value of the fan-out item; empty for a step that is not fanned out."""


class AdmitOperation(_StepOperation):
    """Asks whether the step may run now, and from which checkpoint."""

    op: Literal["admit"] = "admit"
    inputs: dict[str, str] = {}
    """Values of the step's input parameters, for its key."""


class ConcludeOperation(_StepOperation):
    """Reports the end of an attempt, and asks for the outputs of the step, another attempt or its failure."""

    op: Literal["conclude"] = "conclude"
    status: str = ""
    """Argo's status of the run node: Succeeded, Failed, Error, Skipped or Omitted."""
    exit_code: str = "-1"
    result: str = ""
    """Standard output of the program, if the step has it as an output."""


class FinalizeOperation(_Operation):
    """Reports the end of the Workflow, from its onExit handler; the plugin ends the submission."""

    op: Literal["finalize"] = "finalize"
    status: str = ""
    failures: str = ""


class ReuseOperation(_Operation):
    """Asks, at the start of a Workflow, which of its steps take over results that exist already."""

    op: Literal["reuse"] = "reuse"
    steps: tuple[Annotated[str, Field(max_length=63)], ...] = Field(max_length=2_000)
    """Names of the steps that may, each behind those that it takes outputs of."""


def reuse_output(step: str, output: str = "") -> str:
    """Name of an output of reuse: the output of a step, or whether it is taken over. No step has ``_`` in its name."""
    return f"{step}__{output}" if output else step


Operation = Annotated[
    AdmitOperation | ConcludeOperation | FinalizeOperation | ReuseOperation, Field(discriminator="op")
]
StepOperation = AdmitOperation | ConcludeOperation
OPERATIONS = ("admit", "conclude", "finalize", "reuse")

# Output parameters of admit, by the names that the compiled run template uses; a template declares those that it needs.
ADMIT_OUTPUTS = (
    "run",
    "run-id",
    "step",
    "attempt",
    "lineage",
    "resume-from",
    "checkpoint-uri",
    "outputs",
    "pod-patch",
)

# Additional output parameters for a gang: the name of the object that creates the pods; node selector requirements, as
# the inside of a JSON list that is never empty; keys of the input artifacts, as a JSON object; and tolerations in
# addition to the author's, as the inside of a JSON list.
GANG_OUTPUTS = ("gang", "node-requirements", "input-keys", "tolerations")
# Additional output parameters for an elastic gang: pods at the start, how many of them it can lose, and their gates.
ELASTIC_OUTPUTS = ("members", "spare", "gates")
# Additional output parameters if the policy raises memory: request and limit of each member, where the container
# declares one. The declared value is the default.
MEMORY_OUTPUTS = {"requests": "memory-request", "limits": "memory-limit"}


def gang_outputs(gang: GangSpec | None) -> tuple[str, ...]:
    """Output parameters of admit in addition to `ADMIT_OUTPUTS`, without `MEMORY_OUTPUTS`."""
    if gang is None:
        return ()
    return GANG_OUTPUTS if gang.min_members is None else (*GANG_OUTPUTS, *ELASTIC_OUTPUTS)


_FAILED_SUBMISSION_END = re.compile(r"Run \S+, submission \d+: (?!Succeeded)\w+: (.*)", re.DOTALL)


def format_submission_end(run: str, submission: int, status: str, summary: str) -> str:
    """The message of finalize; ``summary`` says why the submission failed, or is empty."""
    return f"Run {run}, submission {submission}: {status}" + (f": {summary}" if summary else "")


def parse_failure_summary(message: str) -> str:
    """The summary in a message of finalize; empty where there is none."""
    match = _FAILED_SUBMISSION_END.fullmatch(message)
    return match[1] if match else ""


_SUFFIX = re.compile(r"(\(\d+\))?\.(admit|conclude|run(\(\d+\))?)$|\(\d+\)$")
_CALL = re.compile(r"(?:\((\d+)\))?\.(admit|conclude)$")


def step_instance_name(node: str) -> str:
    """Node name of the step of a plugin node or of a pod, without the part for its try.

    ``wf.sweep(1:lr:0.2)(1).admit`` → ``wf.sweep(1:lr:0.2)``, ``wf.prep(0)`` → ``wf.prep``.
    """
    return _SUFFIX.sub("", node)


def attempt_node_name(node: str) -> str:
    """Name of the node that holds those of an attempt, by its admit or conclude; that of another node as it is.

    ``wf.fit(1).conclude`` → ``wf.fit(1)``, the second try of a training; ``wf.prep.admit`` → ``wf.prep``.
    """
    return node.rpartition(".")[0] if _CALL.search(node) else node


def try_number(node: str) -> int:
    """Number of the try of a training by its admit or conclude, from 0; 0 for any other node."""
    match = _CALL.search(node)
    return int(match[1] or 0) if match else 0

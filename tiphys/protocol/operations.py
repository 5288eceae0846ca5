"""Bodies of the four plugin operations, as compiled, and as they arrive.

The body of a plugin template is ``{"tiphys": {"op": …}}``. Compiled bodies hold
Argo's placeholders; what arrives here has been substituted.
"""

import re
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from tiphys.protocol.gang import Gang

PLUGIN = "tiphys"


class _Operation(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    run: str = ""
    """Name of the run; empty: a new run named after the workflow."""
    submission: str = ""
    """Number of the submission; empty: the first."""
    uid: str
    """uid of the Workflow."""
    node: str
    """Unique name of this node: gives the fan-out item, the retry and the replay key."""


class _StepOperation(_Operation):
    step: str
    """Name of the step, as compiled."""
    item: str = ""
    """Value of the fan-out item; empty for a step that is not fanned out."""


class Admit(_StepOperation):
    """May this step run now, and from where?"""

    op: Literal["admit"] = "admit"
    inputs: dict[str, str] = {}
    """Values of the step's input parameters, for its key."""


class Settle(_StepOperation):
    """How did the training attempt end, and shall there be another?"""

    op: Literal["settle"] = "settle"
    status: str = ""
    """Argo's status of the run node: Succeeded, Failed, Error, Skipped or Omitted."""
    exit_code: str = "-1"


class Conclude(_StepOperation):
    """The step's verdict: its outputs, or failure."""

    op: Literal["conclude"] = "conclude"
    status: str = ""
    """Argo's status of the run node (Step) or of the attempts node (Train)."""
    exit_code: str = "-1"


class Finalize(_Operation):
    """The workflow's onExit: seal the submission."""

    op: Literal["finalize"] = "finalize"
    status: str = ""
    failures: str = ""


Operation = Annotated[Admit | Settle | Conclude | Finalize, Field(discriminator="op")]
StepOperation = Admit | Settle | Conclude

# Names of admit's answers, as the compiled run template consumes them.
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

# What admit answers beside these for a step of several pods: the name of the object that makes them, which nodes they
# may run on, as the inside of a JSON list of Kubernetes' node selector requirements, never empty, the keys of the
# step's input artifacts, as a JSON object, and what they tolerate beside the author's own, as the inside of a list.
GANG_OUTPUTS = ("gang", "node-requirements", "input-keys", "tolerations")
# Beside those for an elastic one: with how many pods it starts, and how many of them it can go on without.
ELASTIC_OUTPUTS = ("members", "spare")
# Beside those where its memory may grow, for each side of the resources of a container that declares any: how much each
# member gets. What was declared is the default.
MEMORY_OUTPUTS = {"requests": "memory-request", "limits": "memory-limit"}


def gang_outputs(gang: Gang | None) -> tuple[str, ...]:
    """What admit answers beside `ADMIT_OUTPUTS`, wherever memory may not grow."""
    if gang is None:
        return ()
    return GANG_OUTPUTS if gang.min_members is None else (*GANG_OUTPUTS, *ELASTIC_OUTPUTS)


_SUFFIX = re.compile(r"(\[\d+\]\.attempts\(\d+\))?\[\d+\]\.(admit|settle|conclude)$")
_RETRY = re.compile(r"\.attempts\((\d+)\)\[\d+\]\.(admit|settle)$")


def instance_of(node: str) -> str:
    """Node name of the step that a plugin node belongs to, without its attempts.

    ``wf.sweep(1:lr:0.2)[0].attempts(1)[0].admit`` → ``wf.sweep(1:lr:0.2)``.
    """
    return _SUFFIX.sub("", node)


def attempt_of(node: str) -> str | None:
    """Node name of the try that an admit or settle node belongs to; None outside of ``attempts``.

    ``wf.fit[0].attempts(1)[2].settle`` → ``wf.fit[0].attempts(1)``. In there a
    Failed answer means "try again", so a refusal has to pass through to conclude.
    """
    match = _RETRY.search(node)
    return node[: match.end(1) + 1] if match else None


def retry_of(node: str) -> int:
    """Number of the retry that a plugin node belongs to, from 0."""
    match = _RETRY.search(node)
    return int(match[1]) if match else 0

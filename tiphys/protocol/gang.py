"""Gangs: several pods that train together as one attempt.

Argo creates one object of another controller, such as an Indexed Job, and that
controller creates the pods. The pods therefore lack Argo's labels; Tiphys finds
them by the labels and annotations of this module.
"""

import hashlib
from enum import StrEnum
from typing import NamedTuple

from pydantic import Field, PositiveInt, model_validator

from tiphys.records import Record

GANG_LABEL = "tiphys.dev/gang"
"""Label of the object and of its pods; the value is the name of the object."""
WORKFLOW_UID_LABEL = "tiphys.dev/workflow-uid"
NODE_ANNOTATION = "tiphys.dev/node"
"""Unique name of the workflow node of the pods."""
MEMBER_LABEL = "tiphys.dev/member"
"""``true`` on every member; the selector of the Service `GANG_SERVICE`."""
GANG_SERVICE = "tiphys-members"
"""Headless Service of a namespace, through which the members of each gang resolve each other's host names."""
GANG_ACCOUNT = "tiphys-gang"
"""Account of the pod of Argo that creates a gang. The chart creates it where gangs are enabled."""
MEMBER_GATE = "tiphys.dev/node"
"""Scheduling gate of each pod of an elastic gang, until the service has sent it to a node of its lease."""
HOSTNAME_LABEL = "kubernetes.io/hostname"
"""Node label of the host name, by which pods are bound to nodes."""
REPLICATED_JOB = "node"
"""Name of the members' Job in a JobSet, and in the JobSet of a TrainJob."""
GANG_PORT = 29500
"""Port on which the first member listens for the others; the default of torchrun."""

_MAX_PART_CHARACTERS = 12


class GangBackend(StrEnum):
    """The controller that creates the pods."""

    JOB = "job"
    """An Indexed Job of Kubernetes."""
    JOBSET = "jobset"
    TRAINJOB = "trainjob"


class GangPhase(StrEnum):
    """Phase of the object that creates the pods."""

    ACTIVE = "active"
    """Its pods run, or will be created."""
    ENDING = "ending"
    """Its controller terminates its pods and creates no more."""
    FINISHED = "over"


class FirstFailure(NamedTuple):
    """The pod that made an Indexed Job fail, from the conditions of the Job."""

    pod: str
    exit_code: int | None
    """None if the pod was deleted."""
    message: str


class GangSpec(Record):
    """Gang of a training step: several pods, one per node, which start and end together.

    With ``min_members`` the gang is elastic: it starts with as many of its
    ``members`` as there is room for, and continues while ``min_members`` of them
    are left.
    """

    members: PositiveInt = Field(ge=2)
    backend: GangBackend = GangBackend.JOB
    min_members: PositiveInt | None = Field(default=None, exclude_if=lambda fewest: fewest is None)

    @model_validator(mode="after")
    def _can_be_elastic(self) -> "GangSpec":
        if self.min_members is None:
            return self
        if self.min_members >= self.members:
            raise ValueError(f"{self.min_members} to {self.members} members are no range; give one number")
        if self.backend is not GangBackend.JOB:
            raise ValueError(f"{self.backend.value} cannot continue with fewer members; use the backend 'job'")
        return self


def gang_name(run: str, step: str, attempt: int) -> str:
    """Name of the object that creates the pods of an attempt.

    Deterministic, so that the object is never created twice. Short, because
    controllers append to it and the result must be a host name of at most 63
    characters.
    """
    digest = hashlib.sha256(f"{run}/{step}/{attempt}".encode()).hexdigest()[:8]
    parts = [_host_name_part(run), _host_name_part(step), str(attempt), digest]
    return "-".join(part for part in parts if part)


def _host_name_part(name: str) -> str:
    """The first characters of ``name`` as part of a host name, which begins with a letter."""
    part = "".join(letter if letter.isalnum() and letter.isascii() else "-" for letter in name.lower())
    part = part[:_MAX_PART_CHARACTERS].strip("-")
    return part if part[:1].isalpha() else f"t{part}"

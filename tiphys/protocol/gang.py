"""Several pods that train together as one attempt: how they are named, found, and told who is who.

Argo makes no such pods itself; it creates one object of another controller,
and that makes them. So they bear none of Argo's marks, and are found by ours.
"""

import hashlib
from enum import StrEnum
from typing import NamedTuple

from pydantic import Field, PositiveInt, model_validator

from tiphys.records import Record

GANG_LABEL = "tiphys.dev/gang"
"""Name of the object that made a pod; on the object itself, too."""
WORKFLOW_UID_LABEL = "tiphys.dev/workflow-uid"
NODE_ANNOTATION = "tiphys.dev/node"
"""Unique name of the workflow node that the pods belong to."""
MEMBER_LABEL = "tiphys.dev/member"
"""``true`` on every member: what the Service `SERVICE` selects."""
SERVICE = "tiphys-members"
"""Headless Service of a namespace, under which the members of all its gangs find each other."""
PORT = 29500
"""Where the first member listens for the others; torchrun's own default."""

_LONGEST_PART = 12


class Backend(StrEnum):
    """Who makes the pods."""

    JOB = "job"
    """An Indexed Job of Kubernetes itself."""
    JOBSET = "jobset"
    PYTORCHJOB = "pytorchjob"
    TRAINJOB = "trainjob"


class Stage(StrEnum):
    """How far an object is that makes pods."""

    ACTIVE = "active"
    """Its pods live, or will."""
    ENDING = "ending"
    """It ends its pods by itself, and makes no more."""
    OVER = "over"


class FirstFailure(NamedTuple):
    """What an Indexed Job remembers of the pod that made it fail."""

    pod: str
    exit_code: int | None
    """None where the pod was taken away."""
    message: str


class Gang(Record):
    """That a training step is several pods, one on each node, which start and end together.

    With ``min_members`` it is elastic: it starts with as many of its ``members``
    as find room, and goes on while so many are left, the first among them.
    """

    members: PositiveInt = Field(ge=2)
    backend: Backend = Backend.JOB
    min_members: PositiveInt | None = Field(default=None, exclude_if=lambda fewest: fewest is None)

    @model_validator(mode="after")
    def _can_be_elastic(self) -> "Gang":
        if self.min_members is None:
            return self
        if self.min_members >= self.members:
            raise ValueError(f"{self.min_members} to {self.members} members leave nothing between; give one number")
        if self.backend is not Backend.JOB:
            raise ValueError(f"{self.backend.value} cannot go on with fewer members; only the backend 'job' can")
        return self


def gang_name(run: str, step: str, attempt: int) -> str:
    """Name of the object that makes the pods of an attempt: always the same one, so that it is never made twice.

    It is short, because controllers add to it what must stay a host name of at most 63 letters.
    """
    digest = hashlib.sha256(f"{run}/{step}/{attempt}".encode()).hexdigest()[:8]
    parts = [_part(run), _part(step), str(attempt), digest]
    return "-".join(part for part in parts if part)


def _part(name: str) -> str:
    """The beginning of a name, as a host name may have it; a host name begins with a letter."""
    kept = "".join(letter if letter.isalnum() and letter.isascii() else "-" for letter in name.lower())
    kept = kept[:_LONGEST_PART].strip("-")
    return kept if kept[:1].isalpha() else f"t{kept}"

"""Keys of the outputs of steps without a gate, by the uid of their Workflow.

While such a step runs, Argo knows no attempt, so its pod names the place. Once the step is done, an empty object below
``control/`` says which attempt the pod was.
"""

import re
from typing import NamedTuple

from tiphys.records import check_step_id
from tiphys.store.layout import CONTROL, DATA

_OUTPUTS = f"{DATA}workflows/"
_ORIGINS = f"{CONTROL}workflows/"


def workflow_outputs(uid: str) -> str:
    """Prefix of the outputs of all steps without a gate of a Workflow, with a final slash."""
    return f"{_OUTPUTS}{uid}/"


def pod_outputs(uid: str, pod: str) -> str:
    """Prefix of the outputs of a pod of a step without a gate, with a final slash."""
    return f"{workflow_outputs(uid)}{pod}/"


class PodOutputKey(NamedTuple):
    """Key of an object below ``data/workflows/``; ``name`` is relative to `pod_outputs`."""

    uid: str
    pod: str
    name: str


def parse_pod_output(key: str) -> PodOutputKey | None:
    """Workflow and pod of a key below ``data/workflows/``; None for any other key."""
    match = re.fullmatch(_OUTPUTS + r"([^/]+)/([^/]+)/(.+)", key, re.DOTALL)
    return PodOutputKey(*match.groups()) if match else None


class OutputOrigin(NamedTuple):
    """The finished attempt that a pod of a step without a gate was."""

    pod: str
    run: str
    step: str
    attempt: int


def output_origins(uid: str, pod: str = "") -> str:
    """Prefix of the keys that say which attempt the pods of a Workflow, or one of them, were."""
    return f"{_ORIGINS}{uid}/" + (f"{pod}/" if pod else "")


def output_origin(uid: str, origin: OutputOrigin) -> str:
    """Key of an empty object: this pod was this attempt, which is done and has artifacts."""
    return f"{output_origins(uid, origin.pod)}{origin.run}/{check_step_id(origin.step)}/{origin.attempt:09d}"


def parse_output_origin(key: str) -> OutputOrigin | None:
    """What a key of `output_origin` says; None for any other key."""
    match = re.fullmatch(_ORIGINS + r"[^/]+/([^/]+)/([^/]+)/([^/]+)/(\d{9})", key)
    return OutputOrigin(match[1], match[2], match[3], int(match[4])) if match else None

"""What may change between a run and what goes on with it, and what is to happen then: the author's word.

The compiled Workflow carries it in the annotation ``tiphys.dev/drift``, so a run
keeps the rules under which it was begun, whatever is compiled later.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from pydantic import ValidationError

from tiphys.errors import UsageError
from tiphys.records import Record

DRIFT_ANNOTATION = "tiphys.dev/drift"


class Drift(StrEnum):
    """What can be another one than before."""

    IMAGE = "image"
    """Of the container; a tag that somebody moved is not seen, a digest is."""
    TEMPLATE = "template"
    """Command, arguments, environment, resources, volumes, and what the step asks of Tiphys."""
    CODE = "code"
    """Source of a function, and the commit that was compiled."""
    PARAMETERS = "parameters"
    DATA = "data"
    """Where input artifacts come from."""
    VERSIONS = "versions"
    """Python and frameworks, against those that wrote the newest checkpoint."""
    WORLD_SIZE = "world_size"
    """GPUs and pods of a training."""


class DriftAction(StrEnum):
    """What a resume does about it, the mildest first."""

    ALLOW = "allow"
    WARN = "warn"
    FORK = "fork"
    """Only as a new run, so that this one stays what it is called."""
    REFUSE = "refuse"


class DriftPolicy(Record):
    """The action for each class.

    By default code may be repaired and images moved in the middle of a run, while
    other parameters or data make another experiment, which needs another name.
    """

    image: DriftAction = DriftAction.WARN
    template: DriftAction = DriftAction.WARN
    code: DriftAction = DriftAction.WARN
    parameters: DriftAction = DriftAction.FORK
    data: DriftAction = DriftAction.FORK
    versions: DriftAction = DriftAction.WARN
    world_size: DriftAction = DriftAction.WARN

    def action(self, drift: Drift) -> DriftAction:
        """What is to happen about this class."""
        action: DriftAction = getattr(self, drift.value)
        return action


def drift_policy_of(manifest: Mapping[str, Any]) -> DriftPolicy:
    """The policy in a Workflow; the default where its author gave none.

    Raises:
        UsageError: the annotation is damaged.
    """
    text = ((manifest.get("metadata") or {}).get("annotations") or {}).get(DRIFT_ANNOTATION)
    if not text:
        return DriftPolicy()
    try:
        return DriftPolicy.model_validate_json(text)
    except ValidationError as error:
        raise UsageError(
            f"annotation {DRIFT_ANNOTATION} is damaged ({error.errors()[0]['msg']}), so nothing says what may change; "
            "compile the pipeline again"
        ) from error


def overridden(policy: DriftPolicy, given: Mapping[str, str]) -> DriftPolicy:
    """``policy`` with other actions for some classes, both by name.

    Raises:
        UsageError: there is no such class, or no such action.
    """
    for name, action in given.items():
        if name not in list(Drift) or action not in list(DriftAction):
            raise UsageError(
                f"drift {name}={action} is not valid: classes are {', '.join(Drift)}; actions {', '.join(DriftAction)}"
            )
    return policy.model_copy(update={name: DriftAction(action) for name, action in given.items()})

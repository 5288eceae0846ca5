"""The author's policy for drift: differences between a run and the pipeline that resumes it.

The compiled Workflow carries the policy in the annotation ``tiphys.dev/drift``.
A run therefore keeps the policy of its own Workflow when the pipeline is
compiled again.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from tiphys.errors import UsageError
from tiphys.protocol.compiled_workflow import read_annotation
from tiphys.records import Record

DRIFT_ANNOTATION = "tiphys.dev/drift"


class DriftClass(StrEnum):
    """Kinds of differences."""

    IMAGE = "image"
    """The container image. A changed digest is detected, a tag that was moved to another image is not."""
    TEMPLATE = "template"
    """Command, arguments, environment, resources, volumes, and the step's settings for Tiphys."""
    CODE = "code"
    """Source of a function, and the commit that was compiled."""
    PARAMETERS = "parameters"
    DATA = "data"
    """Sources of input artifacts."""
    VERSIONS = "versions"
    """Python and frameworks, compared with those that wrote the newest checkpoint."""
    WORLD_SIZE = "world_size"
    """GPUs and pods of a training."""


class DriftAction(StrEnum):
    """Reaction of a resume to a difference, the mildest first."""

    ALLOW = "allow"
    WARN = "warn"
    FORK = "fork"
    """Continue only as a new run, so that one run name means one experiment."""
    REFUSE = "refuse"


class DriftPolicy(Record):
    """The action for each class.

    By default code and images may change during a run. Other parameters or data
    make another experiment, which needs its own run name.
    """

    image: DriftAction = DriftAction.WARN
    template: DriftAction = DriftAction.WARN
    code: DriftAction = DriftAction.WARN
    parameters: DriftAction = DriftAction.FORK
    data: DriftAction = DriftAction.FORK
    versions: DriftAction = DriftAction.WARN
    world_size: DriftAction = DriftAction.WARN

    def action_for(self, drift_class: DriftClass) -> DriftAction:
        action: DriftAction = getattr(self, drift_class.value)
        return action


def read_drift_policy(manifest: Mapping[str, Any]) -> DriftPolicy:
    """The policy of a Workflow; the default if its author set none.

    Raises:
        UsageError: the annotation is damaged.
    """
    consequence = ", so the permitted changes are unknown; compile the pipeline again"
    return read_annotation(manifest, DRIFT_ANNOTATION, DriftPolicy, consequence) or DriftPolicy()


def override_drift_actions(policy: DriftPolicy, overrides: Mapping[str, str]) -> DriftPolicy:
    """``policy`` with the actions in ``overrides``: names of actions by name of class.

    Raises:
        UsageError: a class or an action does not exist.
    """
    for name, action in overrides.items():
        if name not in list(DriftClass) or action not in list(DriftAction):
            raise UsageError(
                f"drift {name}={action} is not valid: classes are {', '.join(DriftClass)}; actions "
                f"{', '.join(DriftAction)}"
            )
    return policy.model_copy(update={name: DriftAction(action) for name, action in overrides.items()})

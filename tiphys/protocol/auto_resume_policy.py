"""The author's policy for automatic resumes of a failed run.

The compiled Workflow carries the policy in the annotation
``tiphys.dev/auto-resume``. A run therefore keeps the policy of its own Workflow
when the pipeline is compiled again.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from tiphys.protocol.compiled_workflow import read_annotation
from tiphys.records import Cause, Record

AUTO_RESUME_ANNOTATION = "tiphys.dev/auto-resume"

TRANSIENT_CAUSES = (Cause.PREEMPTION, Cause.INFRASTRUCTURE, Cause.STORAGE, Cause.HANG, Cause.UNKNOWN)
"""Causes after which another try can succeed without a change of the pipeline."""


class AutoResumePolicy(Record):
    """When the controller resumes a run automatically.

    A resume is fruitless if no step and no checkpoint was finished after it. A
    run with progress is resumed at once. After a fruitless resume the controller
    waits for the cool-down, which doubles with each further one. After
    ``max_without_progress`` fruitless resumes it waits ``retry_after_seconds``,
    up to three times, each time twice as long. After that, or at once if
    ``retry_after_seconds`` is None, only a person can resume the run.
    """

    max_without_progress: PositiveInt = 2
    cooldown_seconds: NonNegativeFloat = 60.0
    cooldown_cap_seconds: PositiveFloat = 3600.0
    retry_after_seconds: PositiveFloat | None = 6 * 3600.0
    causes: tuple[Cause, ...] = TRANSIENT_CAUSES
    """Causes of final step failures after which a run is resumed. After other causes a person must resume it."""


def has_auto_resume(manifest: Mapping[str, Any]) -> bool:
    """Whether a Workflow names a policy, which may be damaged."""
    return bool((manifest.get("metadata", {}).get("annotations") or {}).get(AUTO_RESUME_ANNOTATION))


def read_auto_resume_policy(manifest: Mapping[str, Any]) -> AutoResumePolicy | None:
    """The policy of a Workflow; None if its author did not enable automatic resumes.

    Raises:
        UsageError: the annotation is damaged.
    """
    return read_annotation(
        manifest,
        AUTO_RESUME_ANNOTATION,
        AutoResumePolicy,
        ", so the run is not resumed automatically; resume it with `tiphys resume`, "
        "and compile the pipeline again for the next run",
    )

"""Whether a run goes on by itself after it failed, and how often: the author's word, stored with the run.

The compiled Workflow carries it in the annotation ``tiphys.dev/auto-resume``,
so a run that was begun with it keeps it, whatever is compiled later.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt, ValidationError

from tiphys.errors import UsageError
from tiphys.records import Cause, Record

AUTO_RESUME_ANNOTATION = "tiphys.dev/auto-resume"

OUTER_CAUSES = (Cause.PREEMPTION, Cause.INFRASTRUCTURE, Cause.STORAGE, Cause.HANG, Cause.UNKNOWN)
"""What another try may help against although nobody has changed anything."""


class AutoResumePolicy(Record):
    """When the controller resumes a run without being asked.

    A resume is fruitless if no step and no checkpoint was finished since. A run
    that got ahead goes on at once; after a fruitless resume it waits for the
    cool-down, which doubles with each further one. After ``max_without_progress``
    of them it waits for ``retry_after_seconds``, three times, twice as long each
    time; then, or at once where that is None, only a person goes on with it.
    """

    max_without_progress: PositiveInt = 2
    cooldown_seconds: NonNegativeFloat = 60.0
    cooldown_cap_seconds: PositiveFloat = 3600.0
    retry_after_seconds: PositiveFloat | None = 6 * 3600.0
    causes: tuple[Cause, ...] = OUTER_CAUSES
    """Only a run whose steps were given up for one of these is resumed; others wait for a person."""

    def covers(self, cause: Cause) -> bool:
        """Whether a run goes on after ``cause``; a broader one stands for all that are part of it."""
        return cause in self.causes or cause.broader in self.causes


def auto_resume_of(manifest: Mapping[str, Any]) -> AutoResumePolicy | None:
    """The policy in a Workflow; None where its author did not ask for one.

    Raises:
        UsageError: the annotation is damaged.
    """
    text = ((manifest.get("metadata") or {}).get("annotations") or {}).get(AUTO_RESUME_ANNOTATION)
    if not text:
        return None
    try:
        return AutoResumePolicy.model_validate_json(text)
    except ValidationError as error:
        raise UsageError(
            f"annotation {AUTO_RESUME_ANNOTATION} is damaged ({error.errors()[0]['msg']}), so the run does not go on "
            "by itself; resume it with `tiphys resume`, and compile the pipeline again for the next run"
        ) from error

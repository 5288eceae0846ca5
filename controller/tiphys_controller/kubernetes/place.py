"""Which run and submission is a Workflow? Its uid says so, in the record that its first admit has written.

The object itself names its run only if `tiphys` has sent it: with a bare ``argo
submit`` the plugin finds a name. So the names that it may have found are tried.
"""

from typing import NamedTuple

from tiphys.errors import UsageError
from tiphys.records import check_run, run_name
from tiphys.records.names import LONGEST_RUN_NAME
from tiphys.store import Store, submissions
from tiphys_controller.kubernetes.seen import SeenWorkflow

_SUFFIX_LENGTH = 6


class Place(NamedTuple):
    """A Workflow's place among the submissions of its run."""

    run: str
    submission: int


def find_place(store: Store, workflow: SeenWorkflow) -> Place | None:
    """The place of a Workflow; None until its first admit has bound it. Costs a few small reads.

    Raises:
        StoreError: storage is out of reach.
    """
    for run in candidates(workflow):
        for submission in reversed(submissions(store, run)):
            if submission.bound and submission.bound.uid == workflow.uid:
                return Place(run, submission.claim.submission)
    return None


def candidates(workflow: SeenWorkflow) -> list[str]:
    """Names that the run may have, the likeliest first."""
    if workflow.run:
        return _valid(workflow.run)
    short = workflow.name[: LONGEST_RUN_NAME - _SUFFIX_LENGTH]
    return list(
        dict.fromkeys(
            [
                *_valid(workflow.admitted_run),
                *_valid(workflow.name),
                *[f"{one}-{workflow.uid[:5].lower()}" for one in _valid(short)],
            ]
        )
    )


def _valid(text: str) -> list[str]:
    try:
        return [check_run(run_name(text))] if text else []
    except UsageError:
        return []

"""What is asked of a resume beyond doing what is missing, and whether a claim that was never sent says the same."""

from typing import NamedTuple

from tiphys.errors import ConflictError
from tiphys.records import SubmissionClaim
from tiphys_controller.turns import Turn


class Order(NamedTuple):
    """``again`` are steps to run again, ``key`` is the digest of an idempotency key; both may be empty.

    ``workflow`` is the digest of another Workflow to go on with; None for none.
    """

    again: tuple[str, ...] = ()
    key: str = ""
    workflow: str | None = None

    def is_met_by(self, claimed: SubmissionClaim) -> bool:
        """Whether a submission does what is asked; who asks for nothing but a resume is content with any."""
        return self.again in ((), claimed.again) and self.workflow in (None, claimed.workflow)

    def check(self, turn: Turn, force: bool) -> Turn:
        """``turn``, if the submission that it is to send says what is asked; with ``force`` else the number behind it.

        What was passed over is fenced by the newer claim, even if its Workflow is created late.

        Raises:
            ConflictError: it was claimed for something else.
        """
        claimed = turn.claimed
        if claimed is None or self.is_met_by(claimed):
            return turn
        if force:
            return Turn(claimed.submission + 1, claimed.namespace)
        raise ConflictError(
            f"submission {claimed.submission} of run {claimed.run} was claimed and never sent, and it is to run "
            f"{', '.join(claimed.steps)} and not what is asked now; `tiphys resume {claimed.run}` sends it, "
            "--force passes it over"
        )

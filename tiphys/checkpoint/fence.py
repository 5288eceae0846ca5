"""May this attempt still commit?

A node that lost its network goes on training while its replacement does the
same. The number of the attempt is its fence: once a higher one is claimed, or
the attempt's end is recorded, nothing it writes counts.
"""

from tiphys.errors import FencedError, NotFoundError
from tiphys.store import RunLayout, Store
from tiphys.store.layout import parse_attempt


def check_fence(store: Store, run: str, step: str, attempt: int) -> None:
    """Return if attempt ``attempt`` is the live one; costs one listing.

    ``store`` is the one that holds the run.

    Raises:
        FencedError: a newer attempt exists, or this one's end is recorded.
        NotFoundError: the store does not hold this attempt, so it can fence nobody.
    """
    claimed = False
    for info in store.list(RunLayout(run).step_attempts(step)):
        if (place := parse_attempt(info.key)) is None:
            continue
        _, number, is_end = place
        claimed = claimed or (number == attempt and not is_end)
        if number > attempt or (number == attempt and is_end):
            why = f"its end is recorded in {info.key}" if is_end and number == attempt else f"attempt {number} exists"
            raise FencedError(
                f"attempt {attempt} of {run}/{step} may not commit: {why}; "
                "this process must stop, whatever it has is superseded"
            )
    if not claimed:
        # Another store than the run's would let every writer through, and keep what nobody finds again.
        raise NotFoundError(
            f"{store.url} does not hold attempt {attempt} of {run}/{step}, so this is not the store of the run; check "
            "TIPHYS_STORE, and that the volume it lies on is mounted"
        )

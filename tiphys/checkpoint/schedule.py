"""When is a save due? Pure, so that hours of training are tested in no time."""

from tiphys.checkpoint.settings import Every


def is_due(every: Every, *, seconds_since_save: float, last_step: int, global_step: int) -> bool:
    """Whether state after ``global_step`` steps shall be saved.

    By time: once ``every`` seconds have passed since the last save ended or
    failed. By steps: when a multiple of ``every`` was reached since, so that a
    run saves at the same steps however often it was interrupted.
    """
    if every.unit == "seconds":
        return seconds_since_save >= every.amount
    return global_step // every.amount > last_step // every.amount

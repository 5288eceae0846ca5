"""What is behind an exception of DCP, which wraps what its ranks have met and is no `Exception` itself."""

from torch.distributed.checkpoint.api import CheckpointException

from tiphys.errors import FencedError, IntegrityError, StoreError, UsageError


def cause_of(error: BaseException) -> BaseException:
    """The error of Tiphys that some rank met, the same in all ranks; else ``error`` itself.

    Damage counts only if no rank met anything else: then it is what failed.
    """
    if not isinstance(error, CheckpointException):
        return error
    met: list[BaseException] = [failure[0] for _, failure in sorted(error.failures.items())]
    for kind in (FencedError, UsageError, StoreError):
        for cause in met:
            if isinstance(cause, kind):
                return cause
    return met[0] if met and all(isinstance(cause, IntegrityError) for cause in met) else error

"""One tree of errors, because a person sees them and a script branches on them.

    TiphysError                      1  something failed
    ├── UsageError                   2  the call, file or manifest is wrong
    ├── NotFoundError                3  the run, step or object is not there
    │   └── ObjectMissingError
    ├── ConflictError                4  somebody else holds it, or quota denies it
    │   ├── ObjectExistsError
    │   └── FencedError                 a newer attempt exists; this one must stop
    ├── IntegrityError               5  bytes do not match what was recorded
    └── StoreError                  75  storage or cluster did not answer, or refused
        └── ForbiddenError              the cluster says that this account may not do it

The number is the exit code of the ``tiphys`` command. 75 is ``EX_TEMPFAIL`` of
sysexits.h: trying again may help. Messages say what failed, where, why, and
what to do next.
"""

from typing import ClassVar


class TiphysError(Exception):
    """Base of every error that Tiphys raises on purpose."""

    exit_code: ClassVar[int] = 1


class UsageError(TiphysError):
    """The call, the file or the manifest is wrong; trying again cannot help."""

    exit_code = 2


class NotFoundError(TiphysError):
    """What was asked for does not exist."""

    exit_code = 3


class ObjectMissingError(NotFoundError):
    """No object has this key."""


class ConflictError(TiphysError):
    """Somebody else holds what was asked for."""

    exit_code = 4


class ObjectExistsError(ConflictError):
    """A create-only write met an object that already has this key."""


class FencedError(ConflictError):
    """A newer attempt exists, so this one may neither commit nor publish."""


class IntegrityError(TiphysError):
    """Bytes in storage are not the bytes that were recorded."""

    exit_code = 5


class StoreError(TiphysError):
    """Storage is out of reach, out of space, or refused the request."""

    exit_code = 75


class ForbiddenError(StoreError):
    """The cluster does not let this account do it; it may once somebody grants it."""

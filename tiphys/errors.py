"""One tree of errors, because a person sees them and a script branches on them.

    TiphysError                      1  something failed
    ├── UsageError                   2  the call, file or manifest is wrong
    │   └── StoreFormatError            another version of Tiphys wrote the store
    ├── NotFoundError                3  the run, step or object is not there
    │   └── ObjectMissingError
    ├── ConflictError                4  another owner holds it, or quota denies it
    │   ├── ObjectExistsError
    │   └── FencedError                 a newer attempt exists; this one must stop
    ├── IntegrityError               5  bytes do not match what was recorded
    └── StoreError                  75  storage or cluster did not answer, or refused
        └── ForbiddenError              cluster or storage says that this account may not do it

The number is the exit code of the ``tiphys`` command. 75 is ``EX_TEMPFAIL`` of
sysexits.h: trying again may help. Messages say what failed, where, why, and
what to do next.
"""

import sys
from typing import ClassVar


class TiphysError(Exception):
    """Base of every error that Tiphys raises on purpose."""

    exit_code: ClassVar[int] = 1


class UsageError(TiphysError):
    """The call, the file or the manifest is wrong; trying again cannot help."""

    exit_code = 2


class StoreFormatError(UsageError):
    """Another version of Tiphys wrote the store, and this one does not read it."""


class NotFoundError(TiphysError):
    """The requested run, step, object or resource does not exist."""

    exit_code = 3


class ObjectMissingError(NotFoundError):
    """No object has this key."""


class ConflictError(TiphysError):
    """Another process or person holds the requested name, or quota denies the request."""

    exit_code = 4


class ObjectExistsError(ConflictError):
    """A create-only write found an existing object under its key."""


class FencedError(ConflictError):
    """A newer attempt exists, so this one may neither commit nor publish."""


class IntegrityError(TiphysError):
    """Bytes in storage are not the bytes that were recorded."""

    exit_code = 5


class StoreError(TiphysError):
    """Storage is out of reach, out of space, or refused the request."""

    exit_code = 75


class ForbiddenError(StoreError):
    """Cluster or storage denies this account the request; an administrator can grant the permission."""


def report_error(error: TiphysError, exit_code: int) -> int:
    """Write the message of ``error`` to standard error and return ``exit_code``, for the ``main`` of a program."""
    sys.stderr.write(f"tiphys: {error}\n")
    sys.stderr.flush()
    return exit_code

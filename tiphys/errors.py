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
        ├── StoreFullError              the disk or the quota is full
        └── SettingsError       78  credentials, permissions or the address are wrong
            └── ForbiddenError          cluster or storage says that this account may not do it

The number is the exit code of the ``tiphys`` command. 75 is ``EX_TEMPFAIL`` of
sysexits.h: trying again may help; 78 is ``EX_CONFIG``: it cannot. Messages say what failed, where, why, and
what to do next.
"""

import difflib
import sys
from collections.abc import Iterable
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


class StoreFullError(StoreError):
    """The disk of the store, or the quota of its bucket, has no room for the object."""


class SettingsError(StoreError):
    """Storage or cluster refuses the request until a person changes credentials, permissions or the address."""

    exit_code = 78


class ForbiddenError(SettingsError):
    """Cluster or storage denies this account the request; an administrator can grant the permission."""


_MAX_LISTED_NAMES = 12


def install_command(extra: str) -> str:
    """How to install an extra, by the wheel: on a public index the name may be that of another project."""
    return f"pip install 'tiphys-VERSION-py3-none-any.whl[{extra}]'"


def unknown_name_message(owner: str, kind: str, name: str, known: Iterable[str]) -> str:
    """A sentence for a name that is not ``known``: ``step 'fit' has no input 'rat'; did you mean 'rate'? It has: …``.

    A long list of ``known`` names is left out where one of them is similar to ``name``.
    """
    names = list(known)
    similar = difflib.get_close_matches(name, names, n=1)
    if similar and len(names) > _MAX_LISTED_NAMES:
        return f"{owner} has no {kind} {name!r}; did you mean {similar[0]!r}?"
    suggestion = f"did you mean {similar[0]!r}? It has" if similar else "it has"
    return f"{owner} has no {kind} {name!r}; {suggestion}: {', '.join(names) or 'none'}"


def yaml_error_message(source: str, error: Exception) -> str:
    """The message for YAML that cannot be parsed: the source, with line and column, and what is wrong there.

    ``source`` says where the text is from, such as ``queue file queues.yaml``; ``error`` is one of PyYAML, which
    training images do not have.
    """
    if isinstance(error, RecursionError):
        return f"{source} is nested too deeply to be read"
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    if mark is None or problem is None:
        return f"{source} is not valid YAML: {' '.join(str(error).split())}"
    return f"{source}, line {mark.line + 1}, column {mark.column + 1}, is not valid YAML: {problem}"


UNKEPT_OUTPUT = "no store can keep"
"""Part of the messages about an output with a name, a link or a file of a kind that storage does not have.

Argo and the classifier of failures know the author's error by it.
"""


def report_error(error: TiphysError, exit_code: int) -> int:
    """Write the message of ``error`` to standard error and return ``exit_code``, for the ``main`` of a program."""
    sys.stderr.write(f"tiphys: {error}\n")
    sys.stderr.flush()
    return exit_code

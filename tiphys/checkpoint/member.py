"""``python -m tiphys.checkpoint.member -- PROGRAM``: one of several pods of a step fetches and stores the files itself.

Argo puts the inputs of a step into its own pods and takes the outputs out of
them; the pods of a training on several nodes are not Argo's. So each of them
fetches the inputs before its program starts, and the first stores the outputs
once its program has ended well, where Argo would have put them. In an elastic
training the first is also told that the others come to it.
"""

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tiphys.checkpoint.exec.supervise import FORWARDED, NOT_EXECUTABLE, NOT_FOUND, Child, Signals
from tiphys.checkpoint.telemetry.events import tell
from tiphys.errors import ObjectExistsError, ObjectMissingError, StoreError, TiphysError, UsageError
from tiphys.protocol import environment
from tiphys.store import RunLayout, Store, open_store

_WAIT_SECONDS = 1.0
_HOW_THEY_MEET = "PET_RDZV_CONF"


class _StoppedError(Exception):
    """SIGTERM came before the program was started."""


@dataclass(frozen=True)
class Files:
    """What a member fetches and stores, as the compiled step tells it.

    ``inputs`` pairs the key of an input artifact with its path; ``outputs``
    the path of a declared output with the key that it gets.
    """

    inputs: tuple[tuple[str, Path], ...]
    outputs: tuple[tuple[Path, str], ...]

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> "Files":
        """Read what compile has written; raises `UsageError` if it is not there, or of another version."""
        try:
            declared = json.loads(environ[environment.FILES])
            keys = json.loads(environ.get(environment.INPUT_KEYS) or "{}")
            attempt = int(environ[environment.ATTEMPT])
            prefix = RunLayout(environ[environment.RUN]).outputs(environ[environment.STEP], attempt)
            return cls(
                inputs=tuple((keys[name], Path(path)) for name, path in declared["inputs"].items() if name in keys),
                outputs=tuple((Path(path), f"{prefix}{place}") for place, path in declared["outputs"].items()),
            )
        except (KeyError, ValueError) as error:
            raise UsageError(
                f"the environment does not say which files this pod fetches and stores ({error}); it is started by a "
                "step of several nodes, and by nothing else"
            ) from error


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one program between its inputs and its outputs; its exit code, or ours."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    command = given[1:] if given[:1] == ["--"] else given
    try:
        files = Files.from_environment(os.environ)
        os.environ.update(meeting(os.environ))
        with Signals() as signals:
            if not files.inputs and not files.outputs:
                return _run(command, signals)
            store = open_store(os.environ[environment.STORE], must_exist=True)
            for key, path in files.inputs:
                fetch(store, key, path, lambda: signals.told_to_stop)
            code = _run(command, signals)
            if code == 0 and is_first(os.environ):
                for path, key in files.outputs:
                    keep(store, path, key)
            return code
    except _StoppedError:
        return environment.EX_TEMPFAIL
    except StoreError as error:
        return _told(error, environment.EX_UNAVAILABLE)
    except TiphysError as error:
        return _told(error, error.exit_code)


def is_first(environ: Mapping[str, str]) -> bool:
    """Whether this pod is the one that stores outputs."""
    return (environ.get("NODE_RANK") or environ.get("PET_NODE_RANK") or environ.get("RANK") or "0") == "0"


def meeting(environ: Mapping[str, str]) -> dict[str, str]:
    """What tells torchrun in an elastic training whether the nodes meet here: they do at the first, and nowhere else.

    It would find out by itself, from host names, which a pod that has just begun may not have yet.
    """
    if environment.ELASTIC not in environ:
        return {}
    given = environ.get(_HOW_THEY_MEET, "")
    here = f"is_host={int(is_first(environ))}"
    return {_HOW_THEY_MEET: given if "is_host=" in given else ",".join(filter(None, (given, here)))}


def fetch(store: Store, key: str, path: Path, stopped: Callable[[], bool] = lambda: False) -> None:
    """Load the object, or all objects below ``key``, to ``path``.

    Raises:
        ObjectMissingError: there is nothing.
        _StoppedError: ``stopped`` said so.
    """
    found = [info.key for info in store.list(key) if info.key == key or info.key.startswith(f"{key}/")]
    if not found:
        raise ObjectMissingError(f"the input artifact {store.artifact_key(key)} is gone from {store.url}")
    for one in found:
        target = path if one == key else path / one.removeprefix(f"{key}/")
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("wb") as file:
            for chunk in store.chunks(one):
                if stopped():
                    raise _StoppedError
                file.write(chunk)


def keep(store: Store, path: Path, key: str) -> None:
    """Store the file, or all files below ``path``, as ``key``. What is not there is left to be found missing."""
    for file in _files(path):
        place = key if file == path else f"{key}/{file.relative_to(path).as_posix()}"
        with contextlib.suppress(ObjectExistsError):  # by a reply that was lost: nobody else writes below this attempt
            store.create_from_file(place, file)


def _files(path: Path) -> Iterator[Path]:
    if path.is_dir():
        yield from sorted(file for file in path.rglob("*") if file.is_file())
    elif path.exists():
        yield path


def _run(command: Sequence[str], signals: Signals) -> int:
    if signals.told_to_stop:
        raise _StoppedError
    try:
        child = Child(command, os.environ)
    except OSError as error:
        tell(f"{command[0]} cannot be started: {error.strerror}")
        return NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE
    while child.code is None:
        number = signals.next(_WAIT_SECONDS)
        if number in FORWARDED:
            child.send(number)
        child.reap()
    return child.code


def _told(error: TiphysError, code: int) -> int:
    tell(str(error))
    return code


if __name__ == "__main__":
    sys.exit(main())

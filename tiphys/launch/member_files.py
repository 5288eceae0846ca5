"""Inputs and outputs of a member of a gang, around its program.

Argo downloads the inputs of a step into its own pods and uploads their outputs,
but the pods of a training on several nodes belong to a Job. So each member
downloads the inputs before its program starts. The first member uploads the
outputs to Argo's keys once its program has succeeded. In an elastic training
the member also tells torchrun whether this node hosts the rendezvous.
"""

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tiphys.errors import ObjectExistsError, ObjectMissingError, StoreError, TiphysError, UsageError, report_error
from tiphys.launch.processes import SignalQueue
from tiphys.protocol import environment
from tiphys.store import RunLayout, Store, list_output_files, open_store

_RENDEZVOUS_VARIABLE = "PET_RDZV_CONF"


class _StoppedError(Exception):
    """SIGTERM arrived before the program started."""


@dataclass(frozen=True)
class MemberFiles:
    """The files that a member downloads and uploads, as the compiled step declares them."""

    inputs: tuple[tuple[str, Path], ...]
    """Key of each input artifact, and the path to write it to."""
    outputs: tuple[tuple[Path, str], ...]
    """Path of each declared output, and the key to store it as."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> "MemberFiles":
        """Read the variables that compile wrote; raises `UsageError` if they are missing or malformed."""
        try:
            declared = json.loads(environ[environment.FILES])
            keys = json.loads(environ.get(environment.INPUT_KEYS) or "{}")
            attempt = int(environ[environment.ATTEMPT])
            prefix = RunLayout(environ[environment.RUN]).outputs(environ[environment.STEP], attempt)
            return cls(
                inputs=tuple((keys[name], Path(path)) for name, path in declared["inputs"].items() if name in keys),
                outputs=tuple((Path(path), f"{prefix}{name}") for name, path in declared["outputs"].items()),
            )
        except (KeyError, ValueError) as error:
            raise UsageError(
                f"the environment does not declare which files this pod downloads and uploads ({error}); only a "
                "compiled step of several nodes can start this program"
            ) from error


def run_member(
    run: Callable[[Sequence[str], Mapping[str, str], SignalQueue], int],
    command: Sequence[str],
    environ: Mapping[str, str],
    signals: SignalQueue,
) -> int:
    """Download the inputs, ``run`` the program, upload the outputs; return the exit code of the pod."""
    try:
        files = MemberFiles.from_environment(environ)
        environ = {**environ, **rendezvous_variables(environ)}
        store = open_store(environ[environment.STORE], must_exist=True) if files.inputs or files.outputs else None
        for key, path in files.inputs:
            assert store is not None
            fetch_input(store, key, path, lambda: signals.is_stop_requested)
        if signals.is_stop_requested:
            return environment.EX_TEMPFAIL
        code = run(command, environ, signals)
        if code == 0 and store is not None and is_first_member(environ):
            for path, key in files.outputs:
                store_output(store, path, key)
        return code
    except _StoppedError:
        return environment.EX_TEMPFAIL
    except StoreError as error:
        return report_error(error, environment.EX_UNAVAILABLE)
    except TiphysError as error:
        return report_error(error, error.exit_code)


def is_first_member(environ: Mapping[str, str]) -> bool:
    """Return whether this pod uploads the outputs: the one of node rank 0."""
    return member_number(environ) == 0


def member_number(environ: Mapping[str, str]) -> int:
    """Return which member of its gang this pod is; 0 outside of a gang."""
    return int(environ.get("NODE_RANK") or environ.get("PET_NODE_RANK") or environ.get("RANK") or 0)


def rendezvous_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variable that makes the first member host torchrun's rendezvous; empty unless elastic.

    By default torchrun compares host names, which may not resolve yet in a pod that has just started.
    """
    if environment.ELASTIC not in environ:
        return {}
    configured = environ.get(_RENDEZVOUS_VARIABLE, "")
    is_host = f"is_host={int(is_first_member(environ))}"
    value = configured if "is_host=" in configured else ",".join(filter(None, (configured, is_host)))
    return {_RENDEZVOUS_VARIABLE: value}


def fetch_input(store: Store, key: str, path: Path, should_stop: Callable[[], bool] = lambda: False) -> None:
    """Download the object ``key``, or all objects below it, to ``path``.

    Raises:
        ObjectMissingError: no such object exists.
        _StoppedError: ``should_stop`` returned True.
    """
    keys = [info.key for info in store.list(key) if info.key == key or info.key.startswith(f"{key}/")]
    if not keys:
        raise ObjectMissingError(
            f"the input artifact {store.artifact_key(key)} does not exist in {store.url}; "
            "run the step that writes it again"
        )
    for object_key in keys:
        target = path if object_key == key else path / object_key.removeprefix(f"{key}/")
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("wb") as file:
            for chunk in store.chunks(object_key):
                if should_stop():
                    raise _StoppedError
                file.write(chunk)


def store_output(store: Store, path: Path, key: str) -> None:
    """Upload the file ``path``, or all files below it, as ``key``.

    A missing path is no error here: the check of the step's outputs reports it. A link to a file of the same folder,
    such as ``last.ckpt`` of many trainers, is stored as that file: no long training fails at its end because of one.

    Raises:
        UsageError: no store can keep an entry of the folder.
    """
    for file, object_key in list_output_files(path, key, f"output {path}", copies_links=True):
        with contextlib.suppress(ObjectExistsError):  # a retried request: no other process writes below this attempt
            store.create_from_file(object_key, file)

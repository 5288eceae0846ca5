"""Inputs and outputs of a member of a gang, around its program.

Argo downloads the inputs of a step into its own pods and uploads their outputs,
but the pods of a training on several nodes belong to a Job. So each member
downloads the inputs before its program starts. The first member uploads the
outputs to Argo's keys once its program has succeeded. In an elastic training
the member also tells torchrun whether this node hosts the rendezvous.

The Job of an elastic training succeeds with the first member that does, whichever
that is, because the first may be lost. So the member whose program had rank 0 uploads
the outputs, and no other one ends before it has.
"""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tiphys.errors import ObjectExistsError, ObjectMissingError, StoreError, TiphysError, UsageError, report_error
from tiphys.launch.processes import SignalQueue, log_line
from tiphys.launch.rendezvous import ENDPOINT, SETTINGS, find_listener
from tiphys.launch.restart import ProgramEnd
from tiphys.protocol import environment
from tiphys.store import RunLayout, Store, list_output_files, open_store
from tiphys.store.incarnations import stored_outputs_prefix
from tiphys.threads import start_background_thread

_MARK_SECONDS, _LOST_SECONDS = 10.0, 120.0
"""Time between two marks of the member that uploads the outputs, and without one, after which it counts as lost."""
_POLL_SECONDS, _POLLS_PER_SECOND = 1.0, 200.0
"""Shortest time between two looks of a member that waits for that, and how many all members make at most."""
_STORED = "stored"


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

    def upload(self, store: Store) -> None:
        """Upload the outputs; raises as `store_output`."""
        for path, key in self.outputs:
            store_output(store, path, key)


class ElasticOutputs:
    """The outputs of an elastic gang: one member uploads them, and no other one ends well before that.

    Args:
        store: The store of the run.
        environ: Variables of the member.
    """

    def __init__(self, store: Store, environ: Mapping[str, str]) -> None:
        layout, attempt = RunLayout(environ[environment.RUN]), int(environ[environment.ATTEMPT])
        self._store, self._number = store, member_number(environ)
        self._prefix = stored_outputs_prefix(layout, environ[environment.STEP], attempt)
        members = int(environ.get(environment.MEMBERS) or 1)
        self._poll_seconds = max(_POLL_SECONDS, members / _POLLS_PER_SECOND)

    def upload(self, files: MemberFiles) -> int:
        """Upload the outputs, with a mark every few seconds; return the exit code of the pod.

        Raises:
            StoreError: storage does not take them.
        """
        key, mark = f"{self._prefix}{0:09d}", str(self._number).encode()
        with contextlib.suppress(ObjectExistsError):
            self._store.create(key, mark)
        if self._store.read(key) != mark:  # both together would be a mixture of two trainings
            log_line("another member has begun to upload the outputs of this attempt and was lost, so it ends")
            return environment.EX_TEMPFAIL
        is_over = threading.Event()

        def keep_marking() -> None:
            number = 0
            while not is_over.wait(_MARK_SECONDS):
                number += 1
                with contextlib.suppress(TiphysError):
                    self._store.create(f"{self._prefix}{number:09d}", b"")

        start_background_thread(keep_marking)
        try:
            files.upload(self._store)
        finally:
            is_over.set()
        with contextlib.suppress(ObjectExistsError):
            self._store.create(f"{self._prefix}{_STORED}", b"")
        return 0

    def wait(self, endpoint: str, signals: SignalQueue) -> int:
        """Wait until another member has uploaded the outputs; return the exit code of the pod.

        Its program may still run: as long as torchrun's rendezvous at ``endpoint`` takes connections.
        """
        marks, changed_at = 0, time.monotonic()
        while True:
            is_stopped = signals.is_stop_requested  # Kubernetes ends this pod once the first has ended: look once more
            with contextlib.suppress(TiphysError):
                found = [info.key for info in self._store.list(self._prefix)]
                if f"{self._prefix}{_STORED}" in found:
                    return 0
                if len(found) > marks or find_listener(endpoint):
                    marks, changed_at = len(found), time.monotonic()
            is_lost = time.monotonic() - changed_at > _LOST_SECONDS
            if is_lost:
                log_line("no member has uploaded the outputs, so the one of rank 0 is lost")
            if is_lost or is_stopped:
                return environment.EX_TEMPFAIL
            signals.wait_next(self._poll_seconds)


def run_member(
    run: Callable[[Sequence[str], Mapping[str, str], SignalQueue], ProgramEnd],
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
        end = run(command, environ, signals)
        is_first = is_first_member(environ, end)
        if end.code == 0 and environment.ELASTIC in environ:
            outputs = ElasticOutputs(store or open_store(environ[environment.STORE], must_exist=True), environ)
            return outputs.upload(files) if is_first else outputs.wait(end.environ.get(ENDPOINT, ""), signals)
        if end.code == 0 and store is not None and is_first:
            files.upload(store)
        return end.code
    except _StoppedError:
        return environment.EX_TEMPFAIL
    except StoreError as error:
        return report_error(error, environment.EX_UNAVAILABLE)
    except TiphysError as error:
        return report_error(error, error.exit_code)


def is_first_member(environ: Mapping[str, str], end: ProgramEnd | None = None) -> bool:
    """Return whether this pod uploads the outputs: the one of node rank 0, or in an elastic gang of rank 0 at the end.

    An elastic torchrun numbers the ranks anew without a node that is lost.
    """
    if end is not None and end.first_rank is not None and environment.ELASTIC in environ:
        return end.first_rank == 0
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
    configured = environ.get(SETTINGS, "")
    is_host = f"is_host={int(is_first_member(environ))}"
    value = configured if "is_host=" in configured else ",".join(filter(None, (configured, is_host)))
    return {SETTINGS: value}


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

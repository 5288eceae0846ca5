"""The training of `bench.beside`, once for each way to survive failures. Pods get this text as ``python -c``.

The weights change by whole numbers modulo 2**64, and every change can be undone: a step that is lost, doubled or taken
in another order, and a single wrong bit, stay in the weights and so in the digest at the end.

Beside the training stands the instrument: each step leaves an object in the bucket, whose key is all that it says.
"""

import hashlib
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

STEPS, EVERY, STEP_SECONDS, WORDS = 60, 10, 0.25, 1 << 21
FACTOR = np.uint64(6364136223846793005)
"""Odd, so that multiplying by it loses no bit. Knuth, MMIX."""
FIRST_SAVE_TO_DIE_IN, BEGINNING_OF_SAVE_SECONDS = 40, 0.01
Weights = np.ndarray[Any, np.dtype[np.uint64]]


def initial() -> Weights:
    return np.arange(WORDS, dtype=np.uint64)


def advance(weights: Weights, step: int) -> None:
    """One step of training."""
    np.multiply(weights, FACTOR, out=weights)
    np.add(weights, np.uint64(step), out=weights)


def digest(weights: Weights) -> str:
    return hashlib.sha256(weights.tobytes()).hexdigest()[:16]


class Journal:
    """Notes in a bucket, as keys of empty objects: time, kind, step, pod, process with a random word, and words."""

    def __init__(self, client: Any, bucket: str, prefix: str, pod: str) -> None:
        self.client, self.bucket, self.prefix = client, bucket, prefix
        # `argo retry` makes a pod of the same name, whose program may have the same process id.
        self.life = f"{pod}.{os.getpid()}-{os.urandom(4).hex()}"
        found = client.list_objects_v2(Bucket=bucket, Prefix=f"{prefix}/journal/")
        self.was_killed = any(".killing." in entry["Key"] for entry in found.get("Contents", []))

    def note(self, kind: str, step: int, words: str = "") -> None:
        key = f"{time.time_ns():020d}.{kind}.{step}.{self.life}.{words}"
        self.client.put_object(Bucket=self.bucket, Key=f"{self.prefix}/journal/{key}", Body=b"")

    @contextmanager
    def trained(self, step: int) -> Iterator[None]:
        """The time of one step; what is left of it is slept."""
        began = time.monotonic()
        yield
        self.note("step", step)
        time.sleep(max(0.0, began + STEP_SECONDS - time.monotonic()))

    def kill_in_save(self, step: int, share: Callable[[], float]) -> None:
        """If this is asked for and has not happened, kill this process while ``share`` of a save is between 0 and 1."""
        if self.was_killed or not os.environ.get("BESIDE_KILL_IN_SAVE") or step < FIRST_SAVE_TO_DIE_IN:
            return
        self.note("killing", step)

        def watch() -> None:
            while (saved := share()) < 1:
                if saved > 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(0.0002)
            self.note("missed", step)

        threading.Thread(target=watch, daemon=True).start()


def share_of_file(path: Path, size: int) -> Callable[[], float]:
    """How much of a file is written that will have more than ``size`` bytes."""
    return lambda: path.stat().st_size / size if path.exists() else 0.0


def share_of_request(is_ended: Callable[[], object]) -> Callable[[], float]:
    """Half, from shortly after this call until the save has ended."""
    begun = time.monotonic() + BEGINNING_OF_SAVE_SECONDS
    return lambda: 1.0 if is_ended() else 0.5 if time.monotonic() > begun else 0.0


def train_from_scratch(journal: Journal, first: int, last: int) -> Weights:
    """No checkpoints. Of two steps of a Workflow the first one writes the weights for the second one."""
    weights = np.load("/tmp/before.npy") if first > 1 else initial()
    for step in range(first, last + 1):
        with journal.trained(step):
            advance(weights, step)
    np.save("/tmp/after.npy", weights)
    return weights


def train_with_folder(journal: Journal, load: Callable[[], Any], save: Callable[[int, Any], None]) -> Weights:
    """Plain checkpoints, of which the newest one is loaded."""
    state = load() or {"step": 0, "weights": initial()}
    weights: Weights = state["weights"]
    for step in range(state["step"] + 1, STEPS + 1):
        with journal.trained(step):
            advance(weights, step)
        if step % EVERY == 0:
            save(step, {"step": step, "weights": weights})
    return weights


def train_with_files(journal: Journal, folder: Path) -> Weights:
    """The folder is on a disk."""
    folder.mkdir(exist_ok=True)

    def load() -> Any:
        files = sorted(folder.glob("checkpoint-*.pkl"))
        return pickle.loads(files[-1].read_bytes()) if files else None

    def save(step: int, state: Any) -> None:
        path = folder / f"checkpoint-{step:06d}.pkl"
        journal.kill_in_save(step, share_of_file(path, state["weights"].nbytes))
        with path.open("wb") as file:
            pickle.dump(state, file)

    return train_with_folder(journal, load, save)


def train_with_objects(journal: Journal, prefix: str) -> Weights:
    """The folder is in a bucket."""
    client, bucket = journal.client, journal.bucket

    def load() -> Any:
        listed = client.list_objects_v2(Bucket=bucket, Prefix=prefix).get("Contents", [])
        keys = sorted(entry["Key"] for entry in listed)
        return pickle.loads(client.get_object(Bucket=bucket, Key=keys[-1])["Body"].read()) if keys else None

    def save(step: int, state: Any) -> None:
        ended = threading.Event()
        journal.kill_in_save(step, share_of_request(ended.is_set))
        client.put_object(Bucket=bucket, Key=f"{prefix}checkpoint-{step:06d}.pkl", Body=pickle.dumps(state))
        ended.set()

    return train_with_folder(journal, load, save)


def is_committed(session: Any, step: int) -> bool:
    newest = session.last_committed
    return newest is not None and newest.global_step >= step


def train_with_session(journal: Journal) -> Weights:
    """Tiphys; the step asks for a save every 10 steps."""
    from tiphys import checkpoint

    with checkpoint.session(total_steps=STEPS) as session:
        state = session.restore(default={"step": 0, "weights": initial()})
        for step in range(state["step"] + 1, STEPS + 1):
            with journal.trained(step), session.updating():
                advance(state["weights"], step)
                state["step"] = step
            if step % EVERY == 0:
                journal.kill_in_save(step, share_of_request(partial(is_committed, session, step)))
            session.step(step, state)
    weights: Weights = state["weights"]
    return weights


def main() -> None:
    """Arguments: the way, then the first and the last step, or the folder, or the prefix."""
    import boto3

    way, *arguments = sys.argv[1:]
    bucket, prefix = os.environ["BESIDE_BUCKET"], os.environ["BESIDE_CASE"]
    journal = Journal(boto3.client("s3"), bucket, prefix, os.environ["BESIDE_POD"])
    last = int(arguments[1]) if way == "scratch" else STEPS
    journal.note("begin", 0)
    if way == "scratch":
        weights = train_from_scratch(journal, int(arguments[0]), last)
    elif way == "files":
        weights = train_with_files(journal, Path(arguments[0]))
    elif way == "objects":
        weights = train_with_objects(journal, f"{prefix}/checkpoints/")
    else:
        weights = train_with_session(journal)
    journal.note("done", last, digest(weights) if last == STEPS else "")


if __name__ == "__main__":
    main()

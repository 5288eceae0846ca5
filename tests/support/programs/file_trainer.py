"""A training program that knows nothing of Tiphys and only writes a folder.

``python -m support.programs.file_trainer DIR`` runs it. Every fifth step it writes ``checkpoint-<step>``, with the file
DONE last of all, and it goes on from the newest one that has it. What it says:

    FILE_STEPS      steps of the whole training (default 20)
    FILE_AWAIT      a folder: after each checkpoint, wait until it holds one file more
    FILE_GATE       a file: wait for it before the first step
    FILE_PAUSE      seconds after each step
    FILE_TEAR_AT    the step at whose checkpoint it dies, half of a file written
    FILE_ON_SIGTERM ``save``: write a checkpoint and exit with 0; ``ignore``: go on
    FILE_RESULT     where the digest of the final state goes
    FILE_EXIT       exit code at the end
"""

import hashlib
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

EVERY = 5


def trained(digest: str) -> str:
    """One step; every state decides the next one."""
    return hashlib.sha256(digest.encode()).hexdigest()


def after(steps: int) -> str:
    """The state of a training that nobody interrupted."""
    digest = ""
    for _ in range(steps):
        digest = trained(digest)
    return digest


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def save(folder: Path, step: int, digest: str) -> None:
    place = folder / f"checkpoint-{step}"
    place.mkdir(exist_ok=True)
    weights = digest.encode() * 1000
    with (place / "model.bin").open("wb") as stream:
        stream.write(weights[: len(weights) // 2])
        stream.flush()
        if step == int(os.environ.get("FILE_TEAR_AT", "-1")):
            os.kill(os.getpid(), signal.SIGKILL)
        stream.write(weights[len(weights) // 2 :])
    (place / "state.txt").write_text(f"{step} {digest}")
    (place / "DONE").touch()
    say(f"wrote {step}")


def wait_until(holds: Callable[[], bool]) -> None:
    while not holds():
        time.sleep(0.01)


def files_in(folder: str) -> int:
    return len(list(Path(folder).glob("*")))


def restored(folder: Path) -> tuple[int, str]:
    """Newest whole checkpoint, checked as a program would find out that it is torn: by its own failure."""
    steps = [int(place.parent.name.rpartition("-")[2]) for place in folder.glob("checkpoint-*/DONE")]
    if not steps:
        return 0, ""
    place = folder / f"checkpoint-{max(steps)}"
    step, digest = (place / "state.txt").read_text().split()
    if (place / "model.bin").read_bytes() != digest.encode() * 1000:
        raise RuntimeError(f"{place} is torn")
    return int(step), digest


def main(folder: Path) -> int:
    signals: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        signals.append(number)
        os.write(1, f"signal {number}\n".encode())  # `say` may be what the signal has interrupted, and refuse

    wish = os.environ.get("FILE_ON_SIGTERM")
    if wish:
        signal.signal(signal.SIGTERM, note)
        signal.signal(signal.SIGUSR1, note)
    step, digest = restored(folder)
    say(f"starts {step}")
    if gate := os.environ.get("FILE_GATE"):
        wait_until(Path(gate).exists)
    awaited = os.environ.get("FILE_AWAIT", "")
    arrived = files_in(awaited)
    steps = int(os.environ.get("FILE_STEPS", "20"))
    while step < steps:
        step, digest = step + 1, trained(digest)
        if step % EVERY == 0:
            save(folder, step, digest)
            arrived += 1
            wait_until(lambda: not awaited or files_in(awaited) >= arrived)  # noqa: B023  called at once
        if wish == "save" and signal.SIGTERM in signals:
            save(folder, step, digest)
            return 0
        time.sleep(float(os.environ.get("FILE_PAUSE", "0")))
    if result := os.environ.get("FILE_RESULT"):
        Path(result).write_text(digest)
    return int(os.environ.get("FILE_EXIT", "0"))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))

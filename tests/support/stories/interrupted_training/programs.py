"""The programs of the story. A pod gets this file whole, as ``python -c``, so it stands alone,
and holds no two braces in a row, which Argo would take for a variable.

``FATE`` tells the training program what happens to it once it has done a number
of steps, in its first attempt only: ``kill@7`` and the like. Some meet every
attempt (`EVERY_TIME`): ``hungry@7`` needs more memory from there on, ``poison@6``
kills whoever went on from step 6.
"""

import errno
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

from tiphys import checkpoint, inputs, outputs

MODULUS = 2**61 - 1
MAY_GO = "/tmp/may-go"
EVERY_TIME = ("hungry", "poison")
HUNGER_BYTES = 256 << 20


def advance(value: int, step: int) -> int:
    """One step of training. Every step decides all that follow, so a lost or doubled one shows in the result."""
    return (value * 31 + step) % MODULUS


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def validate(source: str) -> None:
    outputs.path("fingerprint").write_text(f"fingerprint of {source}")


def preprocess(source: str, fingerprint: str) -> None:
    folder = outputs.path("data")
    folder.mkdir(parents=True)
    (folder / "rows.txt").write_text(f"{len(source)}")
    (folder / "fingerprint.txt").write_text(fingerprint)


def train(steps: str, pause: str, fate: str = "") -> None:
    if ":" in os.environ.get("PET_NNODES", ""):
        if "is_host=1" not in os.environ["PET_RDZV_CONF"]:
            stand_by()
        os.environ["NODE_RANK"] = "0"  # as torchrun, which numbers anew what is left
    seed = int((inputs.path("data") / "rows.txt").read_text())
    what, _, when = fate.partition("@")
    if what not in EVERY_TIME and os.environ["TIPHYS_ATTEMPT"] != "1":
        what = ""
    if what == "once" and "TIPHYS_INCARNATION" in os.environ:
        what = ""
    with checkpoint.session() as session:
        state = session.restore(default={"step": 0, "value": seed})
        say(f"starts from {state['step']}")
        meet_others()
        if what == "poison" and state["step"] == int(when):
            raise ValueError("the loss is nan")
        while state["step"] < int(steps):
            state["step"] += 1
            state["value"] = advance(state["value"], state["step"])
            save = session.step(state["step"], state, metrics={"loss": 1 / state["step"]})
            if save and (saved := save.wait()):
                say(f"saved {saved}")
            if what == "poison" and state["step"] == int(when) + 1 and os.environ["TIPHYS_ATTEMPT"] == "1":
                meet("kill", session)
            if what not in ("", "poison") and state["step"] == int(when):
                meet(what, session)
            time.sleep(float(pause))
    outputs.path("model").write_text(str(state["value"]))
    outputs.path("metrics").write_text(json.dumps({"loss": 1 / state["step"]}))


def stand_by() -> None:
    """A node that may be lost, as torchrun would have it but for the training: it is there until it is told to end."""
    say("stands by")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
    while True:
        time.sleep(0.1)


def open_server(port: int) -> socket.socket:
    """Ranks on one machine have a port that was free: a connection of another program may have it now, for a while."""
    while True:
        try:
            return socket.create_server(("", port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            say(f"port {port} is taken")
            time.sleep(0.5)


def meet_others() -> None:
    """Several ranks begin together, as those do that average their gradients: none saves before all have restored."""
    others = int(os.environ.get("WORLD_SIZE", "1")) - 1
    first = (os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", "0")))
    if others and os.environ["RANK"] == "0":
        with open_server(first[1]) as server:
            lines = [server.accept()[0] for _ in range(others)]
        for line in lines:
            line.sendall(b"!")
            line.close()
    elif others:
        answer = b""
        while not answer:
            try:
                with socket.create_connection(first, timeout=60) as line:
                    answer = line.recv(1)
            except OSError:
                time.sleep(0.1)


def meet(fate: str, session: checkpoint.Session) -> None:
    """What happens to a program that cannot help it; ``wait`` leaves it to somebody outside.

    ``linger`` takes its time once it was told to stop: until somebody makes the file `MAY_GO`.
    """
    say(f"meets {fate}")
    while fate == "linger" and not (session.should_stop and Path(MAY_GO).exists()):
        time.sleep(0.1)
    if fate == "linger":
        return
    if fate in ("kill", "once"):
        os.kill(os.getpid(), signal.SIGKILL)
    if fate == "error":
        sys.exit("the program is broken")
    hoard = []
    if fate == "hungry":
        hoard.append(bytearray(os.urandom(1 << 20)) * (HUNGER_BYTES >> 20))
        return
    while True:
        if fate == "memory":
            hoard.append(bytearray(os.urandom(1 << 20)) * 8)
        else:
            time.sleep(0.1)


def register() -> None:
    inputs.path("metrics").read_text()
    outputs.path("version").write_text(f"model-{inputs.path('model').read_text()}")


if __name__ == "__main__":
    program, *arguments = sys.argv[1:]
    {"validate": validate, "preprocess": preprocess, "train": train, "register": register}[program](*arguments)

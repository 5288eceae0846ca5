"""Hands the output of the wrapped program on to the log of the pod, and to the stored copy of it.

The wrapper stands between the program and its streams by two pipes. It reads them
to their end, also after the program has died, so the log lacks nothing.
"""

import codecs
import contextlib
import os
from collections.abc import Mapping
from functools import partial

from tiphys.checkpoint.settings import CheckpointSettings
from tiphys.checkpoint.telemetry.output_copy import OutputCopy
from tiphys.checkpoint.telemetry.secret_mask import find_secrets
from tiphys.protocol import environment
from tiphys.store import Store
from tiphys.threads import BackgroundThread, start_background_thread

_READ_BYTES = 64 << 10
_JOIN_SECONDS = 1.0
"""How long to wait for the end of a pipe, which a process that the program left behind may hold open."""
_STREAMS = (1, 2)


class ProgramOutput:
    """The pipes in the place of standard output and standard error of one program.

    Args:
        copy: Stores the output.
    """

    def __init__(self, copy: OutputCopy) -> None:
        self._copy = copy
        self._write_ends: dict[int, int] = {}
        self._threads: list[BackgroundThread] = []
        for stream in _STREAMS:
            read_end, write_end = os.pipe()
            thread = start_background_thread(partial(self._pass_on, stream, read_end))
            if thread is None:  # without a reader the program would stop once the pipe is full
                os.close(read_end)
                os.close(write_end)
                continue
            self._threads.append(thread)
            self._write_ends[stream] = write_end

    @property
    def file_actions(self) -> list[tuple[int, int, int]]:
        """For `os.posix_spawn`: the program writes to the pipes."""
        return [(os.POSIX_SPAWN_DUP2, write_end, stream) for stream, write_end in self._write_ends.items()]

    def release(self) -> None:
        """Leave the write ends to the program, which was started."""
        while self._write_ends:
            os.close(self._write_ends.popitem()[1])

    def join(self) -> None:
        """Wait until all that the program wrote before its end is in the log."""
        for thread in self._threads:
            thread.join(_JOIN_SECONDS)

    def close(self, *, hurried: bool) -> None:
        """Store the rest of the output, if storage accepts it in time; ``hurried`` after SIGTERM."""
        self.release()
        if not hurried:
            self.join()
        self._copy.close_for_exit(hurried=hurried)

    def _pass_on(self, stream: int, read_end: int) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        with open(read_end, "rb", buffering=0) as pipe:
            while data := pipe.read(_READ_BYTES):
                with contextlib.suppress(OSError):  # the log is closed, and the program must not stop for it
                    _write_all(stream, data)
                self._copy.write(decoder.decode(data))


def _write_all(stream: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(stream, rest) :]


def open_program_output(store: Store, settings: CheckpointSettings, environ: Mapping[str, str]) -> ProgramOutput | None:
    """The pipes of the program of an attempt; None if its output is not to be stored."""
    if environ.get(environment.OUTPUT_COPY) == "off":
        return None
    return ProgramOutput(OutputCopy(store, settings.run, settings.step, settings.attempt, find_secrets(environ)))

"""Attempts of one step, opened as the plugin opens them; each runs what compile would start, in an empty folder."""

import contextlib
import os
import random
import shutil
import signal
import subprocess
import time
import uuid
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from support.builders.lineage import LINEAGE, RUN, STEP, claim_of, end_of, write_claim, write_end

from programs import marked_processes
from programs.catalogue import SCRIPTS, Program
from programs.faults import DAMAGE, KILL, MEMORY, TERM, Fault
from programs.trace import Line, TraceReader
from tiphys.lineage.select import choose_checkpoint, list_commits
from tiphys.lineage.validity import read_manifest
from tiphys.records import Cause, CheckpointRef
from tiphys.store import DirectoryStore, LineageLayout, read_step_attempts

ROOT = Path(__file__).parents[2]
GRACE_SECONDS = 300
STEPS_PER_SAVE = 3
HANG_SECONDS = 1800
"""An attempt without a fault that takes longer hangs, also on a busy machine."""
_LOOK_SECONDS = 0.005
_CAUSES = {MEMORY: Cause.OUT_OF_MEMORY}


@dataclass
class AttemptRecord:
    """What happened in one attempt."""

    number: int
    fault: Fault | None
    start: CheckpointRef | None
    lines: list[Line] = field(default_factory=list)
    log: str = ""
    code: int = 0
    struck: bool = False
    """The fault happened; otherwise the attempt ended before its moment."""
    hung: bool = False
    committed: list[CheckpointRef] = field(default_factory=list)
    """Checkpoints in storage when the fault happened, newest first; without a fault, at the end."""
    damaged: CheckpointRef | None = None
    left: list[str] = field(default_factory=list)
    """Processes that outlived the attempt."""


class Run:
    """One training, attempt after attempt, in a store of its own."""

    def __init__(self, root: Path, program: Program) -> None:
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir(parents=True)
        self.root = root
        self.program = program
        self.store = DirectoryStore(root / "store")
        self.attempts: list[AttemptRecord] = []

    def attempt(self, fault: Fault | None = None, generator: random.Random | None = None) -> AttemptRecord:
        """Open an attempt, let ``fault`` happen to it, and wait for its end."""
        choice = choose_checkpoint(self.store, LINEAGE, read_step_attempts(self.store, RUN, STEP))
        record = AttemptRecord(len(self.attempts) + 1, fault, choice.checkpoint)
        self.attempts.append(record)
        write_claim(self.store, claim_of(record.number, choice.checkpoint))
        self._execute(record)
        record.committed = record.committed or list_commits(self.store, LINEAGE)
        if record.struck and fault and fault.kind == DAMAGE and generator:
            record.damaged = self._damage_newest(generator)
        if record.code != 0:
            write_end(self.store, end_of(record.number, _CAUSES.get(fault.kind if fault else "", Cause.PREEMPTION)))
        return record

    def _execute(self, record: AttemptRecord) -> None:
        pod = self.root / "pod"
        shutil.rmtree(pod, ignore_errors=True)
        pod.mkdir()
        mark = f"{os.getpid()}-{uuid.uuid4().hex}"
        trace = TraceReader(self.root / f"{record.number}.trace")
        log = self.root / f"{record.number}.log"
        command, variables = compiled(self.program)
        environ = self._environ(variables, record) | {marked_processes.MARK: mark, "PROGRAM_TRACE": str(trace.path)}
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, cwd=pod, env=environ, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                start_new_session=True,
            )  # fmt: skip
        try:
            self._accompany(process, record, trace, mark)
        finally:
            if process.poll() is None:
                marked_processes.kill_container(mark)
            process.wait()
            record.left = marked_processes.left_behind(mark)
        record.code = process.returncode
        trace.new_lines()
        record.lines = trace.lines
        record.log = log.read_text(errors="replace")

    def _accompany(
        self, process: "subprocess.Popen[bytes]", record: AttemptRecord, trace: TraceReader, mark: str
    ) -> None:
        fault, passages = record.fault, 0
        saves = _ChangeWatch(self.root / "pod" / self.program.folder if self.program.folder else self._shards)
        deadline = time.monotonic() + HANG_SECONDS
        while process.poll() is None and time.monotonic() < deadline:
            found = trace.new_lines()
            if fault and not record.struck:
                passages += sum(line["event"] == fault.event for line in found) if fault.event else saves.changed()
                if passages >= fault.passage:
                    record.committed = list_commits(self.store, LINEAGE)
                    record.struck = True
                    strike(fault, process.pid, mark)
                    deadline = time.monotonic() + GRACE_SECONDS + 10
            time.sleep(_LOOK_SECONDS)
        record.hung = process.poll() is None

    @property
    def _shards(self) -> Path:
        return self.root / "store" / LineageLayout(LINEAGE).all_shards

    def _environ(self, variables: dict[str, str], record: AttemptRecord) -> dict[str, str]:
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("TIPHYS_", "PYTHON", "VIRTUAL_ENV", "COVERAGE"))
        }
        given = {
            "TIPHYS_STORE": self.store.url,
            "TIPHYS_CHECKPOINT_STORE": self.store.url,
            "TIPHYS_RUN": RUN,
            "TIPHYS_STEP": STEP,
            "TIPHYS_ATTEMPT": str(record.number),
            "TIPHYS_LINEAGE": LINEAGE,
            "TIPHYS_RESUME_FROM": str(record.start or ""),
            "CHECKPOINT_URI": "",
        }
        programs = ROOT / self.program.environment / "bin"
        return (
            kept
            | variables
            | given
            | {
                "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
                "PYTHONPATH": str(SCRIPTS),
                "PYTHONUNBUFFERED": "1",
                "OMP_NUM_THREADS": "1",
                "KERAS_HOME": str(self.root),
                "HF_HUB_OFFLINE": "1",
            }
        )

    def _damage_newest(self, generator: random.Random) -> CheckpointRef | None:
        """Change one byte of the newest checkpoint."""
        if not (commits := list_commits(self.store, LINEAGE)):
            return None
        manifest = read_manifest(self.store, commits[0])
        shard = generator.choice([shard for shard in manifest.shards if shard.size])
        path = self.root / "store" / shard.key
        data = bytearray(path.read_bytes())
        data[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
        path.chmod(0o644)
        path.write_bytes(data)
        return commits[0]


def strike(fault: Fault, leader: int, mark: str) -> None:
    """Let the fault happen: to the process group that ``leader`` leads, as argoexec does it, or as the kernel does."""
    if fault.kind == TERM:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(leader, signal.SIGTERM)
    elif fault.kind in (KILL, DAMAGE):
        marked_processes.kill_container(mark)
    else:
        marked_processes.kill_largest(mark, leader)


@cache
def compiled(program: Program) -> tuple[list[str], dict[str, str]]:
    """Command and literal variables of the step, as compile writes them for a ``Train`` with the program's command."""
    from hera_pipelines import Checkpoints, Pipeline, Train

    with Pipeline(program.name, store="s3://ml-runs/tiphys") as pipeline:
        Train(
            name=STEP,
            image="registry.example/trainer:1",
            command=program.command,
            checkpoints=Checkpoints(every=f"{STEPS_PER_SAVE} steps", keep_last=3),
            grace=f"{GRACE_SECONDS}s",
        )()
    templates = pipeline.to_dict()["spec"]["templates"]
    container = next(template["container"] for template in templates if template["name"] == f"{STEP}-run")
    variables = {entry["name"]: entry["value"] for entry in container["env"] if "{{" not in entry.get("value", "{{")}
    return [*container["command"], *container.get("args", [])], variables


class _ChangeWatch:
    """Notices changes of the files below a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._last: frozenset[tuple[str, int]] = frozenset()

    def changed(self) -> bool:
        """Whether a file was added, removed or resized since the last call."""
        found = set()
        for parent, _, names in os.walk(self._folder):
            for name in names:
                path = os.path.join(parent, name)  # noqa: PTH118  looks often
                with contextlib.suppress(OSError):
                    found.add((path, os.stat(path).st_size))  # noqa: PTH116
        before, self._last = self._last, frozenset(found)
        return self._last != before

"""One trial: a contender's Workflow meets a fault, and is seen to its end."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from bench.argo.documents import FINISHED, describe_failure, phase
from bench.argo.installation import WORKFLOW_LABEL, Installation
from bench.beside import trainer
from bench.beside.contenders import Case, Contender
from bench.beside.faults import Fault
from bench.beside.judge import History, Note, read_note
from bench.progress import say

from tiphys.kube import Object
from tiphys.kube.resources import CONFIG_MAPS, PODS, WORKFLOWS
from tiphys.store import LineageLayout, lineage_name

FAULT_AT_STEP = 45
"""After the fourth save and far from the next one, and in the second of two steps."""
LONGEST_SECONDS = 300.0
_POLL_SECONDS = 0.5
_RETRIES_BY_HAND = 3

T = TypeVar("T")


@dataclass
class Trial:
    """A contender and a fault on a cluster; ``client`` is of the bucket of the case."""

    here: Installation
    client: Any
    contender: Contender
    fault: Fault
    case: Case
    workflows: list[str] = field(default_factory=list)
    actions: list[str] = field(default_factory=list)

    @property
    def namespace(self) -> str:
        return self.here.settings.namespace

    def run(self) -> History:
        """Submit, bring the fault about, act as a person where the contender needs one, and wait for the end.

        Raises:
            RuntimeError: the training never came to the fault.
        """
        self.submit()
        target = self.wait_for(self._reach_fault)
        evidence = self.fault.inject(self, target)
        if self.fault.resubmits:
            self._submit_after_deletion()
        deadline = time.monotonic() + LONGEST_SECONDS
        while time.monotonic() < deadline:
            phases = self.phases()
            if all(name in FINISHED for name in phases) and not self._retry_by_hand(phases):
                break
            time.sleep(_POLL_SECONDS)
        for document in self._documents():
            if phase(document) != "Succeeded":
                say(describe_failure(document))
        notes = self.notes()
        if self.fault.kills_in_save:
            killed = [note for note in notes if note.kind == "killing"]
            target = killed[-1] if killed else target
            evidence = f"SIGKILL in the save of step {target.step}" if killed else ""
        met = target.life if self.fault.meets_process else ""
        return History(notes, self.phases(), evidence, met, self.actions)

    def submit(self) -> None:
        """`argo submit` of the same file."""
        made = json.loads(self._argo("submit", "-", "--output", "json", given=json.dumps(self._manifest)))
        self.workflows.append(made["metadata"]["name"])

    def phases(self) -> list[str]:
        """Of all Workflows that were not deleted."""
        return [phase(workflow) for workflow in self._documents()]

    def notes(self) -> list[Note]:
        """The journal, in the order of time."""
        prefix = f"{self.case.name}/journal/"
        return sorted(read_note(key.removeprefix(prefix)) for key in self._keys(prefix))

    def wait_for(self, happened: Callable[[], T]) -> T:
        """What ``happened`` answers once it is true.

        Raises:
            RuntimeError: it was not in time.
        """
        deadline = time.monotonic() + LONGEST_SECONDS
        while not (found := happened()):
            if time.monotonic() > deadline:
                raise RuntimeError(f"{self.case.name}: the trial stands still; phases {self.phases()}")
            time.sleep(_POLL_SECONDS)
        return found

    def execute(self, pod: str, line: str) -> None:
        """A line of shell in the container of the program."""
        _command(["kubectl", "exec", "-n", self.namespace, pod, "-c", "main", "--", "sh", "-c", line])

    def damage(self, target: Note) -> str:
        """Change one bit of the newest checkpoint and kill the process; what was changed."""
        if self.contender.checkpoints == "disk":
            files = f"import glob; p = sorted(glob.glob('/checkpoints/{self.case.name}/*'))[-1]; f = open(p, 'r+b')"
            flip = "f.seek(0, 2); m = f.tell() // 2; f.seek(m); b = f.read(1)[0]; f.seek(m); f.write(bytes([b ^ 1]))"
            self.execute(target.pod, f'python -c "{files}; {flip}; f.close()" && kill -9 {target.process}')
            return "one bit of the newest file"
        prefix = f"{self.case.name}/checkpoints/"
        if self.contender.checkpoints == "tiphys":
            folder = self.case.store.partition(f"{self.case.bucket}/")[2]
            prefix = f"{folder}/{LineageLayout(lineage_name(self.workflows[0], 'train')).all_shards}".lstrip("/")
        newest = self._newest(prefix)
        if not newest:
            return ""
        before = self.client.get_object(Bucket=self.case.bucket, Key=newest)["Body"].read()
        changed = bytearray(before)
        changed[len(changed) // 2] ^= 1
        self.client.put_object(Bucket=self.case.bucket, Key=newest, Body=bytes(changed))
        self.execute(target.pod, f"kill -9 {target.process}")
        after = self.client.get_object(Bucket=self.case.bucket, Key=newest)["Body"].read()
        return f"one bit of {newest.rpartition('/')[2]}" if after == bytes(changed) != before else ""

    def clean(self) -> None:
        """Delete Workflows, the cache of `memoize` and all objects of the case, and wait until no pod is left."""
        for name in self.workflows:
            self.here.api.delete(WORKFLOWS, self.namespace, name, propagation="Background")
            self.wait_for(
                lambda name=name: not self.here.api.list(PODS, self.namespace, f"{WORKFLOW_LABEL}={name}").items  # type: ignore[misc]
            )
        self.here.api.delete(CONFIG_MAPS, self.namespace, self.case.name)
        for key in self._keys(f"{self.case.name}/"):
            self.client.delete_object(Bucket=self.case.bucket, Key=key)

    def _documents(self) -> list[Object]:
        found = (self.here.api.get(WORKFLOWS, self.namespace, name) for name in self.workflows)
        return [workflow for workflow in found if workflow is not None]

    @property
    def _manifest(self) -> Any:
        return self.contender.compile(self.case)

    def _reach_fault(self) -> Note | None:
        if not self.fault.meets_process:
            return Note(0.0, "", 0, "")
        if any(name in ("Failed", "Error") for name in self.phases()):
            raise RuntimeError(f"{self.case.name} ended before the fault")
        notes = self.notes()
        begun = notes if self.fault.kills_in_save else [note for note in notes if note.step >= FAULT_AT_STEP]
        return begun[-1] if begun else None

    def _submit_after_deletion(self) -> None:
        if self.contender.checkpoints == "tiphys":
            run = self.workflows[0]
            line = [sys.executable, "-m", "hera_pipelines.cli", "resume", run, "--store", self.here.settings.store]
            _command(line, seconds=LONGEST_SECONDS)
            self.workflows.append(f"{run}-2")
            self.actions.append("`tiphys resume`")
        else:
            self.submit()
            self.actions.append("`argo submit`")

    def _retry_by_hand(self, phases: list[str]) -> bool:
        """`argo retry`, where a person does that and the newest Workflow has failed; whether it was called."""
        if not self.contender.retries_by_hand or phases[-1] == "Succeeded":
            return False
        if self.actions.count("`argo retry`") >= _RETRIES_BY_HAND:
            return False
        self._argo("retry", self.workflows[-1])
        self.actions.append("`argo retry`")
        return True

    def _newest(self, prefix: str) -> str:
        """The largest of the objects that were written last."""
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self.case.bucket, Prefix=prefix)
        large = [one for page in pages for one in page.get("Contents", []) if one["Size"] > trainer.WORDS]
        return str(max(large, key=lambda one: (one["LastModified"], one["Key"]))["Key"]) if large else ""

    def _keys(self, prefix: str) -> list[str]:
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self.case.bucket, Prefix=prefix)
        return [one["Key"] for page in pages for one in page.get("Contents", [])]

    def _argo(self, *arguments: str, given: str = "") -> str:
        return _command(["argo", "--namespace", self.namespace, *arguments], given)


def _command(line: list[str], given: str = "", seconds: float = 120.0) -> str:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("ARGO_")}
    done = subprocess.run(line, input=given, capture_output=True, text=True, timeout=seconds, check=False, env=environ)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(line)[:200]}: {done.stderr or done.stdout}")
    return done.stdout

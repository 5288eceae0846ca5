"""The files of one attempt: what a pod would find in its volumes, and what it would leave there."""

import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from hera_pipelines.local.bucket import Bucket
from hera_pipelines.local.nodes import Artifact, Outputs
from hera_pipelines.local.paths import Layout, declared_paths, normal, program_of
from hera_pipelines.local.podspec import PodPatch
from hera_pipelines.local.process import Command
from hera_pipelines.local.surroundings import Surroundings
from tiphys.errors import NotFoundError, UsageError
from tiphys.protocol.pipeline import Manifest

_TAIL_LINES = 20
_TAIL_BYTES = 64 << 10
_LINE_CHARACTERS = 500
# Colours and cursor movements of a program are not meant for the terminal of whoever reads its last words.
_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\].*?(?:\x07|\x1b\\)|[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_RESULT_BYTES = 256 << 10  # Argo's limit for outputs.result


@dataclass(frozen=True)
class Pod:
    """One attempt to run. ``template`` has no variables left."""

    name: str
    namespace: str
    workflow: str
    workflow_uid: str
    node: str
    template: Manifest
    volumes: Mapping[str, Path | None]
    """Folder of each volume of the workflow; None for one that lives as long as the pod."""
    on_exit: bool = False
    seconds: float | None = None
    """How long it may run."""
    wants_result: bool = False
    rank: int | None = None
    """Which member of a gang it is."""

    @property
    def labels(self) -> dict[str, str]:
        return dict((self.template.get("metadata") or {}).get("labels") or {})

    def artifacts(self, side: str) -> list[Artifact]:
        """Declared artifacts of ``inputs`` or ``outputs``."""
        return (self.template.get(side) or {}).get("artifacts") or []


@dataclass(frozen=True)
class Attempt:
    """The files of ``pod`` below the engine's state folder. Not for the event loop: its calls block."""

    pod: Pod
    state: Path
    bucket: Bucket
    surroundings: Surroundings

    @property
    def folder(self) -> Path:
        return self.state / "pods" / self.pod.name

    @property
    def log(self) -> Path:
        """What the program writes."""
        return log_of(self.state, self.pod.name)

    @cached_property
    def layout(self) -> Layout:
        """Where the declared paths lie."""
        mounts = program_of(self.pod.template).get("volumeMounts") or []
        return Layout(
            root=self.folder / "root",
            mounts={normal(mount["mountPath"]): self._volume(mount) for mount in mounts},
            paths=tuple(path for _, path in declared_paths(self.pod.template)),
            keep=self.surroundings.store_url,
        )

    def prepare(self) -> None:
        """Make the folders, fetch the inputs and write the script.

        Raises:
            NotFoundError: an input that is not optional does not exist.
            StoreError: storage is out of reach or refuses.
        """
        self.surroundings.furnish(self.folder / "work")
        for mount in self.layout.mounts.values():
            mount.mkdir(parents=True, exist_ok=True)
        for path in self.layout.paths:
            self.layout.real(path).parent.mkdir(parents=True, exist_ok=True)
        for artifact in self.pod.artifacts("inputs"):
            if "s3" in artifact or "raw" in artifact:
                self._fetch(artifact)
        if source := program_of(self.pod.template).get("source"):
            (self.folder / "script").write_text(self.layout.rewrite(source))

    def command(self, patch: PodPatch) -> Command:
        """How to start the program."""
        program = program_of(self.pod.template)
        rewrite = self.layout.rewrite
        declared = {variable["name"]: rewrite(str(variable.get("value", ""))) for variable in program.get("env") or []}
        arguments = [rewrite(part) for part in [*program.get("command", []), *(program.get("args") or [])]]
        if program.get("source"):
            arguments.append(str(self.folder / "script"))
        return Command(
            arguments=self.surroundings.command(arguments),
            environment=self.surroundings.environment(declared | patch.environment),
            folder=self.folder / "work",
            log=self.log,
            stdout=self._stdout if self.pod.wants_result else None,
        )

    def collect(self, exit_code: str) -> Outputs:
        """Store the declared outputs.

        Raises:
            NotFoundError: the program did not write one that is not optional.
            StoreError: storage is out of reach or refuses.
        """
        declared = (self.pod.template.get("outputs") or {}).get("parameters") or []
        parameters = {parameter["name"]: self._parameter(parameter) for parameter in declared}
        saved = [artifact for artifact in map(self._with_key, self.pod.artifacts("outputs")) if self._save(artifact)]
        return Outputs(parameters, {artifact["name"]: artifact for artifact in saved}, self._result(), exit_code)

    def discard(self) -> None:
        """Remove the files of an attempt that succeeded; data sets and models are not kept twice."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def tail(self) -> tuple[str, ...]:
        """The last lines of the log, however long it and its lines are; nothing in them steers a terminal."""
        try:
            with self.log.open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
                text = log.read().decode(errors="replace")
        except FileNotFoundError:
            return ()
        lines = text.removesuffix("\n").split("\n")[-_TAIL_LINES:] if text else []
        return tuple(_CONTROL.sub("", line)[:_LINE_CHARACTERS] for line in lines)

    @property
    def _stdout(self) -> Path:
        return self.folder / "stdout"

    def _volume(self, mount: Manifest) -> Path:
        base = self.pod.volumes.get(mount["name"]) or self.folder / "volumes" / mount["name"]
        return base / mount["subPath"] if mount.get("subPath") else base

    def _fetch(self, artifact: Artifact) -> None:
        try:
            self.bucket.fetch(artifact, self.layout.real(normal(artifact["path"])))
        except NotFoundError:
            if not artifact.get("optional"):
                raise

    def _with_key(self, artifact: Artifact) -> Artifact:
        """Argo's default key, for an artifact that names none."""
        own = {"key": f"{self.pod.workflow}/{self.pod.name}/{artifact['name']}"}
        return {**artifact, "s3": artifact.get("s3") or own}

    def _save(self, artifact: Artifact) -> bool:
        source = self.layout.real(normal(artifact["path"]))
        if source.exists():
            self.bucket.save(artifact, source)
            return True
        if artifact.get("optional"):
            return False
        raise NotFoundError(f"output artifact {artifact['name']}: no such file or directory: {artifact['path']}")

    def _parameter(self, declared: Manifest) -> str:
        source = declared.get("valueFrom") or {}
        path = self.layout.real(normal(source["path"]))
        if path.is_file():
            return _text_of(path, declared["name"])
        if "default" in source:
            return str(source["default"])
        raise NotFoundError(f"output parameter {declared['name']}: no such file: {source['path']}")

    def _result(self) -> str | None:
        if not self.pod.wants_result:
            return None
        with self._stdout.open("rb") as written, self.log.open("ab") as log:
            result = written.read(_RESULT_BYTES)
            log.write(result)
            shutil.copyfileobj(written, log)
        return result.decode(errors="replace").removesuffix("\n")


def _text_of(path: Path, parameter: str) -> str:
    try:
        return path.read_text(encoding="utf-8").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise UsageError(f"output parameter {parameter} is not UTF-8 text; declare it as an artifact") from error


def log_of(state: Path, pod: str) -> Path:
    """Where the output of a pod goes."""
    return state / "logs" / f"{pod}.log"

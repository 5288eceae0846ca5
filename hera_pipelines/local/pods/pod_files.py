"""The files of one attempt: what a pod would find in its volumes, and what it would leave there.

Where the absolute paths of a container lie on this machine.

Every attempt gets a folder of its own. A path that the template declares (an
artifact, an output, a mounted volume) is moved below it, and replaced wherever
it stands in the command, the arguments, the environment or the source. A
program that has such a path built in cannot be redirected this way, so `check`
refuses it.

podSpecPatch: the parts of a pod that mean something for a process on this machine.

Volumes: claims are folders that stay, the rest live as long as a pod.
"""

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from hera_pipelines.local.nodes import Artifact, Outputs
from hera_pipelines.local.pods.artifacts import Bucket
from hera_pipelines.local.pods.process import Command, Surroundings
from tiphys.errors import NotFoundError, UsageError
from tiphys.protocol.compiled_workflow import Manifest

_BEFORE = r"(?:(?<![\w./-])|(?<=file://))"
_AFTER = r"(?![\w.-])"


@dataclass(frozen=True)
class Layout:
    """Maps declared paths to real ones."""

    root: Path
    mounts: Mapping[str, Path]
    """Where each mounted volume lies."""
    paths: tuple[str, ...]
    """Every declared path, volumes included."""
    keep: str = ""
    """Text that is never touched: the URL of the store, which lies where it lies."""

    def real(self, path: str) -> Path:
        """Where a declared path lies here."""
        declared = PurePosixPath(path)
        for mount in sorted(self.mounts, key=len, reverse=True):
            if declared.is_relative_to(mount):
                return self.mounts[mount] / declared.relative_to(mount)
        return self.root / declared.relative_to("/")

    def rewrite(self, text: str) -> str:
        """``text`` with every declared path replaced, longest first, whole path parts only."""
        if not self.paths:
            return text
        choices = "|".join(re.escape(path) for path in sorted(self.paths, key=len, reverse=True))
        kept = f"{re.escape(self.keep)}|" if self.keep else ""
        found = re.compile(f"{kept}{_BEFORE}(?P<path>{choices}){_AFTER}")
        return found.sub(lambda match: str(self.real(match["path"])) if match["path"] else match[0], text)


def declared_paths(template: Manifest) -> Iterator[tuple[str, str]]:
    """(what it is, path) of every path that a template declares."""
    inputs, outputs = template.get("inputs") or {}, template.get("outputs") or {}
    for artifact in inputs.get("artifacts") or []:
        if "path" in artifact:
            yield f"input artifact {artifact['name']}", normal(artifact["path"])
    for artifact in outputs.get("artifacts") or []:
        if "path" in artifact:
            yield f"output artifact {artifact['name']}", normal(artifact["path"])
    for parameter in outputs.get("parameters") or []:
        if "path" in (parameter.get("valueFrom") or {}):
            yield f"output parameter {parameter['name']}", normal(parameter["valueFrom"]["path"])
    for mount in program_of(template).get("volumeMounts") or []:
        yield f"volume {mount['name']}", normal(mount["mountPath"])


def program_of(template: Manifest) -> Manifest:
    """The container or script of a template."""
    program: Manifest = template.get("container") or template.get("script") or {}
    return program


def texts_of(template: Manifest) -> list[str]:
    """Every text of the program in which a path may stand."""
    program = program_of(template)
    values = [str(variable.get("value", "")) for variable in program.get("env") or []]
    return [*program.get("command", []), *program.get("args", []), *values, program.get("source", "")]


def mentions(text: str, path: str) -> bool:
    """Whether ``path`` stands in ``text`` as a whole path."""
    return re.search(f"{_BEFORE}{re.escape(path)}{_AFTER}", text) is not None


def normal(path: str) -> str:
    """``path`` without a final slash."""
    return path.rstrip("/") or "/"


DEFAULT_GRACE_SECONDS = 30.0
"""Kubernetes' own default."""

_PLACEMENT = (
    "nodeSelector",
    "tolerations",
    "affinity",
    "priorityClassName",
    "schedulerName",
    "runtimeClassName",
    "topologySpreadConstraints",
    "serviceAccountName",
    "securityContext",
    "imagePullSecrets",
)
_CONTAINER = ("name", "resources", "image", "imagePullPolicy", "env")


@dataclass(frozen=True)
class PodPatch:
    """What a patch changes here."""

    grace_seconds: float = DEFAULT_GRACE_SECONDS
    environment: dict[str, str] = field(default_factory=dict)


def read_patch(text: str) -> PodPatch:
    """Read a podSpecPatch, JSON or YAML; where a pod is placed and what it may use is ignored.

    Raises:
        UsageError: it is not a document, or holds a field that would change the program.
    """
    patch = _parse(text)
    unknown = [key for key in patch if key not in (*_PLACEMENT, "terminationGracePeriodSeconds", "containers")]
    environment: dict[str, str] = {}
    for container in patch.get("containers") or []:
        if container.get("name") != "main":
            unknown.append(f"containers[{container.get('name')}]")
            continue
        unknown += [f"containers[main].{key}" for key in container if key not in _CONTAINER]
        environment |= {entry["name"]: str(entry.get("value", "")) for entry in container.get("env") or []}
    if unknown:
        raise UsageError(f"podSpecPatch: the local engine cannot honour {', '.join(unknown)}")
    return PodPatch(float(patch.get("terminationGracePeriodSeconds", DEFAULT_GRACE_SECONDS)), environment)


def _parse(text: str) -> dict[str, Any]:
    if not text.strip():
        return {}
    try:
        patch = json.loads(text) if text.lstrip().startswith("{") else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError) as error:
        raise UsageError(f"podSpecPatch is neither JSON nor YAML: {text[:200]!r}") from error
    if not isinstance(patch, dict):
        raise UsageError(f"podSpecPatch is not a map: {text[:200]!r}")
    return patch


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


SOURCES = ("persistentVolumeClaim", "emptyDir")
"""Volume sources that are understood."""


@dataclass(frozen=True)
class Volumes:
    """The volumes that one workflow can mount.

    A named claim is shared by all workflows of the state folder; one made from
    ``volumeClaimTemplates`` belongs to its workflow.
    """

    manifest: Manifest
    state: Path

    def of(self, template: Manifest) -> Mapping[str, Path | None]:
        """Folder of each volume that ``template`` sees; None for an emptyDir, which every pod has anew."""
        spec = self.manifest["spec"]
        claimed = [claim["metadata"]["name"] for claim in spec.get("volumeClaimTemplates") or []]
        own = {name: self._folder(self.manifest["metadata"]["name"]) / name for name in claimed}
        declared = [*(spec.get("volumes") or []), *(template.get("volumes") or [])]
        return own | {volume["name"]: self._source(volume) for volume in declared}

    def _source(self, volume: Manifest) -> Path | None:
        claim = volume.get("persistentVolumeClaim")
        return self._folder(claim["claimName"]) if claim else None

    def _folder(self, name: str) -> Path:
        return self.state / "volumes" / name

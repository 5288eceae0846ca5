"""Files, paths and volumes of one attempt of a pod.

Every attempt has its own folder. A path that the template declares (an artifact,
an output, a mounted volume) is mapped into this folder, and replaced in the
command, the arguments, the environment and the source. A program with such a path
built in cannot be redirected, so `supported` refuses its template. Volume claims
are folders that persist; other volumes exist as long as their pod. Of a
podSpecPatch, only the grace period and the environment apply to a process.
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

from hera_pipelines.local.nodes import Artifact, WorkflowNodeOutputs
from hera_pipelines.local.pods.artifacts import ArtifactBucket
from hera_pipelines.local.pods.process import ProcessCommand, ProcessEnvironment
from tiphys.errors import NotFoundError, UsageError
from tiphys.protocol import environment
from tiphys.protocol.compiled_workflow import Manifest

_PATH_START = r"(?:(?<![\w./-])|(?<=file://))"
_PATH_END = r"(?![\w.-])"


@dataclass(frozen=True)
class PathMapping:
    """Maps declared paths of a container to paths on this machine."""

    root: Path
    mounts: Mapping[str, Path]
    """Folder of each mounted volume, by mount path."""
    paths: tuple[str, ...]
    """Every declared path, volumes included."""
    protected_text: str = ""
    """Text that is never rewritten: the URL of the store, which is a path on this machine already."""

    def host_path(self, path: str) -> Path:
        """Path on this machine of a declared path."""
        declared = PurePosixPath(path)
        for mount in sorted(self.mounts, key=len, reverse=True):
            if declared.is_relative_to(mount):
                return self.mounts[mount] / declared.relative_to(mount)
        return self.root / declared.relative_to("/")

    def rewrite_paths(self, text: str) -> str:
        """Replace every declared path in ``text``, longest first, as whole path components."""
        if not self.paths:
            return text
        choices = "|".join(re.escape(path) for path in sorted(self.paths, key=len, reverse=True))
        protected = f"{re.escape(self.protected_text)}|" if self.protected_text else ""
        pattern = re.compile(f"{protected}{_PATH_START}(?P<path>{choices}){_PATH_END}")
        return pattern.sub(lambda match: str(self.host_path(match["path"])) if match["path"] else match[0], text)


def declared_paths(template: Manifest) -> Iterator[tuple[str, str]]:
    """Yield a description and the path of every path that a template declares."""
    inputs, outputs = template.get("inputs") or {}, template.get("outputs") or {}
    for artifact in inputs.get("artifacts") or []:
        if "path" in artifact:
            yield f"input artifact {artifact['name']}", normalize_path(artifact["path"])
    for artifact in outputs.get("artifacts") or []:
        if "path" in artifact:
            yield f"output artifact {artifact['name']}", normalize_path(artifact["path"])
    for parameter in outputs.get("parameters") or []:
        if "path" in (parameter.get("valueFrom") or {}):
            yield f"output parameter {parameter['name']}", normalize_path(parameter["valueFrom"]["path"])
    for mount in container_or_script(template).get("volumeMounts") or []:
        yield f"volume {mount['name']}", normalize_path(mount["mountPath"])


def container_or_script(template: Manifest) -> Manifest:
    """The container or script of a template; empty for other types."""
    program: Manifest = template.get("container") or template.get("script") or {}
    return program


def program_texts(template: Manifest) -> list[str]:
    """All texts of the program that may contain a path."""
    program = container_or_script(template)
    values = [str(variable.get("value", "")) for variable in program.get("env") or []]
    return [*program.get("command", []), *program.get("args", []), *values, program.get("source", "")]


def mentions_path(text: str, path: str) -> bool:
    """Whether ``text`` contains ``path`` as a whole path."""
    return re.search(f"{_PATH_START}{re.escape(path)}{_PATH_END}", text) is not None


def normalize_path(path: str) -> str:
    """Return ``path`` without a trailing slash."""
    return path.rstrip("/") or "/"


DEFAULT_GRACE_SECONDS = 30.0
"""Default of Kubernetes' ``terminationGracePeriodSeconds``."""

_PLACEMENT_FIELDS = (
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
_CONTAINER_FIELDS = ("name", "resources", "image", "imagePullPolicy", "env")


@dataclass(frozen=True)
class PodPatch:
    """The parts of a podSpecPatch that apply to a process."""

    grace_seconds: float = DEFAULT_GRACE_SECONDS
    environment: dict[str, str] = field(default_factory=dict)


def parse_pod_spec_patch(text: str) -> PodPatch:
    """Parse a podSpecPatch in JSON or YAML; placement and resources are ignored.

    Raises:
        UsageError: the text is not a document, or has a field that would change the program.
    """
    patch = _parse_document(text)
    unknown = [key for key in patch if key not in (*_PLACEMENT_FIELDS, "terminationGracePeriodSeconds", "containers")]
    environment: dict[str, str] = {}
    for container in patch.get("containers") or []:
        if container.get("name") != "main":
            unknown.append(f"containers[{container.get('name')}]")
            continue
        unknown += [f"containers[main].{key}" for key in container if key not in _CONTAINER_FIELDS]
        environment |= {entry["name"]: str(entry.get("value", "")) for entry in container.get("env") or []}
    if unknown:
        raise UsageError(f"podSpecPatch: the local engine does not support {', '.join(unknown)}")
    return PodPatch(float(patch.get("terminationGracePeriodSeconds", DEFAULT_GRACE_SECONDS)), environment)


def _parse_document(text: str) -> dict[str, Any]:
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
# Control sequences of a program must not change the terminal that shows its last log lines.
_TERMINAL_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\].*?(?:\x07|\x1b\\)|[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_RESULT_BYTES = 256 << 10  # Argo's limit for outputs.result


@dataclass(frozen=True)
class LocalPod:
    """One pod to run. All variables of ``template`` are substituted."""

    name: str
    namespace: str
    workflow: str
    workflow_uid: str
    node: str
    template: Manifest
    volumes: Mapping[str, Path | None]
    """Folder of each volume of the workflow; None for a volume that exists as long as the pod."""
    on_exit: bool = False
    timeout_seconds: float | None = None
    """Time after which the pod is ended; None for no limit."""
    wants_result: bool = False
    """Whether the standard output becomes ``outputs.result``."""
    rank: int | None = None
    """Rank in its gang; None outside a gang."""

    @property
    def labels(self) -> dict[str, str]:
        return dict((self.template.get("metadata") or {}).get("labels") or {})

    def artifacts(self, side: str) -> list[Artifact]:
        """Declared artifacts of ``inputs`` or ``outputs``."""
        return (self.template.get(side) or {}).get("artifacts") or []


@dataclass(frozen=True)
class PodFiles:
    """The files of ``pod`` in the engine's state folder. Its calls block, so do not use it in the event loop."""

    pod: LocalPod
    state: Path
    bucket: ArtifactBucket
    process_environment: ProcessEnvironment

    @property
    def folder(self) -> Path:
        return self.state / "pods" / self.pod.name

    @property
    def log_path(self) -> Path:
        """File with the output of the program."""
        return pod_log_path(self.state, self.pod.name)

    @cached_property
    def path_mapping(self) -> PathMapping:
        """Mapping of the declared paths."""
        mounts = container_or_script(self.pod.template).get("volumeMounts") or []
        return PathMapping(
            root=self.folder / "root",
            mounts={normalize_path(mount["mountPath"]): self._mount_folder(mount) for mount in mounts},
            paths=tuple(path for _, path in declared_paths(self.pod.template)),
            protected_text=self.process_environment.store_url,
        )

    def prepare(self) -> None:
        """Create the folders, fetch the inputs and write the script.

        Raises:
            NotFoundError: a required input does not exist.
            StoreError: storage is unavailable or refuses.
        """
        self.process_environment.prepare_working_folder(self.folder / "work")
        for mount in self.path_mapping.mounts.values():
            mount.mkdir(parents=True, exist_ok=True)
        for path in self.path_mapping.paths:
            self.path_mapping.host_path(path).parent.mkdir(parents=True, exist_ok=True)
        for artifact in self.pod.artifacts("inputs"):
            if "s3" in artifact or "raw" in artifact:
                self._fetch(artifact)
        if source := container_or_script(self.pod.template).get("source"):
            (self.folder / "script").write_text(self.path_mapping.rewrite_paths(source))

    def build_command(self, patch: PodPatch) -> ProcessCommand:
        """Build the command that starts the program."""
        program = container_or_script(self.pod.template)
        rewrite = self.path_mapping.rewrite_paths
        declared = {variable["name"]: rewrite(str(variable.get("value", ""))) for variable in program.get("env") or []}
        arguments = [rewrite(part) for part in [*program.get("command", []), *(program.get("args") or [])]]
        if program.get("source"):
            arguments.append(str(self.folder / "script"))
        return ProcessCommand(
            arguments=self.process_environment.build_command(arguments),
            environment=self.process_environment.build_environment(declared | patch.environment),
            folder=self.folder / "work",
            log=self.log_path,
            stdout=self._stdout_path if self.pod.wants_result else None,
        )

    def store_outputs(self, exit_code: str) -> WorkflowNodeOutputs:
        """Store the declared outputs and return them.

        Raises:
            NotFoundError: the program did not write a required output.
            StoreError: storage is unavailable or refuses.
        """
        declared = (self.pod.template.get("outputs") or {}).get("parameters") or []
        parameters = {parameter["name"]: self._read_parameter(parameter) for parameter in declared}
        saved = [
            artifact for artifact in map(self._with_default_key, self.pod.artifacts("outputs")) if self._save(artifact)
        ]
        return WorkflowNodeOutputs(
            parameters, {artifact["name"]: artifact for artifact in saved}, self._read_result(), exit_code
        )

    def discard(self) -> None:
        """Remove the files of a successful attempt, so that data sets and models are not stored twice."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def read_log_tail(self) -> tuple[str, ...]:
        """Last lines of the log, limited in number and length, without terminal control sequences."""
        try:
            with self.log_path.open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
                text = log.read().decode(errors="replace")
        except FileNotFoundError:
            return ()
        lines = text.removesuffix("\n").split("\n")[-_TAIL_LINES:] if text else []
        return tuple(_TERMINAL_CONTROL.sub("", line)[:_LINE_CHARACTERS] for line in lines)

    def follow_messages(self) -> Iterator[list[str]]:
        """Yield, again and again, the messages of Tiphys that the log has got since the last time."""
        position, part = 0, b""
        while True:
            try:
                with self.log_path.open("rb") as log:
                    log.seek(position)
                    data = log.read(_TAIL_BYTES)
            except OSError:
                data = b""
            position += len(data)
            *lines, part = (part + data).split(b"\n")
            part = part[-_TAIL_BYTES:]
            yield [
                line.decode(errors="replace").removeprefix(environment.LOG_PREFIX)[:_LINE_CHARACTERS]
                for line in lines
                if line.startswith(environment.LOG_PREFIX.encode())
            ]

    @property
    def _stdout_path(self) -> Path:
        return self.folder / "stdout"

    def _mount_folder(self, mount: Manifest) -> Path:
        base = self.pod.volumes.get(mount["name"]) or self.folder / "volumes" / mount["name"]
        return base / mount["subPath"] if mount.get("subPath") else base

    def _fetch(self, artifact: Artifact) -> None:
        try:
            self.bucket.fetch(artifact, self.path_mapping.host_path(normalize_path(artifact["path"])))
        except NotFoundError:
            if not artifact.get("optional"):
                raise

    def _with_default_key(self, artifact: Artifact) -> Artifact:
        """Add Argo's default key to an artifact without one."""
        own = {"key": f"{self.pod.workflow}/{self.pod.name}/{artifact['name']}"}
        return {**artifact, "s3": artifact.get("s3") or own}

    def _save(self, artifact: Artifact) -> bool:
        source = self.path_mapping.host_path(normalize_path(artifact["path"]))
        if source.exists():
            self.bucket.save(artifact, source)
            return True
        if artifact.get("optional"):
            return False
        raise NotFoundError(f"output artifact {artifact['name']}: no such file or directory: {artifact['path']}")

    def _read_parameter(self, declared: Manifest) -> str:
        source = declared.get("valueFrom") or {}
        path = self.path_mapping.host_path(normalize_path(source["path"]))
        if path.is_file():
            return _read_text(path, declared["name"])
        if "default" in source:
            return str(source["default"])
        raise NotFoundError(f"output parameter {declared['name']}: no such file: {source['path']}")

    def _read_result(self) -> str | None:
        if not self.pod.wants_result:
            return None
        with self._stdout_path.open("rb") as stdout, self.log_path.open("ab") as log:
            result = stdout.read(_RESULT_BYTES)
            log.write(result)
            shutil.copyfileobj(stdout, log)
        return result.decode(errors="replace").removesuffix("\n")


def _read_text(path: Path, parameter: str) -> str:
    try:
        return path.read_text(encoding="utf-8").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise UsageError(f"output parameter {parameter} is not UTF-8 text; declare it as an artifact") from error


def pod_log_path(state: Path, pod: str) -> Path:
    """Path of the log file of ``pod``."""
    return state / "logs" / f"{pod}.log"


VOLUME_SOURCES = ("persistentVolumeClaim", "emptyDir")
"""Supported volume sources."""


@dataclass(frozen=True)
class WorkflowVolumes:
    """Folders of the volumes of one workflow.

    A named claim is shared by all workflows of the state folder; a claim from
    ``volumeClaimTemplates`` belongs to its workflow.
    """

    manifest: Manifest
    state: Path

    def folders_for(self, template: Manifest) -> Mapping[str, Path | None]:
        """Folder of each volume that ``template`` can mount; None for an emptyDir, which each pod creates."""
        spec = self.manifest["spec"]
        claimed = [claim["metadata"]["name"] for claim in spec.get("volumeClaimTemplates") or []]
        own = {name: self._folder(self.manifest["metadata"]["name"]) / name for name in claimed}
        declared = [*(spec.get("volumes") or []), *(template.get("volumes") or [])]
        return own | {volume["name"]: self._claim_folder(volume) for volume in declared}

    def _claim_folder(self, volume: Manifest) -> Path | None:
        claim = volume.get("persistentVolumeClaim")
        return self._folder(claim["claimName"]) if claim else None

    def _folder(self, name: str) -> Path:
        return self.state / "volumes" / name

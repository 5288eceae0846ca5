"""Files, paths and volumes of one attempt of a pod.

Every attempt has its own folder, in which the paths that the template declares have
their files; `pod_paths` makes the program find them there. Volume claims are folders
that persist; other volumes exist as long as their pod. Of a podSpecPatch, only the
grace period and the environment apply to a process.
"""

import json
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from hera_pipelines.local.nodes import Artifact, WorkflowNodeOutputs
from hera_pipelines.local.pods.artifacts import ArtifactBucket
from hera_pipelines.local.pods.pod_paths import (
    Mount,
    PathMapping,
    container_or_script,
    declared_paths,
    find_conflict,
    folder_views,
    namespace_refusal,
    normalize_path,
    plan_mounts,
    unmentioned_paths,
    write_plan,
)
from hera_pipelines.local.pods.process import ProcessCommand, ProcessEnvironment
from tiphys.errors import NotFoundError, UsageError
from tiphys.protocol import environment
from tiphys.protocol.compiled_workflow import Manifest
from tiphys.service.yaml_documents import UNREADABLE_YAML

DEFAULT_GRACE_SECONDS = 30.0
"""Default of Kubernetes' ``terminationGracePeriodSeconds``."""

PLACEMENT_FIELDS = {
    "affinity",
    "automountServiceAccountToken",
    "nodeSelector",
    "priorityClassName",
    "schedulerName",
    "securityContext",
    "serviceAccountName",
    "tolerations",
}
"""Fields of a pod about its place and its permissions, which have no meaning on one machine."""
_PATCH_FIELDS = PLACEMENT_FIELDS | {
    "containers",
    "imagePullSecrets",
    "runtimeClassName",
    "terminationGracePeriodSeconds",
    "topologySpreadConstraints",
}
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
    unknown = [key for key in patch if key not in _PATCH_FIELDS]
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
    except UNREADABLE_YAML as error:
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
_INSTALLATION = (Path(sys.prefix), Path(sys.base_prefix), Path(__file__).parents[3])
_TEMPORARY_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")  # noqa: S108  what a program leaves here is not missed


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
        mounts = container_or_script(self.pod.template).get("volumeMounts") or []
        return PathMapping(
            root=self.folder / "root",
            mounts={normalize_path(mount["mountPath"]): self._mount_folder(mount) for mount in mounts},
            paths=tuple(dict.fromkeys(path for _, path in declared_paths(self.pod.template))),
            protected_text=self.process_environment.store_url,
        )

    @cached_property
    def namespace_refusal(self) -> str:
        """Why the program gets no mount namespace, so that declared paths are replaced; empty if it gets one."""
        if not self.path_mapping.paths:
            return ""
        url = self.process_environment.store_url
        store = [Path(url.removeprefix("file://"))] if url.startswith("file://") else []
        needed = (self.process_environment.code, *_INSTALLATION)
        conflict = find_conflict(self.path_mapping, needed, [self.state, *store])
        return f"{conflict[0]} would hide {conflict[1]}, which the step needs" if conflict else namespace_refusal()

    def prepare(self) -> None:
        """Create the folders, fetch the inputs and write the script.

        Raises:
            NotFoundError: a required input does not exist.
            StoreError: storage is unavailable or refuses.
        """
        self._check_replaceable()
        self.process_environment.prepare_working_folder(self.folder / "work")
        for mount in self.path_mapping.mounts.values():
            mount.mkdir(parents=True, exist_ok=True)
        for path in self.path_mapping.paths:
            self.path_mapping.host_path(path).parent.mkdir(parents=True, exist_ok=True)
        for artifact in self.pod.artifacts("inputs"):
            if "s3" in artifact or "raw" in artifact:
                self._fetch(artifact)
        if source := container_or_script(self.pod.template).get("source"):
            (self.folder / "script").write_text(self._rewrite(source))
        if self._mounts:
            for view in self._views:
                folder = self._folder_in_root(view)
                folder.mkdir(parents=True, exist_ok=True)
                folder.chmod(Path(view).stat().st_mode & 0o7777 | 0o700)
            write_plan(self._mounts, self.folder / "namespace", self.folder / "mounts")

    def build_command(self, patch: PodPatch) -> ProcessCommand:
        """Build the command that starts the program."""
        program = container_or_script(self.pod.template)
        rewrite = self._rewrite
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
            mounts=self.folder / "mounts" if self._mounts else None,
        )

    def remove_mount_points(self) -> list[str]:
        """Remove the mount points of the program that ended; return what it wrote beside its declared paths."""
        if not self._mounts:
            return []
        own, undeclared = self.path_mapping.paths, []
        mounted = {mount.target for mount in self._mounts if mount.is_machine}
        for view in self._views:
            folder = self._folder_in_root(view)
            for entry in folder.iterdir() if folder.is_dir() else ():
                path = str(Path(view) / entry.name)
                if path in mounted:
                    with suppress(OSError):
                        (entry.rmdir if entry.is_dir() and not entry.is_symlink() else entry.unlink)()
                elif view not in _TEMPORARY_FOLDERS and not any(Path(other).is_relative_to(path) for other in own):
                    undeclared.append(path)
        return sorted(undeclared)

    def list_lost_properties(self) -> list[str]:
        """What storage does not keep of the output artifacts: executable files are plain ones, empty folders gone."""
        lost = []
        for artifact in self.pod.artifacts("outputs"):
            source = self.path_mapping.host_path(normalize_path(artifact["path"]))
            for path in (source, *sorted(source.rglob("*"))):
                name = str(Path(artifact["path"], path.relative_to(source)))
                if path.is_dir() and not any(path.iterdir()):
                    lost.append(f"{name!r} is an empty folder")
                elif path.is_file() and path.stat().st_mode & 0o111:
                    lost.append(f"{name!r} is executable")
        return lost

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

    @cached_property
    def _views(self) -> list[str]:
        return folder_views(self.path_mapping)

    @cached_property
    def _mounts(self) -> list[Mount]:
        has_namespace = self.path_mapping.paths and not self.namespace_refusal
        return plan_mounts(self.path_mapping, self._views) if has_namespace else []

    def _rewrite(self, text: str) -> str:
        return self.path_mapping.rewrite_paths(text) if self.namespace_refusal else text

    def _folder_in_root(self, path: str) -> Path:
        return self.path_mapping.root / path.lstrip("/")

    def _check_replaceable(self) -> None:
        if self.namespace_refusal and (missing := next(unmentioned_paths(self.pod.template), None)):
            description, path = missing
            raise UsageError(
                f"{description}: {path} cannot be a path of the step alone ({self.namespace_refusal}), and no command, "
                "argument, variable or source contains it, to replace it there; pass it as an argument"
            )

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
        raise NotFoundError(f"output parameter {declared['name']}: no such file or directory: {source['path']}")

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

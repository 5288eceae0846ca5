"""Checks the artifact repository in which Argo keeps the declared outputs of steps. Pure.

Argo uses the default repository of the workflow's namespace, otherwise that of its controller (Argo Workflows,
"Artifact Repository Ref"). Tiphys verifies the outputs in the store of the run, so both must use one bucket.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

import yaml

from tiphys.kube import Object
from tiphys.service.yaml_documents import UNREADABLE_YAML
from tiphys_controller.doctor.check import Finding, UnknownValue, check, failed, known, passed, warning
from tiphys_controller.doctor.observed import WorkflowNamespace

ARTIFACT_CONFIG_MAP = "artifact-repositories"
_DEFAULT_ANNOTATION = "workflows.argoproj.io/default-artifact-repository"
_CONTROLLER_SETTING = "artifactRepository"
_REMEDY = "see 'The artifact repository of Argo' in docs/install.md"
# By the scheme of a store's URL: the kind of repository, its field, and what both are called.
_KINDS = {
    "s3": ("s3", "bucket", "S3 bucket"),
    "gs": ("gcs", "bucket", "bucket of Google Cloud Storage (gcs)"),
    "az": ("azure", "container", "container of Azure (azure)"),
}
_UNIQUE_TAGS = ("{{pod.name}}", "{{ pod.name }}")


@dataclass(frozen=True)
class ArtifactRepository:
    """A default artifact repository. ``origin`` names the object that declares it."""

    origin: str
    store_url: str
    """Store of the runs of the namespace."""
    bucket: str = ""
    """Bucket or container; empty for a repository of another kind than the store, or one that cannot be read."""
    key_format: str = ""
    endpoint: str = ""
    """URL of the account of Azure."""


def read_artifact_repository(
    config_map: Object | None, controller_settings: Mapping[str, str], store_url: str
) -> ArtifactRepository | None:
    """The default repository of a namespace; None if neither its ConfigMap nor Argo's controller declares one."""
    annotations = ((config_map or {}).get("metadata") or {}).get("annotations") or {}
    name = annotations.get(_DEFAULT_ANNOTATION, "")
    if config_map is not None and name:
        return _parse_repository(
            f"{name!r} of ConfigMap {ARTIFACT_CONFIG_MAP}", (config_map.get("data") or {}).get(name, ""), store_url
        )
    if text := controller_settings.get(_CONTROLLER_SETTING, ""):
        return _parse_repository(f"{_CONTROLLER_SETTING} of Argo's controller", text, store_url)
    return None


def _parse_repository(origin: str, text: str, store_url: str) -> ArtifactRepository:
    try:
        document = yaml.safe_load(text)
    except UNREADABLE_YAML:
        document = None
    kind, field, _ = _KINDS[urlsplit(store_url).scheme]
    found = document.get(kind) if isinstance(document, dict) else None
    if not isinstance(found, dict):
        return ArtifactRepository(origin, store_url)
    bucket, key_format, endpoint = (str(found.get(name) or "") for name in (field, "keyFormat", "endpoint"))
    return ArtifactRepository(origin, store_url, bucket, key_format, endpoint)


@check("artifacts")
def check_artifact_repository(
    namespace: WorkflowNamespace, controller_settings: Mapping[str, str] | UnknownValue
) -> Iterator[Finding]:
    """Findings about the default repository of a namespace whose store is in a bucket."""
    settings = known(namespace.artifact_settings)
    if settings is None:
        return
    declared = {} if isinstance(controller_settings, UnknownValue) else controller_settings
    repository = read_artifact_repository(settings.config_map, declared, settings.store_url)
    if repository is not None:
        yield _judge_repository(repository)
    elif known(controller_settings) is not None:
        yield warning(
            "there is no default artifact repository, so every step with an artifact ends in Error; steps with "
            "parameters only work",
            _REMEDY,
        )


def _judge_repository(repository: ArtifactRepository) -> Finding:
    store = urlsplit(repository.store_url)
    bucket, prefix = store.netloc, store.path.strip("/")
    _, field, kind = _KINDS[store.scheme]
    if store.scheme == "az":
        bucket, _, prefix = prefix.partition("/")
    if not repository.bucket:
        return failed(f"{repository.origin} names no {kind}, so no step with an artifact works", _REMEDY)
    account = (urlsplit(repository.endpoint).hostname or "").partition(".")[0]
    if repository.bucket != bucket or (store.scheme == "az" and account != store.netloc):
        place = f"{repository.bucket} of {repository.endpoint}" if store.scheme == "az" else repository.bucket
        right = f"{bucket} of account {store.netloc}" if store.scheme == "az" else bucket
        return failed(
            f"{repository.origin} keeps artifacts in {field} {place}, and the store of the runs is "
            f"{repository.store_url}: no output of a step is found",
            f"name the {field} {right}; {_REMEDY}",
        )
    if problem := _find_key_format_problem(repository.key_format, prefix):
        return warning(f"keyFormat {repository.key_format!r} of {repository.origin}: {problem}", _REMEDY)
    return passed(f"Argo keeps artifacts in {field} {repository.bucket} ({repository.origin})")


def _find_key_format_problem(key_format: str, store_prefix: str) -> str:
    """What is wrong with the keys of plain tasks' artifacts and archived logs; empty if nothing is."""
    if not key_format:  # Argo's own: {{workflow.name}}/{{pod.name}}
        return ""
    if key_format.count("{{") != key_format.count("}}"):
        return "its braces do not match, so Argo puts artifacts under this text"
    if store_prefix and key_format.startswith(f"{store_prefix}/control/"):
        return "it lies below control/ of the store, which programs may not write"
    if not any(tag in key_format for tag in _UNIQUE_TAGS):
        return "it lacks {{pod.name}}, so artifacts of plain tasks overwrite each other"
    return ""

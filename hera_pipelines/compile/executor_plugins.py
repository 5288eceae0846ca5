"""Puts an executor plugin into a Workflow, for a cluster whose Argo has no such plugin installed.

Argo 4.1 reads it from ``spec.executorPlugins`` if its controller runs with
``ARGO_WORKFLOW_LEVEL_EXECUTOR_PLUGINS=true``; it then replaces all plugins of
the cluster. The chart installs the same plugin as a ConfigMap, so this module
reads both forms (Argo, ``workflow/util/plugin/configmap.go``).
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from tiphys.errors import UsageError, yaml_error_message
from tiphys.protocol.compiled_workflow import Manifest
from tiphys.service.yaml_documents import UNREADABLE_YAML

_CONFIG_MAP_SUFFIX = "-executor-plugin"
_REQUIRED_FIELDS: dict[str, Callable[[Manifest], object]] = {
    "a port": lambda container: container.get("ports"),
    "resources.requests": lambda container: (container.get("resources") or {}).get("requests") is not None,
    "resources.limits": lambda container: (container.get("resources") or {}).get("limits") is not None,
    "a securityContext": lambda container: container.get("securityContext") is not None,
}
"""Without these Argo creates no agent pod (``pkg/plugins/spec``), and no step reports why."""


def parse_executor_plugin(document: Mapping[str, Any]) -> Manifest:
    """Convert an ExecutorPlugin, or its ConfigMap, to an entry of ``spec.executorPlugins``.

    Raises:
        UsageError: the document is neither, or has no field that Argo requires.
    """
    name, sidecar = _from_config_map(document) if document.get("kind") == "ConfigMap" else _from_plugin(document)
    container = sidecar.get("container")
    if not name or not isinstance(container, dict):
        raise UsageError(
            "the executor plugin has no name or no container; give the ConfigMap tiphys-executor-plugin that the chart "
            "installs, or an ExecutorPlugin"
        )
    if missing := [field for field, value_of in _REQUIRED_FIELDS.items() if not value_of(container)]:
        raise UsageError(f"executor plugin {name!r}: its container lacks {missing[0]}, which Argo requires; add it")
    return {"metadata": {"name": name}, "spec": {"sidecar": sidecar}}


def read_executor_plugin(file: Path) -> Manifest:
    """Read the one executor plugin from the YAML documents of ``file``, such as the output of ``helm template``.

    Raises:
        UsageError: the file cannot be read, or holds no or several executor plugins.
    """
    try:
        documents = list(yaml.safe_load_all(file.read_text()))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UsageError(f"cannot read the executor plugin from {file}: {reason}") from error
    except UNREADABLE_YAML as error:
        raise UsageError(yaml_error_message(f"executor plugin {file}", error)) from error
    plugins = list(_find_plugins(documents))
    if len(plugins) != 1:
        raise UsageError(
            f"{file} holds {len(plugins) or 'no'} executor plugin{'s' if len(plugins) > 1 else ''}; "
            "give a file with one ExecutorPlugin, or its ConfigMap"
        )
    return plugins[0]


def _find_plugins(documents: Iterable[Any]) -> Iterable[Manifest]:
    for document in documents:
        if isinstance(document, dict) and (
            document.get("kind") == "ExecutorPlugin"
            or (document.get("kind") == "ConfigMap" and "sidecar.container" in (document.get("data") or {}))
        ):
            yield document


def _from_plugin(document: Mapping[str, Any]) -> tuple[str, Manifest]:
    sidecar = (document.get("spec") or {}).get("sidecar") or {}
    return (document.get("metadata") or {}).get("name", ""), dict(sidecar)


def _from_config_map(document: Mapping[str, Any]) -> tuple[str, Manifest]:
    data = document.get("data") or {}
    try:
        container = yaml.safe_load(data.get("sidecar.container", ""))
    except UNREADABLE_YAML as error:
        raise UsageError(f"the executor plugin's key sidecar.container is not YAML: {error}") from error
    sidecar: Manifest = {"container": container}
    if data.get("sidecar.automountServiceAccountToken") == "true":
        sidecar["automountServiceAccountToken"] = True
    return str((document.get("metadata") or {}).get("name", "")).removesuffix(_CONFIG_MAP_SUFFIX), sidecar

"""An executor plugin that a Workflow brings along, for an Argo that is not set up with it.

Argo 4.1 takes it from ``spec.executorPlugins`` if its controller runs with
``ARGO_WORKFLOW_LEVEL_EXECUTOR_PLUGINS=true``; it then replaces all plugins that
the cluster has. The chart installs the same plugin as a ConfigMap, so that both
forms are read here (Argo, ``workflow/util/plugin/configmap.go``).
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from tiphys.errors import UsageError
from tiphys.protocol.compiled_workflow import Manifest

_SUFFIX = "-executor-plugin"
_MANDATORY: dict[str, Callable[[Manifest], object]] = {
    "a port": lambda container: container.get("ports"),
    "resources.requests": lambda container: (container.get("resources") or {}).get("requests") is not None,
    "resources.limits": lambda container: (container.get("resources") or {}).get("limits") is not None,
    "a securityContext": lambda container: container.get("securityContext") is not None,
}
"""Argo creates no agent pod without these (``pkg/plugins/spec``), and no step would say why."""


def executor_plugin(document: Mapping[str, Any]) -> Manifest:
    """An entry of ``spec.executorPlugins`` from an ExecutorPlugin or from its ConfigMap.

    Raises:
        UsageError: the document is neither, or lacks what Argo demands.
    """
    name, sidecar = _from_config_map(document) if document.get("kind") == "ConfigMap" else _from_plugin(document)
    container = sidecar.get("container")
    if not name or not isinstance(container, dict):
        raise UsageError(
            "the executor plugin has no name or no container; give the ConfigMap tiphys-executor-plugin that the chart "
            "installs, or an ExecutorPlugin"
        )
    if missing := [what for what, given in _MANDATORY.items() if not given(container)]:
        raise UsageError(f"executor plugin {name!r}: its container has no {missing[0]}, which Argo demands; add it")
    return {"metadata": {"name": name}, "spec": {"sidecar": sidecar}}


def read_executor_plugin(file: Path) -> Manifest:
    """The executor plugin among the YAML documents of ``file``, such as what ``helm template`` prints.

    Raises:
        UsageError: the file cannot be read, or holds none, or several.
    """
    try:
        documents = list(yaml.safe_load_all(file.read_text()))
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not YAML"
        raise UsageError(f"cannot read the executor plugin from {file}: {reason}") from error
    found = list(_plugins(documents))
    if len(found) != 1:
        raise UsageError(
            f"{file} holds {len(found) or 'no'} executor plugin{'s' if len(found) > 1 else ''}; "
            "give a file with one ExecutorPlugin, or its ConfigMap"
        )
    return found[0]


def _plugins(documents: Iterable[Any]) -> Iterable[Manifest]:
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
    except yaml.YAMLError as error:
        raise UsageError(f"the executor plugin's key sidecar.container is not YAML: {error}") from error
    sidecar: Manifest = {"container": container}
    if data.get("sidecar.automountServiceAccountToken") == "true":
        sidecar["automountServiceAccountToken"] = True
    return str((document.get("metadata") or {}).get("name", "")).removesuffix(_SUFFIX), sidecar

"""The chart as `helm` renders it: documents to look at, or the sentence with which it refuses."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[3]
CHART = ROOT / "charts" / "tiphys"
CI_VALUES = sorted((CHART / "ci").glob("*-values.yaml"))
DASHBOARDS = sorted((CHART / "dashboards").glob("*.json"))
MINIMAL = ("store.url=s3://ml-runs/tiphys", "image.repository=registry.example.com/tiphys")

Object = dict[str, Any]


class Refused(Exception):  # noqa: N818  what helm says, not a failure of the test
    """Helm did not render the chart; the text is its own."""


def dashboard_expressions() -> Iterator[str]:
    """The queries of all panels, with a value in the place of Grafana's variables."""
    for file in DASHBOARDS:
        for panel in json.loads(file.read_text())["panels"]:
            yield from (target["expr"].replace("$run", "digits-.*") for target in panel["targets"])


def find_helm() -> str:
    """The `helm` command on PATH, or in the cache of the test cluster; empty if there is none."""
    cache_folder = os.environ.get("TIPHYS_CLUSTER_CACHE", "~/.cache/tiphys-cluster")
    return shutil.which("helm") or shutil.which("helm", path=str(Path(cache_folder).expanduser() / "bin")) or ""


def helm(*arguments: str | Path, timeout: float = 300) -> str:
    """Output of a `helm` command.

    Raises:
        Refused: with what it said.
    """
    command = [find_helm(), *map(str, arguments)]
    # Without the proxies and the kubeconfig of a person's shell.
    environ = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False, env=environ)
    if done.returncode:
        raise Refused(done.stderr or done.stdout)
    return done.stdout


@cache
def render(
    *values: str, file: Path | None = None, namespace: str = "system", release: str = "ours"
) -> Sequence[Object]:
    """All documents that `helm template` makes; ``values`` are as after ``--set``. Leave them as they are."""
    arguments = ["template", release, CHART, "--namespace", namespace]
    arguments += ["--values", file] if file else []
    text = helm(*arguments, *(part for value in values for part in ("--set", value)))
    return [document for document in yaml.load_all(text, yaml.CSafeLoader) if document]


def of_kind(objects: Sequence[Object], *kinds: str) -> list[Object]:
    return [one for one in objects if one["kind"] in kinds]


def named(objects: Sequence[Object], kind: str, name: str, namespace: str = "system") -> Object:
    """The one object of this kind, name and namespace."""
    [found] = [o for o in of_kind(objects, kind) if key(o) == (kind, namespace, name)]
    return found


def key(one: Object) -> tuple[str, str, str]:
    """Kind, namespace (empty where there is none) and name."""
    return one["kind"], one["metadata"].get("namespace", ""), one["metadata"]["name"]


def pod_specs(objects: Sequence[Object]) -> Iterator[tuple[str, Object]]:
    """The name and pod spec of everything that makes pods; the sidecar as Argo puts it into its own pod."""
    for one in objects:
        if one["kind"] == "Pod":
            yield one["metadata"]["name"], one["spec"]
        elif one["kind"] == "Deployment":
            yield one["metadata"]["name"], one["spec"]["template"]["spec"]
        elif container := one.get("data", {}).get("sidecar.container"):
            yield "sidecar", {**ARGO_AGENT_POD, "containers": [yaml.safe_load(container)]}


ARGO_AGENT_POD: Mapping[str, Any] = {
    "automountServiceAccountToken": False,
    "securityContext": {"runAsNonRoot": True, "runAsUser": 8737, "seccompProfile": {"type": "RuntimeDefault"}},
}
"""What Argo gives its agent pod (``workflow/common/pod_security.go``, ``MinimalPodSC``)."""

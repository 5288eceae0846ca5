"""What the story has to be told about the cluster it meets: variables of the environment, and nothing else.

| variable | meaning |
|---|---|
| KUBECONFIG | the cluster; it has Argo Workflows, and Tiphys installed by its chart |
| TIPHYS_ARGO_NAMESPACE | one of the chart's ``namespaces``, in which the story runs (default ``ml``) |
| TIPHYS_ARGO_SYSTEM_NAMESPACE | namespace of the release (default ``tiphys``) |
| TIPHYS_ARGO_STORE | URL of that namespace's run store (default ``s3://artifacts/tiphys``) |
| TIPHYS_ARGO_IMAGE | image with Python and ``tiphys[numpy]`` for the programs |
| AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, … | how this process reaches the run store |
| TIPHYS_ARGO_MODE | ``sidecar`` (default) or ``agent``: how the release is installed now |
| TIPHYS_ARGO_SWITCH | command that brings Argo and the release to the mode given as its last argument |
| TIPHYS_ARGO_QUEUE | ``NAME:GPUS``: a queue with a quota of ``nvidia.com/gpu``; the nodes have twice as many |
| TIPHYS_ARGO_PREEMPTING_QUEUE | as above, another one, with ``preempts_lower_priority: true``; 2 GPUs will do |
| TIPHYS_ARGO_CRASH_<PART> | command that kills a part without warning and returns once its successor works |
| TIPHYS_ARGO_OUTAGE_<PART> | command; after its last argument ``stop`` the part does not answer, until ``start`` |
| TIPHYS_ARGO_NODE | command for a second node; its argument is ``start``, which prints the name, ``lose`` or ``stop`` |
| TIPHYS_ARGO_SERVER | ``host:port`` of an argo-server; ARGO_TOKEN and ARGO_SECURE as Argo's own command has them |
| TIPHYS_ARGO_OTHER_KUBECONFIG | a second cluster with Argo, Tiphys and the same images, namespaces and store |
| TIPHYS_ARGO_RECORD | file for the version of Argo and the tests that pass on it: ``tests/argo/versions.json`` |
| TIPHYS_ARGO_PATIENCE_SECONDS | how long a workflow may take to get somewhere (default 300) |

Parts are WORKFLOW_CONTROLLER, APISERVER and S3, which are somebody else's, and
PLUGIN and CONTROLLER, whose pods are deleted by force, or whose Deployment has no pods for the time of an outage,
where no command is given.
What needs something that is not given is skipped, with a sentence that names it.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

_CRASH = "TIPHYS_ARGO_CRASH_"
_OUTAGE = "TIPHYS_ARGO_OUTAGE_"


class Mode(StrEnum):
    """Who answers plugin steps."""

    SIDECAR = "sidecar"
    AGENT = "agent"


@dataclass(frozen=True)
class Settings:
    """The variables above, read once."""

    kubeconfig: str
    namespace: str
    system_namespace: str
    store: str
    image: str
    mode: Mode
    switch: str
    queue: str
    preempting_queue: str
    node: str
    argo_server: str
    other_kubeconfig: str
    record: str
    patience_seconds: float
    crash: Mapping[str, str] = field(default_factory=dict)
    outage: Mapping[str, str] = field(default_factory=dict)
    aws: Mapping[str, str] = field(default_factory=dict)


def from_environment(environ: Mapping[str, str] = os.environ) -> Settings:
    """Read the settings."""

    def by_part(prefix: str) -> dict[str, str]:
        return {name.removeprefix(prefix): value for name, value in environ.items() if name.startswith(prefix)}

    def own(name: str, default: str = "") -> str:
        return environ.get(f"TIPHYS_ARGO_{name}", default)

    return Settings(
        kubeconfig=environ.get("KUBECONFIG", ""),
        namespace=own("NAMESPACE", "ml"),
        system_namespace=own("SYSTEM_NAMESPACE", "tiphys"),
        store=own("STORE", "s3://artifacts/tiphys"),
        image=own("IMAGE"),
        mode=Mode(own("MODE", "sidecar")),
        switch=own("SWITCH"),
        queue=own("QUEUE"),
        preempting_queue=own("PREEMPTING_QUEUE"),
        node=own("NODE"),
        argo_server=own("SERVER"),
        other_kubeconfig=own("OTHER_KUBECONFIG"),
        record=own("RECORD"),
        patience_seconds=float(own("PATIENCE_SECONDS", "300")),
        crash=by_part(_CRASH),
        outage=by_part(_OUTAGE),
        aws={name: value for name, value in environ.items() if name.startswith("AWS_")},
    )

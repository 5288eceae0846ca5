"""Which fields of a Workflow the local engine knows, and which mean nothing on one machine."""

from collections.abc import Iterator

from tiphys.protocol.pipeline import Manifest

_PLACEMENT = {
    "affinity",
    "automountServiceAccountToken",
    "nodeSelector",
    "priorityClassName",
    "schedulerName",
    "securityContext",
    "serviceAccountName",
    "tolerations",
}
_KEEPING = {"archiveLogs", "artifactGC", "artifactRepositoryRef", "metrics", "podGC", "podMetadata", "ttlStrategy"}

SPEC = (
    _PLACEMENT
    | _KEEPING
    | {
        "activeDeadlineSeconds",
        "arguments",
        "dnsPolicy",
        "entrypoint",
        "executor",
        "executorPlugins",
        "imagePullSecrets",
        "onExit",
        "parallelism",
        "podDisruptionBudget",
        "podPriorityClassName",
        "priority",
        "templateDefaults",
        "templates",
        "volumeClaimGC",
        "volumeClaimTemplates",
        "volumes",
        "workflowMetadata",
    }
)
TEMPLATE = _PLACEMENT | {
    "activeDeadlineSeconds",
    "archiveLocation",
    "container",
    "dag",
    "executor",
    "failFast",
    "inputs",
    "metadata",
    "metrics",
    "name",
    "outputs",
    "parallelism",
    "plugin",
    "podSpecPatch",
    "priority",
    "resource",
    "retryStrategy",
    "script",
    "steps",
    "timeout",
    "volumes",
}
DAG = {"failFast", "target", "tasks"}
CHILD = {"arguments", "continueOn", "name", "template", "when", "withItems", "withParam", "withSequence"}
TASK = CHILD | {"dependencies", "depends"}
CONTAINER = {
    "args",
    "command",
    "env",
    "envFrom",
    "image",
    "imagePullPolicy",
    "lifecycle",
    "livenessProbe",
    "name",
    "ports",
    "readinessProbe",
    "resources",
    "securityContext",
    "source",
    "startupProbe",
    "terminationMessagePath",
    "terminationMessagePolicy",
    "volumeMounts",
}
ARTIFACT = {"archive", "from", "mode", "name", "optional", "path", "raw", "recurseMode", "s3"}
PARAMETER = {"default", "description", "enum", "name", "value", "valueFrom"}
VALUE_FROM = {"default", "expression", "parameter", "path", "supplied"}
RETRY = {"affinity", "backoff", "expression", "limit", "retryPolicy"}


def unknown(holder: Manifest, known: set[str], where: str) -> Iterator[str]:
    """The fields of ``holder`` that have a value and are not ``known``."""
    for field, value in holder.items():
        if field not in known and value not in (None, {}, [], "", False):
            yield f"{where}.{field}"

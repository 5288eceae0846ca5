"""The cluster that is measured: connection, settings of Argo's controller, and Workflows that are seen to their end."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.argo.documents import Timeline, describe_failure, phase
from bench.processes import cost, find
from bench.progress import say
from tiphys_controller.doctor.observed import find_argo_container, is_argo_controller, read_environment_value

from argo.settings import Settings
from tiphys.errors import TiphysError, UsageError
from tiphys.kube import KubeApi, ListSnapshot, Object, WatchEventType, connect_to_cluster, watch_objects
from tiphys.kube.resources import CONFIG_MAPS, CUSTOM_RESOURCE_DEFINITIONS, DEPLOYMENTS, PODS, WORKFLOWS, Resource
from tiphys.protocol.compiled_workflow import Manifest

WORKFLOW_LABEL = "workflows.argoproj.io/workflow"
_DEFAULT_REQUEUE = "10s"
_LONGEST_DELETION_SECONDS = 300.0
_POLL_SECONDS = 0.5
_CONFIG = "workflow-controller-configmap"
WATCHED = {"apiserver": "kube-apiserver", "controller": "workflow-controller"}
"""Programs of the cluster whose CPU is measured, where its nodes are this machine."""


@dataclass(frozen=True)
class Controller:
    """What is known of Argo's controller; a value that cannot be read is empty."""

    image: str = ""
    requeue: str = ""
    offloading: str = "unknown: the ConfigMap of Argo's controller cannot be read"


@dataclass(frozen=True)
class Installation:
    """A cluster with Argo and Tiphys, and all Workflows that this process started in it."""

    api: KubeApi
    settings: Settings
    controller: Controller
    timelines: dict[str, Timeline]
    changed: threading.Condition

    def run(self, manifest: Manifest, longest_seconds: float) -> Timeline:
        """Create a Workflow, wait until it has succeeded, and delete it.

        Raises:
            RuntimeError: it did not succeed, or not in time.
        """
        with self.changed:  # no event may come before the timeline that it belongs to
            began, cpu = time.monotonic(), _cpu_seconds()
            name = self.api.create(WORKFLOWS, self.settings.namespace, manifest)["metadata"]["name"]
            timeline = self.timelines[name] = Timeline(began)
        try:
            with self.changed:
                ended = self.changed.wait_for(lambda: timeline.finished is not None, longest_seconds)
            timeline.cpu_seconds = {part: used - cpu[part] for part, used in _cpu_seconds().items() if part in cpu}
        finally:
            self._delete(name)
        if not ended or phase(timeline.document) != "Succeeded":
            words = describe_failure(timeline.document) if timeline.document else f"Argo did not begin {name}"
            raise RuntimeError(f"{words}\n(after {time.monotonic() - began:.0f} s)")
        say(f"{name}: {timeline.seconds:.1f} s, first pod after {timeline.first_pod_seconds:.1f} s")
        return timeline

    def _delete(self, name: str) -> None:
        """Delete a Workflow, and wait until its pods are gone: their end must not cost the next one time."""
        namespace, deadline = self.settings.namespace, time.monotonic() + _LONGEST_DELETION_SECONDS
        self.api.delete(WORKFLOWS, namespace, name)
        while self.api.list(PODS, namespace, f"{WORKFLOW_LABEL}={name}").items:
            if time.monotonic() > deadline:
                raise RuntimeError(f"pods of {name} are there {_LONGEST_DELETION_SECONDS:.0f} s after its deletion")
            time.sleep(_POLL_SECONDS)


@contextmanager
def installation(settings: Settings, requeue: str) -> Iterator[Installation]:
    """The cluster of the settings, watched until the end.

    Args:
        settings: As those of ``make test-argo``.
        requeue: What the caller says of the controller; empty to read it.

    Raises:
        UsageError: there is no such cluster, or its controller is not as the caller says.
    """
    api = _connect(settings)
    found = Installation(api, settings, _controller(api, requeue), {}, threading.Condition())
    stop = threading.Event()
    kinds: tuple[tuple[Resource, str, Callable[[Timeline, Object, float], None]], ...] = (
        (WORKFLOWS, "", Timeline.see_workflow),
        (PODS, WORKFLOW_LABEL, Timeline.see_pod),
    )
    for resource, labels, see in kinds:
        # Daemons: a watch without events ends only after minutes.
        threading.Thread(target=_watch, args=(found, resource, labels, see, stop), daemon=True).start()
    try:
        yield found
    finally:
        stop.set()


def read_controller(deployments: list[Object], config_maps: Callable[[str], Object | None]) -> Controller:
    """What the one controller of Argo among ``deployments`` says of itself.

    Args:
        deployments: Of all namespaces.
        config_maps: The ConfigMap of Argo's settings in a namespace; None if there is none.
    """
    controllers = [one for one in deployments if is_argo_controller(one)]
    if len(controllers) != 1:
        return Controller()
    container = find_argo_container(controllers[0])
    config = config_maps(controllers[0]["metadata"]["namespace"]) or {}
    persistence = (config.get("data") or {}).get("persistence", "")
    return Controller(
        image=container["image"],
        requeue=read_environment_value(container, "DEFAULT_REQUEUE_TIME") or _DEFAULT_REQUEUE,
        offloading="configured" if "nodeStatusOffLoad: true" in persistence else "not configured",
    )


def agreed_requeue(read: str, given: str) -> str:
    """The requeue time, of which one of both must be known.

    Raises:
        UsageError: neither is, or they differ.
    """
    if not read and not given:
        raise UsageError("DEFAULT_REQUEUE_TIME of Argo's controller cannot be read; give it as REQUEUE=2s")
    if read and given and read != given:
        raise UsageError(
            f"REQUEUE={given}, but DEFAULT_REQUEUE_TIME of Argo's controller is {read}; change one of them"
        )
    return read or given


def _cpu_seconds() -> dict[str, float]:
    """What each of `WATCHED` has used so far."""
    found = {part: [cost(pid).cpu_seconds for pid in find(program)] for part, program in WATCHED.items()}
    return {part: sum(used) for part, used in found.items() if used}


def _controller(api: KubeApi, given: str) -> Controller:
    try:
        found = read_controller(api.list(DEPLOYMENTS).items, lambda namespace: api.get(CONFIG_MAPS, namespace, _CONFIG))
    except TiphysError as error:
        say(f"Argo's controller cannot be read: {error}")
        found = Controller()
    return Controller(found.image, agreed_requeue(found.requeue, given), found.offloading)


def _connect(settings: Settings) -> KubeApi:
    if not settings.kubeconfig:
        raise UsageError("KUBECONFIG names no cluster with Argo Workflows; docs/testing.md says what is needed")
    if not settings.image:
        raise UsageError("TIPHYS_ARGO_IMAGE names no image for the programs; docs/testing.md says what is needed")
    api = connect_to_cluster(Path(settings.kubeconfig))
    if api.get(CUSTOM_RESOURCE_DEFINITIONS, None, WORKFLOWS.plural + ".argoproj.io") is None:
        raise UsageError("the cluster of KUBECONFIG has no Argo Workflows; docs/testing.md says what is needed")
    return api


def _watch(
    here: Installation, resource: Resource, labels: str, see: Callable[[Timeline, Object, float], Any], stop: Any
) -> None:
    namespace, should_stop = here.settings.namespace, stop.is_set
    events = watch_objects(here.api, resource, namespace, labels=labels, sleep=stop.wait, should_stop=should_stop)
    for event in events:
        now = time.monotonic()
        if not isinstance(event, ListSnapshot) and event.type is WatchEventType.DELETED:
            continue
        for one in event.objects if isinstance(event, ListSnapshot) else [event.object]:
            name = (one["metadata"].get("labels") or {}).get(WORKFLOW_LABEL) if labels else one["metadata"]["name"]
            with here.changed:
                if timeline := here.timelines.get(str(name)):
                    see(timeline, one, now)
                    here.changed.notify_all()

"""Checks of Tiphys itself: is it installed, and does it say that it is ready? Each is pure.

Checks of the cluster as such: does the API server answer, do the clocks of the nodes agree? Each is pure.
"""

from tiphys_controller.doctor.finding import Finding, failed, ok, unknown, warning
from tiphys_controller.doctor.observed import Clock, Mode, Observed, PodSeen, Unknown, component, mode_of, place

_INSTALL = "helm install tiphys charts/tiphys -n tiphys --create-namespace --set store.url=…,image.repository=…"
_PARTS = {
    "plugin": "every plugin step stays Pending, or fails",
    "controller": "failed agent pods stay, and nothing is told in Argo's pages; runs go on",
}


def kinds(observed: Observed) -> list[Finding]:
    """The quota ledger is an object of our own kind."""
    if isinstance(observed.tiphys_kinds, Unknown):
        return [unknown("tiphys-kinds", observed.tiphys_kinds.reason)]
    if "gpuledgers" not in observed.tiphys_kinds:
        return [
            failed(
                "tiphys-kinds",
                "the cluster has no gpuledgers (tiphys.dev/v1alpha1), in which GPU quotas are kept; Helm does not "
                "install kinds with an upgrade",
                "kubectl apply --server-side -f charts/tiphys/crds",
            )
        ]
    return [ok("tiphys-kinds", "the kinds of Tiphys are there")]


def components(observed: Observed) -> list[Finding]:
    """Plugin and controller, each with the reason that its pods give if they are not ready."""
    return [_component(name, consequence, observed) for name, consequence in _PARTS.items()]


def _component(name: str, consequence: str, observed: Observed) -> Finding:
    found = [one for one in observed.tiphys.found if component(one) == name]
    if not found:
        return _absent(name, consequence, observed.tiphys.unseen)
    if isinstance(observed.pods, Unknown):
        return unknown(name, observed.pods.reason)
    pods = [pod for pod in observed.pods if pod.component == name]
    if ready := [pod for pod in pods if not pod.trouble]:
        mode = mode_of(observed.tiphys.found) if name == "plugin" else None
        how = {Mode.AGENT: " (shared agent)", Mode.SIDECAR: " (service of the sidecars)", None: ""}[mode]
        return _ready(name, f"{len(ready)} of {len(pods)} pods of the {name}{how} are ready", pods)
    sentence = pods[0].trouble if pods else "it has no pods"
    remedy = f"kubectl describe {place(found[0])}" if not pods else _logs(pods[0])
    return failed(name, f"the {name} is not ready: {sentence}; until then {consequence}", remedy)


def _ready(name: str, sentence: str, pods: list[PodSeen]) -> Finding:
    troubled = [pod for pod in pods if pod.trouble]
    if not troubled:
        heard = dict.fromkeys(complaint for pod in pods for complaint in pod.complaints)
        if heard:
            complaining = next(pod for pod in pods if pod.complaints)
            return warning(name, f"{sentence}, but not for all: {'; '.join(heard)}", _logs(complaining))
        return ok(name, sentence)
    return warning(name, f"{sentence}; {troubled[0].name}: {troubled[0].trouble}", _logs(troubled[0]))


def _absent(name: str, consequence: str, unseen: str) -> Finding:
    if unseen:
        return unknown(name, f"no Deployment of the {name} was found: {unseen}")
    return failed(name, f"the {name} is not installed: {consequence}", _INSTALL)


def _logs(pod: PodSeen) -> str:
    return f"kubectl logs -n {pod.namespace} {pod.name}"


_WARN_SECONDS = 60.0
_FAIL_SECONDS = 600.0
"""S3 refuses requests that are signed 900 s off, and the clock goes on drifting."""


def server(observed: Observed) -> list[Finding]:
    """The API server, by its version."""
    if isinstance(observed.version, Unknown):
        return [unknown("api-server", observed.version.reason)]
    return [ok("api-server", f"{observed.server} answers, Kubernetes {observed.version}")]


def clocks(observed: Observed) -> list[Finding]:
    """Storage refuses what a machine with a wrong clock signs, and the times of records mislead people."""
    if isinstance(observed.clocks, Unknown):
        return [unknown("clocks", observed.clocks.reason)]
    if not observed.clocks:
        return [unknown("clocks", "no node has renewed its Lease")]
    wrong = sorted((one for one in observed.clocks if abs(one.ahead_seconds) >= _WARN_SECONDS), key=_distance)
    if wrong:
        return [_wrong(one) for one in wrong]
    return [ok("clocks", f"the clocks of {len(observed.clocks)} nodes agree with the API server's within a minute")]


def _wrong(clock: Clock) -> Finding:
    where = "ahead of" if clock.ahead_seconds > 0 else "behind"
    sentence = f"the clock of node {clock.node} is {abs(clock.ahead_seconds):,.0f} s {where} the API server's"
    remedy = f"set up time synchronisation on {clock.node} (chronyc tracking, timedatectl timesync-status)"
    if abs(clock.ahead_seconds) < _FAIL_SECONDS:
        return warning("clocks", f"{sentence}; S3 refuses requests from 900 s on", remedy)
    return failed(
        "clocks", f"{sentence}: S3 refuses what its pods sign", f"{remedy}; until then: kubectl cordon {clock.node}"
    )


def _distance(clock: Clock) -> float:
    return -abs(clock.ahead_seconds)

"""Puts together what acts by itself while this controller leads."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

from tiphys.kube import KubeApi, cluster_name
from tiphys.store import Store
from tiphys_controller.automatic.attendant import Attendant
from tiphys_controller.automatic.attendant import Surroundings as AttendantSurroundings
from tiphys_controller.automatic.limits import Limits
from tiphys_controller.automatic.sight import Sight
from tiphys_controller.kubernetes.metrics import Metrics
from tiphys_controller.kubernetes.resume_news import ResumeNews
from tiphys_controller.kubernetes.resumer import Given, Resumer
from tiphys_controller.kubernetes.submitter import KubernetesSubmitter
from tiphys_controller.kubernetes.view import ClusterView
from tiphys_controller.kubernetes.watching import Watching
from tiphys_controller.kubernetes.writer import Writer


@dataclass(frozen=True)
class Parts:
    """What a controller has while it leads."""

    api: KubeApi
    namespaces: tuple[str, ...] | None
    stores: Callable[[str], Store]
    view: ClusterView
    watching: Watching
    writer: Writer
    metrics: Metrics
    may_write: Callable[[], bool]
    limits: Limits
    monotonic: Callable[[], float]


def submitter_of(api: KubeApi) -> Callable[[], KubernetesSubmitter]:
    """The cluster as a place for Workflows; its name is asked for when it is needed first."""
    return functools.cache(lambda: KubernetesSubmitter(api, cluster_name(api)))


def resumer(parts: Parts) -> Resumer:
    """The loop that resumes runs."""
    sight = Sight(
        lambda: _blind(parts.watching),
        lambda: sum(one.auto_resume and not one.finished for one in parts.view.workflows()),
        parts.limits,
        parts.monotonic,
    )
    surroundings = AttendantSurroundings(
        parts.stores, submitter_of(parts.api), parts.may_write, sight.health, parts.monotonic
    )
    attendant = Attendant(surroundings, parts.limits)
    teller = ResumeNews(parts.writer, parts.stores, parts.metrics, parts.limits, parts.monotonic)
    return Resumer(
        Given(parts.view, attendant, sight, parts.stores, teller, parts.limits, parts.monotonic, parts.namespaces)
    )


def _blind(watching: Watching) -> str:
    """Why the watches do not show all that there is; empty if they do."""
    for what, why in sorted(watching.troubles.items()):
        return f"{what}: {why}"
    return "" if watching.synced else "not everything was listed yet"

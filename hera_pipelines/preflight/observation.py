"""`PreflightObservation`: what the checks know of cluster and store. What could not be read is an `UnknownValue`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tiphys_controller.doctor.check import Finding, UnknownValue
from tiphys_controller.doctor.observed import ClusterObservation, Permission
from tiphys_plugin.quota.queues import QueueRules

NO_CLUSTER = UnknownValue("there is no cluster to ask")


@dataclass(frozen=True)
class SaveTimes:
    """Durations of the saves of a step in earlier runs, in seconds."""

    saves: int
    median_seconds: float
    p99_seconds: float


@dataclass(frozen=True)
class ReferencedObjects:
    """Objects of the namespace that the pods of a Workflow name."""

    secrets: Mapping[str, bool | UnknownValue] = field(default_factory=dict)
    """Whether each Secret exists. Nothing of its content is read."""
    config_maps: Mapping[str, bool | UnknownValue] = field(default_factory=dict)
    claims: Mapping[str, frozenset[str] | UnknownValue | None] = field(default_factory=dict)
    """Access modes of each PersistentVolumeClaim; None if it does not exist."""


@dataclass(frozen=True)
class ObservedRights:
    """Rights of the accounts of a Workflow, beside those that `tiphys doctor` tries."""

    allowed: Mapping[tuple[str, Permission], bool] = field(default_factory=dict)
    """Whether an account has a right."""
    missing_kinds: Mapping[str, str] = field(default_factory=dict)
    """Kinds that the cluster does not have, each with the step that creates one."""
    missing_accounts: tuple[str, ...] = ()
    """Accounts of the pods that do not exist, beside those that `tiphys doctor` looks for."""


@dataclass(frozen=True)
class PreflightObservation:
    """Everything that the checks examine beside the Workflow."""

    unasked: str = ""
    """Why no cluster was asked; empty if one was."""
    cluster: ClusterObservation | UnknownValue = NO_CLUSTER
    """The installation and the namespace of the Workflow, as `tiphys doctor` observes them."""
    may_submit: bool | UnknownValue = NO_CLUSTER
    """Whether the caller may create Workflows in the namespace."""
    rights: ObservedRights | UnknownValue = NO_CLUSTER
    objects: ReferencedObjects | UnknownValue = NO_CLUSTER
    queues: QueueRules | UnknownValue = NO_CLUSTER
    """Queues of the cluster, or of a queue file; None: GPUs are not limited."""
    queues_note: str = ""
    """What the queues do not know; empty if they know all."""
    plugin_version: str | UnknownValue = NO_CLUSTER
    """Version of Tiphys in the namespace; empty if it is not labelled."""
    store: Sequence[Finding] | UnknownValue = field(default_factory=lambda: UnknownValue("no store is named"))
    saves: Mapping[str, SaveTimes] | UnknownValue = field(default_factory=lambda: UnknownValue("no store is named"))
    """Saves of earlier runs of the same pipeline, by step."""

"""``tiphys nodes``: lists the nodes with GPUs, their use and health.

With a store, the health also counts slow ranks of gangs, as the services count
them.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text
from tiphys_plugin.nodes.health import NodeEvidence, NodeHealth
from tiphys_plugin.nodes.stragglers import Straggler, describe_straggler, evidence_by_node, find_slow_gangs
from tiphys_plugin.quota.flavors import ClusterNodes, FlavorSet
from tiphys_plugin.quota.lease import Lease, LedgerState
from tiphys_plugin.quota.queues import QueueRules, Queues

from hera_pipelines.cli.gpus.kueue import find_kueue
from hera_pipelines.cli.gpus.preemption_preview import open_tenant_stores
from hera_pipelines.cli.gpus.queues import LedgerNameOption, existing_ledger, find_ledger, parse_ledger
from hera_pipelines.cli.screen import Format, Screen
from hera_pipelines.cli.shared_options import FormatOption, InstallationOptions, with_option_groups
from tiphys.errors import ForbiddenError
from tiphys.protocol.step_spec import ATTEMPT_LABEL
from tiphys.records import utc_now

if TYPE_CHECKING:
    from tiphys_plugin.nodes.node import ObservedNode

    from tiphys.kube import KubeApi


SlowGangs = Sequence[tuple[Lease, Sequence[Straggler]]]


def observe_slow_gangs(url: str | None, leases: Sequence[Lease], now: datetime) -> SlowGangs:
    """Find the gangs among ``leases`` that have slow ranks, by the step times in the store; none without a URL."""
    return find_slow_gangs(open_tenant_stores(url), leases, now) if url is not None else ()


def slow_rank_evidence(slow: SlowGangs, pods: Sequence[dict[str, Any]]) -> Mapping[str, tuple[NodeEvidence, ...]]:
    """Evidence against nodes from slow ranks, by Node object; ``pods`` are all pods that have a node."""
    from tiphys_plugin.cluster.pod_status import pod_status

    if not slow:
        return evidence_by_node(slow, [])
    attempt_pods = [pod_status(pod) for pod in pods if ATTEMPT_LABEL in (pod["metadata"].get("labels") or {})]
    return evidence_by_node(slow, attempt_pods)


def describe_slow_ranks(lease: Lease, slow: SlowGangs) -> Iterator[Text]:
    """Yield one line for each slow rank of the gang that holds ``lease``."""
    for slow_lease, stragglers in slow:
        if slow_lease is lease:
            yield from (Text(f"  SlowRank: {describe_straggler(straggler)}") for straggler in stragglers)


EXAMPLES = """\b
Examples:
  tiphys nodes -n tiphys
  tiphys nodes -n tiphys -o json | jq -r '.nodes[] | select(.verdict != "healthy").name'
  tiphys nodes -n tiphys --store 's3://ml-runs/{namespace}/tiphys'
"""
_COLUMNS = ("NODE", "TYPE", "GPUS", "HELD", "OTHERS", "FREE", "BLOCK", "RACK", "NVLINK", "VERDICT", "")
_HIDDEN_FIRST = ("NVLINK", "RACK", "BLOCK", "OTHERS")
"""Columns that a narrow terminal need not show."""
_NODE_STYLES = {NodeHealth.HEALTHY: "", NodeHealth.SUSPECT: "yellow", NodeHealth.UNHEALTHY: "bold red"}


@with_option_groups
def nodes(
    command: typer.Context,
    *,
    name: LedgerNameOption = "default",
    installation: InstallationOptions,
    output: FormatOption = Format.TABLE,
    store: Annotated[
        str | None,
        typer.Option(
            "--store",
            metavar="URL",
            help="Store of the runs, with {namespace} in place of a namespace's name; then slow ranks of gangs count "
            "as evidence against their nodes.",
        ),
    ] = None,
) -> None:
    """List the nodes with GPUs, with free GPUs and health.

    Shows the GPUs that leases hold, those that other pods use, and why a node
    receives no new pods. The health is computed from the current state of the
    cluster; a service also remembers failures of deleted pods. The namespace is
    the one that Tiphys is installed in.
    """
    screen: Screen = command.obj
    api = installation.connect(command)
    # Where Kueue grants the GPUs, there is no ledger, or that of the time before Kueue is left.
    kueue = find_kueue(api, None)
    ledger = find_ledger(api, name) if kueue else existing_ledger(api, name)
    ledger_state = parse_ledger(ledger) if ledger else LedgerState()
    rules = ledger_state.queues
    leases = (*ledger_state.leases, *(kueue.ledger_state.leases if kueue else ()))
    if not kueue and (not isinstance(rules, Queues) or rules.cluster_nodes is None):
        screen.note(
            "the queues ignore the nodes of the cluster; `cluster_nodes: {}` in the queue file makes them use the "
            "nodes as they are listed here"
        )
    settings, flavors = read_node_settings(rules)
    slow = observe_slow_gangs(store, leases, utc_now())
    observed = observe_cluster_nodes(api, settings, flavors, leases, slow)
    held = count_held_gpus(ledger_state)
    unplaced = count_unplaced_gpus(api, leases)
    held.update({node.node.name: unplaced[node.object_name] for node in observed})
    for node in observed:
        if node.unreadable_memory:
            screen.note(
                f"warning: the label {settings.memory_label} of node {node.object_name} is "
                f"{node.unreadable_memory!r} and no number of MB, so its memory counts as enough; correct the label"
            )
    for resource, count in Counter(name for node in observed for name in node.uncounted).items():
        screen.note(
            f"warning: {count} nodes offer {resource}, and no flavor counts it there, so no step gets it; declare a "
            f"flavor with `resource: {resource}` and the node_labels of these nodes. Each node serves one flavor"
        )
    if output is not Format.TABLE:
        documents = [_node_document(node, held[node.node.name], flavors) for node in observed]
        screen.typed_document("NodeList", output, nodes=documents)
        return
    screen.table(_COLUMNS, (_node_row(node, held[node.node.name], flavors) for node in observed), hide=_HIDDEN_FIRST)


def apply_cluster_nodes(api: "KubeApi", state: LedgerState, note: Callable[[str], object]) -> LedgerState:
    """Add the cluster's nodes to the queues, as a service does; without permission to read nodes, ``note`` says so."""
    rules = state.queues
    if not isinstance(rules, Queues) or rules.cluster_nodes is None:
        return state
    try:
        observed = observe_cluster_nodes(api, rules.cluster_nodes, rules.flavor_set, state.leases)
    except ForbiddenError as error:
        note(f"nodes are not considered, because this account may not read them: {error}")
        return replace(state, queues=rules.without_nodes)
    return replace(state, queues=rules.with_nodes([node.node for node in observed], are_current=True))


def observe_cluster_nodes(
    api: "KubeApi", settings: ClusterNodes, flavors: FlavorSet, leases: Sequence[Lease], slow: SlowGangs = ()
) -> "list[ObservedNode]":
    """The nodes with GPUs, with the evidence of their pods and of slow ranks."""
    from tiphys_plugin.nodes.cluster_state import observe_nodes

    from tiphys.kube.resources import NODES, PODS

    pods = api.list(PODS, None, fields="spec.nodeName!=,status.phase!=Succeeded").items
    return observe_nodes(
        api.list(NODES).items, pods, settings, utc_now(), flavors, slow_rank_evidence(slow, pods), leases
    )


def read_node_settings(rules: QueueRules) -> tuple[ClusterNodes, FlavorSet]:
    """How the queues read the nodes of a cluster, and their flavors; the defaults if they do not read them."""
    settings = rules.cluster_nodes if isinstance(rules, Queues) and rules.cluster_nodes is not None else ClusterNodes()
    return settings, rules.flavor_set if isinstance(rules, Queues) else FlavorSet(())


def count_held_gpus(ledger_state: LedgerState) -> Counter[str]:
    """Number of GPUs that leases hold, by node."""
    held: Counter[str] = Counter()
    for lease in ledger_state.leases:
        for name in lease.nodes:
            held[name] += lease.request.gpus // lease.request.members
    return held


def count_unplaced_gpus(api: "KubeApi", leases: Sequence[Lease]) -> Counter[str]:
    """Number of GPUs in the pods of leases that name no nodes, as those of Kueue, by Node object."""
    from tiphys_plugin.nodes.node import name_attempt, read_pod_facts

    from tiphys.kube.resources import PODS

    attempts = {name_attempt(lease.request): lease.request.resource for lease in leases if not lease.nodes}
    used: Counter[str] = Counter()
    for pod in api.list(PODS, None, ATTEMPT_LABEL, fields="spec.nodeName!=").items if attempts else ():
        facts = read_pod_facts(pod)
        if facts is not None and facts.attempt in attempts:
            used[facts.node] += facts.resources.get(attempts[facts.attempt], 0)
    return used


def describe_node_status(observed: "ObservedNode") -> str:
    """State of a node in a word."""
    if observed.verdict.is_departing:
        return "leaving"
    return (
        "cordoned"
        if observed.unschedulable and observed.verdict.state is NodeHealth.HEALTHY
        else observed.verdict.state.value
    )


def count_free_gpus(observed: "ObservedNode", held: int, flavors: FlavorSet) -> int:
    """GPUs that new pods could get; ``held`` are those of leases."""
    node = observed.node
    is_closed = node.cordoned or not flavors.gpu_kind_of(node)
    return 0 if is_closed else max(0, node.gpus - held - node.foreign_gpus)


def _node_row(observed: "ObservedNode", held: int, flavors: FlavorSet) -> Sequence[str | Text]:
    node, flavor = observed.node, flavors.gpu_kind_of(observed.node)
    gpu_counts = (
        str(number) for number in (node.gpus, held, node.foreign_gpus, count_free_gpus(observed, held, flavors))
    )
    topology = (text or "-" for text in (node.block, node.rack, node.nvlink_domain))
    return (
        node.name,
        flavor or f"{node.gpu_type}, no flavor",
        *gpu_counts,
        *topology,
        Text(describe_node_status(observed), style=_NODE_STYLES[observed.verdict.state]),
        observed.verdict.message,
    )


def _node_document(observed: "ObservedNode", held: int, flavors: FlavorSet) -> dict[str, Any]:
    verdict, node = observed.verdict, observed.node
    flavor = flavors.gpu_kind_of(node) if not flavors.is_unflavored(node.gpu_type) else None
    evidence = [
        {
            "source": item.source,
            "message": item.message,
            "means": item.means,
            **({"at": item.at.isoformat()} if item.at else {}),
        }
        for item in verdict.evidence
    ]
    return {
        "name": node.name,
        "gpuType": node.gpu_type,
        **({"flavor": flavor} if flavor is not None else {}),
        "gpus": node.gpus,
        "held": held,
        "foreign": node.foreign_gpus,
        "memoryMb": node.memory_mb,
        "block": node.block,
        "rack": node.rack,
        "nvlinkDomain": node.nvlink_domain,
        "getsNothingNew": node.cordoned,
        "cordoned": observed.unschedulable,
        "broken": verdict.is_broken,
        "leaving": verdict.is_departing,
        "verdict": verdict.state.value,
        "evidence": evidence,
    }

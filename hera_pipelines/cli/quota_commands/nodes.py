"""``tiphys nodes``: the nodes with GPUs, who uses them, and why some get nothing new.

Ranks that stay behind the others of their gang, as the services see them, where a store is given.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text
from tiphys_controller import API_VERSION
from tiphys_plugin.nodes.health import Evidence, State
from tiphys_plugin.nodes.stragglers import Slow, evidence_by_node, in_words, slow_in
from tiphys_plugin.quota.flavors import ClusterNodes, Flavors
from tiphys_plugin.quota.lease import Lease
from tiphys_plugin.quota.ledger.state import Book
from tiphys_plugin.quota.queues import QueueRules, Queues

from hera_pipelines.cli.quota_commands.preemption_preview import stores_at
from hera_pipelines.cli.quota_commands.queues import NameOption, existing_ledger, understood
from hera_pipelines.cli.screen import Format, Screen
from hera_pipelines.cli.shared_options import ContextOption, KubeconfigOption, NamespaceOption, connect
from tiphys.errors import ForbiddenError, NotFoundError
from tiphys.protocol.step_spec import ATTEMPT_LABEL
from tiphys.records import utc_now

if TYPE_CHECKING:
    from tiphys_plugin.nodes.node import SeenNode

    from tiphys.kube import KubeApi


SlowGangs = Sequence[tuple[Lease, Sequence[Slow]]]


def slow_gangs(url: str | None, leases: Sequence[Lease], now: datetime) -> SlowGangs:
    """Those of ``leases`` that have slow members, by what their ranks have told in this store; none without one."""
    return slow_in(stores_at(url), leases, now) if url is not None else ()


def told_of_nodes(slow: SlowGangs, pods: Sequence[dict[str, Any]]) -> Mapping[str, tuple[Evidence, ...]]:
    """What they point at, by Node object; ``pods`` are all that have a node."""
    from tiphys_plugin.cluster.pod_status import pod_status

    ours = [pod_status(pod) for pod in pods if ATTEMPT_LABEL in (pod["metadata"].get("labels") or {})] if slow else []
    return evidence_by_node(slow, ours)


def told_of(lease: Lease, slow: SlowGangs) -> Iterator[Text]:
    """A line for each slow member of a gang."""
    for held, members in slow:
        if held is lease:
            yield from (Text(f"  SlowRank: {in_words(one)}") for one in members)


NODES_EXAMPLES = """\b
Examples:
  tiphys nodes -n tiphys
  tiphys nodes -n tiphys -o json | jq -r '.nodes[] | select(.verdict != "healthy").name'
  tiphys nodes -n tiphys --store 's3://ml/{namespace}/tiphys'
  tiphys nodes cordon gpu-7
"""
CORDON_EXAMPLES = """\b
Examples:
  tiphys nodes cordon gpu-7
  tiphys nodes uncordon gpu-7
"""
_COLUMNS = ("NODE", "TYPE", "GPUS", "HELD", "OTHERS", "FREE", "BLOCK", "RACK", "NVLINK", "VERDICT", "")
_STYLES = {State.HEALTHY: "", State.SUSPECT: "yellow", State.UNHEALTHY: "bold red"}

NodeArgument = Annotated[str, typer.Argument(metavar="NODE", help="Name of the node, as `tiphys nodes` shows it.")]

app = typer.Typer(
    help="Nodes with GPUs: what is held and free of each, and which get nothing new.", invoke_without_command=True
)


@app.callback(epilog=NODES_EXAMPLES)
def nodes(
    command: typer.Context,
    name: NameOption = "default",
    namespace: NamespaceOption = None,
    context: ContextOption = None,
    kubeconfig: KubeconfigOption = None,
    output: Annotated[Format, typer.Option("-o", "--format", help="Form of the answer.")] = Format.TABLE,
    store: Annotated[
        str | None,
        typer.Option(
            "--store",
            metavar="URL",
            help="Where runs are kept, {namespace} in it for those of each; then nodes of ranks that stay behind the "
            "others of their gang are told of.",
        ),
    ] = None,
) -> None:
    """Show the nodes with GPUs: what trainings and others use of them, and why some get nothing new.

    They are judged anew from what the cluster says now; a service also remembers
    failures of pods that are gone. The namespace is the one that Tiphys is
    installed in.
    """
    if command.invoked_subcommand is not None:
        return
    screen: Screen = command.obj
    api = connect(kubeconfig, context, namespace)
    command.call_on_close(api.close)
    rules, book = understood(existing_ledger(api, name))
    if not isinstance(rules, Queues) or rules.cluster_nodes is None:
        screen.note(
            "the queues do not go by the nodes of the cluster: they do with `cluster_nodes: {}` in the queue file; "
            "what follows are the nodes as they would be read"
        )
    settings = rules.cluster_nodes if isinstance(rules, Queues) and rules.cluster_nodes is not None else ClusterNodes()
    kinds = rules.kinds if isinstance(rules, Queues) else Flavors(())
    slow = slow_gangs(store, book.leases, utc_now())
    seen, held = _seen(api, settings, kinds, slow), _held(book)
    if output is not Format.TABLE:
        found = [_document(one, held[one.node.name], kinds) for one in seen]
        screen.document({"apiVersion": API_VERSION, "kind": "NodeList", "nodes": found}, output)
        return
    screen.table(_COLUMNS, (_row(one, held[one.node.name], kinds) for one in seen))


@app.command(epilog=CORDON_EXAMPLES)
def cordon(
    command: typer.Context, node: NodeArgument, context: ContextOption = None, kubeconfig: KubeconfigOption = None
) -> None:
    """Have a node get nothing new, as `kubectl cordon` does; what runs on it goes on."""
    _mark(command, node, context, kubeconfig, unschedulable=True)


@app.command(epilog=CORDON_EXAMPLES)
def uncordon(
    command: typer.Context, node: NodeArgument, context: ContextOption = None, kubeconfig: KubeconfigOption = None
) -> None:
    """Take that back. Whatever else speaks against the node goes on to count."""
    _mark(command, node, context, kubeconfig, unschedulable=False)


def on_nodes_of_today(api: "KubeApi", rules: QueueRules, screen: Screen) -> QueueRules:
    """The queues as a service goes by them; on quotas alone if this account may not see nodes, which is said."""
    if not isinstance(rules, Queues) or rules.cluster_nodes is None:
        return rules
    try:
        return rules.on([one.node for one in _seen(api, rules.cluster_nodes, rules.kinds)], changing=True)
    except ForbiddenError as error:
        screen.note(f"nodes are left out of this, because this account may not see them: {error}")
        return rules.quotas


def _seen(api: "KubeApi", settings: ClusterNodes, kinds: Flavors, slow: SlowGangs = ()) -> "list[SeenNode]":
    from tiphys_plugin.nodes.node import observe

    from tiphys.kube.resources import NODES, PODS

    pods = api.list(PODS, None, fields="spec.nodeName!=,status.phase!=Succeeded").items
    return observe(api.list(NODES).items, pods, settings, utc_now(), kinds.labels, told_of_nodes(slow, pods))


def _held(book: Book) -> Counter[str]:
    """GPUs that leases hold, by node."""
    held: Counter[str] = Counter()
    for lease in book.leases:
        for name in lease.nodes:
            held[name] += lease.request.gpus // lease.request.members
    return held


def _mark(command: typer.Context, host: str, context: str | None, kubeconfig: Any, *, unschedulable: bool) -> None:
    from tiphys_plugin.nodes.node import observe

    from tiphys.kube.resources import NODES

    screen: Screen = command.obj
    api = connect(kubeconfig, context, None)
    command.call_on_close(api.close)
    found = _called(host, observe(api.list(NODES).items, (), ClusterNodes(), utc_now()))
    api.patch(NODES, None, found.object_name, {"spec": {"unschedulable": unschedulable or None}})
    screen.note(
        f"{host} gets nothing new; what runs on it goes on" if unschedulable else f"{host} is no longer cordoned"
    )


def _called(host: str, seen: "Iterable[SeenNode]") -> "SeenNode":
    for one in seen:
        if host in (one.node.name, one.object_name):
            return one
    raise NotFoundError(f"there is no node {host} with GPUs; `tiphys nodes` shows those that there are")


def _verdict(one: "SeenNode") -> str:
    if one.verdict.going:
        return "leaving"
    return "cordoned" if one.unschedulable and one.verdict.state is State.HEALTHY else one.verdict.state.value


def _row(one: "SeenNode", held: int, kinds: Flavors) -> Sequence[str | Text]:
    node, kind = one.node, kinds.kind_of(one.node)
    free = 0 if node.cordoned or not kind else max(0, node.gpus - held - node.foreign_gpus)
    numbers = (str(number) for number in (node.gpus, held, node.foreign_gpus, free))
    place = (text or "-" for text in (node.block, node.rack, node.nvlink_domain))
    return (
        node.name,
        kind or f"{node.gpu_type}, of no flavor",
        *numbers,
        *place,
        Text(_verdict(one), style=_STYLES[one.verdict.state]),
        one.verdict.why,
    )


def _document(one: "SeenNode", held: int, kinds: Flavors) -> dict[str, Any]:
    verdict, node = one.verdict, one.node
    flavor = kinds.kind_of(node) if not kinds.is_plain(node.gpu_type) else None
    evidence = [
        {
            "source": each.source,
            "message": each.message,
            "means": each.means,
            **({"at": each.at.isoformat()} if each.at else {}),
        }
        for each in verdict.evidence
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
        "cordoned": one.unschedulable,
        "broken": verdict.broken,
        "leaving": verdict.going,
        "verdict": verdict.state.value,
        "evidence": evidence,
    }

"""``tiphys queues``: sets and shows the GPU quotas of a cluster, with leases and pending requests."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text
from tiphys_plugin import load_queues
from tiphys_plugin.quota.lease import LeaseRequest, LedgerState
from tiphys_plugin.quota.ledger import room
from tiphys_plugin.quota.ledger.usage import QueueUsage, compute_queue_usage
from tiphys_plugin.quota.queue import ANY_TYPE, Queue
from tiphys_plugin.quota.queues import MisconfiguredQueues, QueueRules, Queues, format_gpus

from hera_pipelines.cli.gpus.kueue import find_kueue, show_kueue_queues
from hera_pipelines.cli.screen import Format, ManifestFormat, Screen, format_local_time
from hera_pipelines.cli.shared_options import FormatOption, InstallationOptions, with_option_groups
from tiphys.errors import IntegrityError, NotFoundError, UsageError

if TYPE_CHECKING:
    from tiphys.kube import KubeApi, Object


APPLY_EXAMPLES = """\b
Examples:
  tiphys queues apply -f queues.yaml -n tiphys --dry-run
  tiphys queues apply -f queues.yaml -n tiphys
  tiphys queues apply -f queues.yaml -n tiphys --dry-run -o yaml | kubectl apply -f -

\b
A queue file:
  queues:
    - name: research
      gpus: {A100: 8, "*": 4}    # quota: 8 A100, and 4 of all other types together
      namespaces: [vision]       # optional: only these namespaces use the queue; otherwise all do
      max_priority: 10           # optional: highest priority that a step may ask for
      cohort: lab                # optional: queues of one cohort lend each other free quota
      borrowing_limit: {A100: 4} # optional: most GPUs that this queue borrows
      lending_limit: {A100: 6}   # optional: most GPUs that this queue lends
      weight: 2                  # optional: twice the share of free quota in the cohort
      stopped: false             # optional: true starts no new requests
      preempts_lower_priority: true # optional: preempts its own requests of lower priority
      reclaims: true             # optional: preempts requests that borrow its quota
      min_runtime_seconds: 1800  # optional: its requests are not preempted in this time after their start
      order: attained            # optional: the request with the least GPU time goes first, not the oldest
      preempts_longer: true      # optional: preempts its own requests that have had more GPU time
  inventory:                     # optional: the GPUs of the cluster
    A100: {count: 16, memory_mb: 81920}
  flavors:                       # optional: GPUs of one type by their nodes; quotas then name flavors
    - {name: t4-spot, gpu_type: T4, node_labels: {pool: spot}, spot: true}
"""
SHOW_EXAMPLES = """\b
Examples:
  tiphys queues show -n tiphys
  tiphys queues show -n tiphys -o json | jq '.queues[] | select(.waiting > 0)'
"""
_NONE = "-"

LedgerNameOption = Annotated[str, typer.Option("--name", metavar="NAME", help="Name of the GPULedger object.")]

app = typer.Typer(help="Set and show the GPU quotas of a cluster.", epilog=SHOW_EXAMPLES, no_args_is_help=True)


@app.command(epilog=APPLY_EXAMPLES)
@with_option_groups
def apply(
    command: typer.Context,
    *,
    file: Annotated[Path, typer.Option("-f", "--file", metavar="FILE", help="Queue file; - reads stdin.")],
    name: LedgerNameOption = "default",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would change, and change nothing.")] = False,
    output: Annotated[
        ManifestFormat | None,
        typer.Option("-o", "--format", help="With --dry-run: write the GPULedger as a manifest, for Git."),
    ] = None,
    installation: InstallationOptions,
) -> None:
    """Set the queues of a cluster to those of a queue file.

    The file replaces all queues, and applies from the next decision on. Leases stay:
    a queue that holds more than its new quota is granted no GPUs until enough are
    released. The namespace is the one that Tiphys is installed in.

    With --dry-run -o yaml it writes the manifest that `kubectl apply`, Helm or Argo CD
    apply in its place, and asks no cluster.
    """
    screen: Screen = command.obj
    if output is not None and not dry_run:
        raise UsageError("-o is for --dry-run, which writes the manifest; leave it out, or add --dry-run")
    declared = load_queues(Path("/dev/stdin") if str(file) == "-" else file)
    if output is not None:
        screen.document(_ledger_manifest(name, installation.namespace, declared), Format(output))
        return
    api = installation.connect(command)
    ledger = find_ledger(api, name)
    before = parse_ledger(ledger) if ledger else LedgerState(queues=Queues(queues=()))
    after = replace(before, queues=declared)
    screen.table(("QUEUE", "GPU TYPE", "QUOTA", "NEW QUOTA", "HELD", "WAITING"), _change_rows(before, after))
    _warn_exceeded(screen, compute_queue_usage(after))
    _warn_refused(screen, declared, before)
    ledger_name = f"GPULedger {api.namespace}/{name}"
    if dry_run:
        screen.note(f"{ledger_name} is unchanged; without --dry-run it would be {'changed' if ledger else 'created'}")
        return
    _write_ledger(api, name, declared, ledger)
    screen.note(
        f"{ledger_name} is up to date"
        if ledger
        else f"{ledger_name} is created; the Tiphys services of this namespace use it within seconds, once they have "
        "recorded the leases of live pods in it"
    )


@app.command(epilog=SHOW_EXAMPLES)
@with_option_groups
def show(
    command: typer.Context,
    *,
    name: LedgerNameOption = "default",
    installation: InstallationOptions,
    output: FormatOption = Format.TABLE,
) -> None:
    """Show each queue's quota and use, its leases and pending requests."""
    screen: Screen = command.obj
    api = installation.connect(command)
    if (kueue := find_kueue(api, find_ledger(api, name))) is not None:
        show_kueue_queues(screen, kueue, output)
        return
    ledger_state = parse_ledger(existing_ledger(api, name))
    rules = ledger_state.queues
    if output is not Format.TABLE:
        fields = _queues_document(ledger_state)
        screen.typed_document("QueueList", output, namespace=api.namespace, ledger=name, **fields)
        return
    screen.table(
        ("QUEUE", "GPU TYPE", "QUOTA", "UP TO", "HELD", "WAITING", ""),
        _queue_rows(ledger_state),
        hide=("UP TO",),
    )
    if ledger_state.leases or ledger_state.pending:
        screen.show("")
        screen.table(
            ("GPUS", "QUEUE", "NAMESPACE", "RUN", "STEP", "ATTEMPT", "SINCE"),
            _request_rows(ledger_state),
            hide=("NAMESPACE", "ATTEMPT"),
        )
    for note in describe_used_shares(ledger_state):
        screen.note(note)
    if rules is None:
        screen.note("no queues are declared, so GPUs are not limited; declare some with `tiphys queues apply -f FILE`")
    if isinstance(rules, MisconfiguredQueues):
        screen.note(f"no GPUs are granted: {rules.message}")


def find_ledger(api: "KubeApi", name: str) -> "Object | None":
    """Read a `GPULedger` with its leases from the namespace of ``api``; None if it does not exist."""
    from tiphys.kube.whole_ledger import WholeLedgerReader

    return WholeLedgerReader(api, api.namespace, name).read()


def existing_ledger(api: "KubeApi", name: str) -> "Object":
    """Read a `GPULedger` from the namespace of ``api``.

    Raises:
        NotFoundError: it does not exist; the message says what to do.
    """
    ledger = find_ledger(api, name)
    if ledger is None:
        raise NotFoundError(
            f"there is no GPULedger {api.namespace}/{name}; choose the namespace that Tiphys is installed in with -n, "
            f"or create it with `tiphys queues apply -f FILE -n {api.namespace}`"
        )
    return ledger


def parse_ledger(ledger: "Object") -> LedgerState:
    """Parse the queues of a `GPULedger` object, and its leases and pending requests.

    Raises:
        IntegrityError: its status is not a valid ledger state.
    """
    from tiphys_plugin.quota.ledger import status_codec
    from tiphys_plugin.quota.ledger.ledger_object import parse_ledger_queues

    try:
        ledger_state = status_codec.decode_state(ledger["status"]) if "status" in ledger else LedgerState()
    except IntegrityError as error:
        name = f"{ledger['metadata']['namespace']}/{ledger['metadata']['name']}"
        raise IntegrityError(
            f"the status of GPULedger {name} is damaged: {error}; repair it with `kubectl edit --subresource=status`"
        ) from error
    return replace(ledger_state, queues=parse_ledger_queues(ledger))


def describe_used_shares(ledger_state: LedgerState) -> Iterator[str]:
    """A sentence for each namespace that has nearly used its share of the ledger."""
    for namespace, used in room.measure_shares(ledger_state).items():
        if used >= room.NEARLY_USED:
            yield (
                f"namespace {namespace} has used {used:.0%} of its share of the ledger; at 100 % its new requests wait "
                "with LedgerShareExceeded"
            )


def _ledger_manifest(name: str, namespace: str | None, declared: Queues) -> "Object":
    from tiphys.kube.resources import GPU_LEDGERS

    metadata = {"name": name, **({"namespace": namespace} if namespace else {})}
    kind = {"apiVersion": GPU_LEDGERS.api_version, "kind": GPU_LEDGERS.kind}
    return {**kind, "metadata": metadata, "spec": _spec_of(declared)}


def _spec_of(declared: Queues) -> dict[str, Any]:
    return declared.model_dump(mode="json", exclude_defaults=True)


def _write_ledger(api: "KubeApi", name: str, declared: Queues, existing: "Object | None") -> None:
    from tiphys.kube import PatchType
    from tiphys.kube.resources import GPU_LEDGERS

    spec = _spec_of(declared)
    if existing:
        # A patch of the whole spec does not conflict with the service's writes to the status.
        change = [{"op": "add", "path": "/spec", "value": spec}]
        written = api.patch(GPU_LEDGERS, api.namespace, name, change, PatchType.JSON)
    else:
        try:
            written = api.create(GPU_LEDGERS, api.namespace, {"metadata": {"name": name}, "spec": spec})
        except NotFoundError as error:
            raise NotFoundError(
                f"GPULedger {api.namespace}/{name} cannot be created: {error}; "
                "install the chart of Tiphys, and choose its namespace with -n"
            ) from error
    if written["spec"] != spec:
        # The API server silently drops fields that the CustomResourceDefinition does not declare.
        raise UsageError(
            f"GPULedger {api.namespace}/{name} did not store all fields of the file, because the kind GPULedger of "
            "this cluster is older than this command; run `kubectl apply --server-side -f charts/tiphys/crds`, "
            "then repeat the command"
        )


def _change_rows(before: LedgerState, after: LedgerState) -> Iterator[Sequence[str | Text]]:
    old = {(usage.queue, usage.gpu_type): usage for usage in compute_queue_usage(before)}
    new = {(usage.queue, usage.gpu_type): usage for usage in compute_queue_usage(after)}
    unlimited = "unlimited" if before.queues is None else _NONE
    for pool in [*new, *(pool for pool in old if pool not in new)]:
        old_quota = old[pool].quota if pool in old else None
        quota_text = unlimited if old_quota is None else str(old_quota)
        usage = new.get(pool) or QueueUsage(*pool, None, 0, 0)
        new_quota_text = _NONE if usage.quota is None else str(usage.quota)
        new_quota = Text(new_quota_text, style="" if quota_text == new_quota_text else "bold")
        held = Text(str(usage.held), style="bold red" if usage.is_over_limit else "")
        yield *pool, quota_text, new_quota, held, str(usage.pending)


def _warn_exceeded(screen: Screen, rows: list[QueueUsage]) -> None:
    for usage in rows:
        gpu_type = None if usage.gpu_type == "*" else usage.gpu_type
        if usage.is_over_limit:
            limit = "has no quota for them" if usage.quota is None else f"may hold {usage.max_gpus}"
            screen.note(
                f"warning: queue {usage.queue} holds {format_gpus(usage.held, gpu_type)} and {limit}; "
                "it is granted no more until enough are released"
            )
        elif usage.pending and usage.quota is None:
            screen.note(
                f"warning: steps wait for {format_gpus(usage.pending, gpu_type)} of queue {usage.queue}, which has no "
                "quota for them; these steps will fail"
            )


def _warn_refused(screen: Screen, declared: Queues, ledger_state: LedgerState) -> None:
    refused: Counter[tuple[str, str]] = Counter()
    for request in (pending.request for pending in ledger_state.pending):
        queue = declared.find(request.queue)
        if queue is not None and not queue.accepts(request.namespace, request.priority):
            refused[request.namespace, queue.name] += 1
    for (namespace, name), steps in sorted(refused.items()):
        screen.note(
            f"warning: {steps} waiting step{'s' if steps > 1 else ''} of namespace {namespace} may not use queue "
            f"{name}, by its namespaces or max_priority; these steps will fail"
        )


def _queue_rows(ledger_state: LedgerState) -> Iterator[Sequence[str | Text]]:
    policies = describe_queue_policies(ledger_state.queues)
    for usage in compute_queue_usage(ledger_state):
        held = Text(str(usage.held), style="bold red" if usage.quota is not None and usage.is_over_limit else "")
        quota, max_gpus = (_NONE if number is None else str(number) for number in (usage.quota, usage.max_gpus))
        yield usage.queue, usage.gpu_type, quota, max_gpus, held, str(usage.pending), policies.get(usage.queue, "")


def describe_queue_policies(rules: QueueRules) -> dict[str, str]:
    """Non-default policies of each queue, as short phrases."""
    return {queue.name: _describe_policies(queue) for queue in rules.queues} if isinstance(rules, Queues) else {}


def _describe_policies(queue: Queue) -> str:
    phrases = {
        f"only for {', '.join(queue.namespaces or ())}": queue.namespaces is not None,
        f"priority at most {queue.max_priority}": queue.max_priority is not None,
        "stopped": queue.stopped,
        "least GPU time first": queue.order == "attained",
        "preempts lower priority": queue.preempts_lower_priority,
        "preempts longer": queue.preempts_longer,
        "reclaims": queue.reclaims,
        f"{queue.backfill} backfill": queue.backfill is not None,
        "moves trainings to other nodes": queue.moves_trainings,
        f"protects the first {queue.protected_seconds} s": queue.protected_seconds > 0,
    }
    return ", ".join(phrase for phrase, is_set in phrases.items() if is_set)


def _request_rows(ledger_state: LedgerState) -> Iterator[Sequence[str]]:
    for lease in ledger_state.leases:
        gpu_type = lease.request.gpu_type if lease.pool == ANY_TYPE else lease.pool
        yield _request_row(
            lease.request, gpu_type, lease.granted_at, "holds" if lease.preemption is None else "releases"
        )
    for pending in ledger_state.pending:
        yield _request_row(pending.request, pending.request.type_text, pending.since, "waits for")


def _request_row(request: LeaseRequest, gpu_type: str | None, since: datetime, verb: str) -> Sequence[str]:
    gpus = f"{verb} {format_gpus(request.gpus, gpu_type)}"
    location = (request.queue, request.namespace, request.run, request.step_name, str(request.attempt))
    return gpus, *location, format_local_time(since)


def _queues_document(ledger_state: LedgerState) -> dict[str, object]:
    from tiphys_plugin.quota.ledger import status_codec

    rules = ledger_state.queues
    encoded = status_codec.encode_state(ledger_state)
    rows = [
        {
            "name": usage.queue,
            "gpuType": usage.gpu_type,
            "quota": usage.quota,
            "most": usage.max_gpus,
            "held": usage.held,
            "borrowed": usage.borrowed,
            "waiting": usage.pending,
            "stopped": usage.stopped,
        }
        for usage in compute_queue_usage(ledger_state)
    ]
    document = dict[str, object]()
    if isinstance(rules, MisconfiguredQueues):
        document["misconfigured"] = rules.message
    if isinstance(rules, Queues):
        document |= rules.model_dump(mode="json", include={"inventory"}, exclude_none=True)
        policies = {"preempts_lower_priority", "preempts_longer", "reclaims", "min_runtime_seconds"}
        policies |= {"namespaces", "max_priority"}
        by_name = {queue.name: queue.model_dump(include=policies, exclude_defaults=True) for queue in rules.queues}
        rows = [{**row, **by_name.get(str(row["name"]), {})} for row in rows]
    shares = {name: round(used, 4) for name, used in room.measure_shares(ledger_state).items()}
    document |= {"limited": rules is not None, "queues": rows, "ledgerShares": shares}
    return {**document, "leases": encoded["leases"], "waiting": encoded["waiting"]}

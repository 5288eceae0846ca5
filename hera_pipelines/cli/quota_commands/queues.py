"""``tiphys queues``: the GPU quotas of a cluster, and who holds or waits for what."""

from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text
from tiphys_controller import API_VERSION
from tiphys_plugin import load_queues
from tiphys_plugin.quota.lease import LeaseRequest
from tiphys_plugin.quota.ledger import status_codec as status
from tiphys_plugin.quota.ledger.state import Book
from tiphys_plugin.quota.ledger.usage import Usage, usage
from tiphys_plugin.quota.queues import ANY_TYPE, Misconfigured, Queue, QueueRules, Queues, in_words

from hera_pipelines.cli.screen import Format, Screen, local_time
from hera_pipelines.cli.shared_options import ContextOption, KubeconfigOption, NamespaceOption, connect
from tiphys.errors import IntegrityError, NotFoundError, UsageError

if TYPE_CHECKING:
    from tiphys.kube import KubeApi, Object


APPLY_EXAMPLES = """\b
Examples:
  tiphys queues apply -f queues.yaml -n tiphys --dry-run
  tiphys queues apply -f queues.yaml -n tiphys

\b
A queue file:
  queues:
    - name: research
      gpus: {A100: 8, "*": 4}    # 8 A100, and 4 of all other types together
      cohort: lab                # optional: who lends to each other what is free
      borrowing_limit: {A100: 4} # optional: no more than so many of others
      lending_limit: {A100: 6}   # optional: no more than so many to others
      weight: 2                  # optional: twice the share of what is left over
      stopped: false             # optional: true, and nothing new starts
      preempts_lower_priority: true # optional: asks its own of lower priority to save and go
      reclaims: true             # optional: asks those that borrow its quota to save and go
      min_runtime_seconds: 1800  # optional: its own are asked no earlier after their start
      order: attained            # optional: who has had the least GPU time goes first, not who came first
      preempts_longer: true      # optional: asks its own that have had more GPU time to save and go
  inventory:                     # optional: what the cluster has
    A100: {count: 16, memory_mb: 81920}
  flavors:                       # optional: GPUs of one type by their nodes; a quota is of a flavor then
    - {name: t4-spot, gpu_type: T4, node_labels: {pool: spot}, spot: true}
"""
SHOW_EXAMPLES = """\b
Examples:
  tiphys queues show -n tiphys
  tiphys queues show -n tiphys -o json | jq '.queues[] | select(.waiting > 0)'
"""
_NONE = "-"

NameOption = Annotated[str, typer.Option("--name", metavar="NAME", help="Name of the GPULedger object.")]

app = typer.Typer(help="GPU quotas of a cluster: who may hold how many, who does, who waits.", no_args_is_help=True)


@app.command(epilog=APPLY_EXAMPLES)
def apply(
    command: typer.Context,
    file: Annotated[Path, typer.Option("-f", "--file", metavar="FILE", help="Queue file; - is stdin.")],
    name: NameOption = "default",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would change and write nothing.")] = False,
    namespace: NamespaceOption = None,
    context: ContextOption = None,
    kubeconfig: KubeconfigOption = None,
) -> None:
    """Give the queues of a cluster their quotas: those of a queue file, and no others.

    They count from the next decision on. What is held stays held: a quota below
    it admits nobody until enough has come back. The namespace is the one that
    Tiphys is installed in.
    """
    screen: Screen = command.obj
    declared = load_queues(Path("/dev/stdin") if str(file) == "-" else file)
    api = connect(kubeconfig, context, namespace)
    command.call_on_close(api.close)
    found = find_ledger(api, name)
    before, book = understood(found) if found else (Queues(queues=()), Book())
    screen.table(("QUEUE", "GPU TYPE", "QUOTA", "BECOMES", "HELD", "WAITING"), _changes(before, declared, book))
    _warn(screen, usage(declared, book))
    where = f"GPULedger {api.namespace}/{name}"
    if dry_run:
        screen.note(f"{where} is as it was; without --dry-run it would be {'changed' if found else 'made'}")
        return
    _write(api, name, declared, found)
    screen.note(f"{where} is {'up to date' if found else 'made; a service of Tiphys in this namespace goes by it'}")


@app.command(epilog=SHOW_EXAMPLES)
def show(
    command: typer.Context,
    name: NameOption = "default",
    namespace: NamespaceOption = None,
    context: ContextOption = None,
    kubeconfig: KubeconfigOption = None,
    output: Annotated[Format, typer.Option("-o", "--format", help="Form of the answer.")] = Format.TABLE,
) -> None:
    """Show each queue's quota, what is held of it, and who holds GPUs or waits for them."""
    screen: Screen = command.obj
    api = connect(kubeconfig, context, namespace)
    command.call_on_close(api.close)
    rules, book = understood(existing_ledger(api, name))
    if output is not Format.TABLE:
        screen.document(_document(api.namespace, name, rules, book), output)
        return
    screen.table(("QUEUE", "GPU TYPE", "QUOTA", "UP TO", "HELD", "WAITING", ""), _rows(rules, book))
    if book.leases or book.waiting:
        screen.show("")
        screen.table(("GPUS", "QUEUE", "NAMESPACE", "RUN", "STEP", "ATTEMPT", "SINCE"), _people(book))
    if rules is None:
        screen.note("no queues are declared, so nothing is limited; declare them with `tiphys queues apply -f FILE`")
    if isinstance(rules, Misconfigured):
        screen.note(f"nothing new is granted: {rules.why}")


def find_ledger(api: "KubeApi", name: str) -> "Object | None":
    """The `GPULedger` of the namespace that ``api`` looks at, if there is one."""
    from tiphys.kube.resources import GPU_LEDGERS

    return api.get(GPU_LEDGERS, api.namespace, name)


def existing_ledger(api: "KubeApi", name: str) -> "Object":
    """As `find_ledger`.

    Raises:
        NotFoundError: there is none; the message says what to do.
    """
    found = find_ledger(api, name)
    if found is None:
        raise NotFoundError(
            f"there is no GPULedger {api.namespace}/{name}; choose the namespace that Tiphys is installed in with -n, "
            f"or make it with `tiphys queues apply -f FILE -n {api.namespace}`"
        )
    return found


def understood(found: "Object") -> tuple[QueueRules, Book]:
    """What a `GPULedger` says of queues, leases and those who wait.

    Raises:
        IntegrityError: its status is no book.
    """
    from tiphys_plugin.quota.ledger.ledger_object import rules_of

    try:
        book = status.decode(found["status"]) if "status" in found else Book()
    except IntegrityError as error:
        where = f"{found['metadata']['namespace']}/{found['metadata']['name']}"
        raise IntegrityError(
            f"the status of GPULedger {where} is damaged: {error}; repair it with `kubectl edit --subresource=status`"
        ) from error
    return rules_of(found), book


def _write(api: "KubeApi", name: str, declared: Queues, found: "Object | None") -> None:
    from tiphys.kube import Patch
    from tiphys.kube.resources import GPU_LEDGERS

    spec = declared.model_dump(mode="json", exclude_defaults=True)
    if found:
        # The whole spec at once, whatever the service writes into the status meanwhile.
        change = [{"op": "add", "path": "/spec", "value": spec}]
        written = api.patch(GPU_LEDGERS, api.namespace, name, change, Patch.JSON)
    else:
        try:
            written = api.create(GPU_LEDGERS, api.namespace, {"metadata": {"name": name}, "spec": spec})
        except NotFoundError as error:
            raise NotFoundError(
                f"GPULedger {api.namespace}/{name} cannot be made: {error}; "
                "install the chart of Tiphys, and choose its namespace with -n"
            ) from error
    if written["spec"] != spec:
        # The API server drops in silence what a kind does not declare.
        raise UsageError(
            f"GPULedger {api.namespace}/{name} has not kept all that the file says, because the kind GPULedger of this "
            "cluster is older than this command; `kubectl apply --server-side -f charts/tiphys/crds`, then apply again"
        )


def _changes(before: QueueRules, after: Queues, book: Book) -> Iterator[Sequence[str | Text]]:
    old = {(one.queue, one.gpu_type): one for one in usage(before, book)}
    new = {(one.queue, one.gpu_type): one for one in usage(after, book)}
    unlimited = "unlimited" if before is None else _NONE
    for place in [*new, *(place for place in old if place not in new)]:
        quota = old[place].quota if place in old else None
        told = unlimited if quota is None else str(quota)
        row = new.get(place) or Usage(*place, None, 0, 0)
        becomes = _NONE if row.quota is None else str(row.quota)
        held = Text(str(row.held), style="bold red" if row.exceeded else "")
        yield *place, told, Text(becomes, style="" if told == becomes else "bold"), held, str(row.waiting)


def _warn(screen: Screen, rows: list[Usage]) -> None:
    for one in rows:
        kind = None if one.gpu_type == "*" else one.gpu_type
        if one.exceeded:
            may = "has no quota for them" if one.quota is None else f"may hold {one.most}"
            screen.note(
                f"warning: queue {one.queue} holds {in_words(one.held, kind)} and {may}; "
                "nothing more is granted there until enough has come back"
            )
        elif one.waiting and one.quota is None:
            screen.note(
                f"warning: queue {one.queue} is asked for {in_words(one.waiting, kind)} and has no quota for them; "
                "the steps that wait for them will fail"
            )


def _rows(rules: QueueRules, book: Book) -> Iterator[Sequence[str | Text]]:
    said = {queue.name: _habits(queue) for queue in rules.queues} if isinstance(rules, Queues) else {}
    for one in usage(rules, book):
        held = Text(str(one.held), style="bold red" if one.quota is not None and one.exceeded else "")
        quota, most = (_NONE if number is None else str(number) for number in (one.quota, one.most))
        yield one.queue, one.gpu_type, quota, most, held, str(one.waiting), said.get(one.queue, "")


def _habits(queue: Queue) -> str:
    """What a queue does that others do not."""
    words = {
        "stopped": queue.stopped,
        "by GPU time": queue.order == "attained",
        "preempts lower priority": queue.preempts_lower_priority,
        "preempts longer": queue.preempts_longer,
        "reclaims": queue.reclaims,
        f"spares {queue.min_runtime_seconds} s": queue.min_runtime_seconds > 0,
    }
    return ", ".join(word for word, holds in words.items() if holds)


def _people(book: Book) -> Iterator[Sequence[str]]:
    for lease in book.leases:
        kind = lease.request.gpu_type if lease.pool == ANY_TYPE else lease.pool
        yield _person(lease.request, kind, lease.granted_at, "holds" if lease.leaving is None else "gives back")
    for one in book.waiting:
        yield _person(one.request, one.request.gpu_type, one.since, "waits for")


def _person(request: LeaseRequest, kind: str | None, since: datetime, what: str) -> Sequence[str]:
    gpus = f"{what} {in_words(request.gpus, kind)}"
    where = (request.queue, request.namespace, request.run, request.step, str(request.attempt))
    return gpus, *where, local_time(since)


def _document(namespace: str, name: str, rules: QueueRules, book: Book) -> dict[str, object]:
    encoded = status.encode(book)
    rows = [
        {
            "name": one.queue,
            "gpuType": one.gpu_type,
            "quota": one.quota,
            "most": one.most,
            "held": one.held,
            "borrowed": one.borrowed,
            "waiting": one.waiting,
            "stopped": one.stopped,
        }
        for one in usage(rules, book)
    ]
    told: dict[str, object] = {"apiVersion": API_VERSION, "kind": "QueueList", "namespace": namespace, "ledger": name}
    if isinstance(rules, Misconfigured):
        told["misconfigured"] = rules.why
    if isinstance(rules, Queues):
        told |= rules.model_dump(mode="json", include={"inventory"}, exclude_none=True)
        habits = {"preempts_lower_priority", "preempts_longer", "reclaims", "min_runtime_seconds"}
        by_name = {queue.name: queue.model_dump(include=habits, exclude_defaults=True) for queue in rules.queues}
        rows = [{**row, **by_name.get(str(row["name"]), {})} for row in rows]
    told |= {"limited": rules is not None, "queues": rows}
    return {**told, "leases": encoded["leases"], "waiting": encoded["waiting"]}

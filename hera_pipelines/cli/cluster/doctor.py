"""``tiphys doctor``: checks whether a store or a cluster meets the requirements of runs."""

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from hera_pipelines.cli.screen import Format, Screen
from hera_pipelines.cli.shared_options import ContextOption, FormatOption, KubeconfigOption, connect_cluster
from tiphys.errors import StoreError, UsageError
from tiphys.store.credentials import CredentialsHolder, bucket_policy, probe_program_credentials
from tiphys.store.layout import DATA
from tiphys.store.open import PLACEHOLDER
from tiphys.store.probe import ProbeFinding, is_store_usable, probe_store

EXAMPLES = """\b
Examples:
  tiphys doctor s3://ml-runs/tiphys
  tiphys doctor ./store -o json
  tiphys doctor --cluster -n ml -n research
  tiphys doctor 's3://ml-runs/{namespace}/tiphys' --policy services
  tiphys doctor 's3://ml-runs/{namespace}/tiphys' -n team-a --policy program
  tiphys doctor 's3://ml-runs/{namespace}/tiphys' -n team-a --as-program
"""

_RESULT_TEXTS = {
    True: Text("ok", style="green"),
    False: Text("FAILED", style="bold red"),
    None: Text("warn", style="yellow"),
}
STATE_TEXTS = {
    "ok": _RESULT_TEXTS[True],
    "failed": _RESULT_TEXTS[False],
    "warning": _RESULT_TEXTS[None],
    "unknown": Text("?", style="yellow"),
}


def doctor(
    command: typer.Context,
    url: Annotated[
        str | None, typer.Argument(help="Store to check: s3://, gs:// or az:// URL, file:///dir or a path.")
    ] = None,
    cluster: Annotated[bool, typer.Option("--cluster", help="Check a cluster instead of a store.")] = False,
    namespace: Annotated[
        list[str] | None,
        typer.Option(
            "-n",
            "--namespace",
            metavar="NAME",
            help="Namespace of workflows; may be repeated with --cluster. Default there: all that have the service "
            "account tiphys-workflow. With the URL of a store: what {namespace} in it stands for.",
        ),
    ] = None,
    as_program: Annotated[
        bool,
        typer.Option(
            "--as-program",
            help="Check the credentials in use as those of training programs: they must be able to write data/, and "
            "neither control/ nor the store of another tenant.",
        ),
    ] = False,
    policy: Annotated[
        CredentialsHolder | None,
        typer.Option(
            "--policy",
            help="Print the policy of S3 that credentials need, and check nothing: those of the training programs of "
            "a namespace, or those of the services and of people.",
        ),
    ] = None,
    principal: Annotated[
        list[str] | None,
        typer.Option(
            "--principal",
            metavar="USER",
            help="With --policy: name this user in it, for a server with policies of buckets only; may be repeated.",
        ),
    ] = None,
    context: ContextOption = None,
    kubeconfig: KubeconfigOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Check whether a store or a cluster is fit for runs.

    For a store, the checks cover create-only writes, races, listings, checksums
    and clocks; the test objects are removed again. A cluster is only read, and the
    Secrets tiphys-store of its namespaces are tried out in their stores. Each
    finding names its cause and a remedy. Exit code 75 if a check failed that runs
    need.
    """
    screen: Screen = command.obj
    namespaces = namespace or []
    if cluster == (url is not None):
        raise UsageError("give the URL of a store, or --cluster, and not both")
    if principal and not policy:
        raise UsageError("--principal names a user in a policy; add --policy, or leave it out")
    if url is None:
        if as_program or policy:
            raise UsageError("--as-program and --policy are for a store; give its URL instead of --cluster")
        _examine_cluster(screen, namespaces, context, kubeconfig, output)
        return
    if context or kubeconfig:
        raise UsageError("--context and --kubeconfig are for a cluster; add --cluster, or leave them out")
    own = _one_namespace(url, namespaces)
    store = url.replace(PLACEHOLDER, own) if own else url
    if policy:
        screen.document(bucket_policy(store, policy, principal or ()), Format.JSON)
    elif as_program:
        _examine_program_credentials(screen, url, own, output)
    else:
        _show_store_findings(screen, store, probe_store(store), output)


def _one_namespace(url: str, namespaces: list[str]) -> str:
    """The namespace that ``{namespace}`` in the URL of a store stands for; empty if none is given."""
    if namespaces and (len(namespaces) > 1 or PLACEHOLDER not in url):
        raise UsageError(
            f"with the URL of a store, --namespace gives the one namespace that {PLACEHOLDER} in it stands for; add "
            "--cluster to check the namespaces of a cluster, or leave it out"
        )
    return namespaces[0] if namespaces else ""


def _examine_program_credentials(screen: Screen, url: str, namespace: str, output: Format) -> None:
    findings, store = probe_program_credentials(url, namespace), url.replace(PLACEHOLDER, namespace)
    if is_store_usable(findings):
        findings += probe_store(store, (DATA,))
        remedy = _STORE_REMEDY
    else:
        remedy = f"give the credentials the policy of tiphys doctor {store} --policy program, and no other"
    _show_store_findings(screen, store, findings, output, remedy)


_STORE_REMEDY = "use another store, or repair this one"


def _show_store_findings(
    screen: Screen, url: str, findings: list[ProbeFinding], output: Format, remedy: str = _STORE_REMEDY
) -> None:
    if output == Format.TABLE:
        screen.table(
            ("RESULT", "CHECK", "FINDING"), [(_RESULT_TEXTS[f.ok], f.name, f.sentence) for f in findings], wraps=True
        )
    else:
        screen.document(_store_document(url, findings), output)
    if not is_store_usable(findings):
        failed = ", ".join(f.name for f in findings if f.ok is False)
        raise StoreError(f"{url} must not hold runs: {failed} failed; {remedy}")


def _store_document(url: str, findings: list[ProbeFinding]) -> dict[str, object]:
    return {
        "apiVersion": "tiphys.dev/v1alpha1",
        "kind": "StoreFindings",
        "store": url,
        "usable": is_store_usable(findings),
        "findings": [{"name": f.name, "ok": f.ok, "sentence": f.sentence} for f in findings],
    }


def _examine_cluster(
    screen: Screen, namespaces: list[str], context: str | None, kubeconfig: Path | None, output: Format
) -> None:
    from tiphys_controller.doctor import (  # no other command needs it
        CheckStatus,
        is_cluster_usable,
        observe_cluster,
        run_checks,
    )

    api = connect_cluster(kubeconfig, context, None)
    findings = run_checks(observe_cluster(api, namespaces))
    if output == Format.TABLE:
        screen.table(
            ("RESULT", "CHECK", "FINDING"),
            [
                (STATE_TEXTS[f.state.value], f.name, f"{f.sentence}\n→ {f.remedy}" if f.remedy else f.sentence)
                for f in findings
            ],
            wraps=True,
        )
    else:
        document = {"apiVersion": "tiphys.dev/v1alpha1", "kind": "ClusterFindings", "server": api.server}
        listed = [{**f._asdict(), "state": f.state.value} for f in findings]
        screen.document({**document, "usable": is_cluster_usable(findings), "findings": listed}, output)
    if not is_cluster_usable(findings):
        failed = ", ".join(dict.fromkeys(f.name for f in findings if f.state is CheckStatus.FAILED))
        raise StoreError(f"cluster {api.server} is not fit for runs: {failed} failed; each finding says what to do")

"""``tiphys doctor``: checks whether a store or a cluster meets the requirements of runs."""

from typing import Annotated

import typer

from hera_pipelines.cli.cluster.findings import show_findings
from hera_pipelines.cli.screen import Format, Screen
from hera_pipelines.cli.shared_options import FormatOption, InstallationOptions, ServerOptions, with_option_groups
from tiphys.errors import StoreError, UsageError
from tiphys.store.credentials import CredentialsHolder, bucket_policy
from tiphys.store.layout import CONTROL, DATA
from tiphys.store.open import PLACEHOLDER

EXAMPLES = """\b
Examples:
  tiphys doctor s3://ml-runs/tiphys
  tiphys doctor ./store -o json
  tiphys doctor --cluster -n ml -n research
  tiphys doctor 's3://ml-runs/{namespace}/tiphys' --policy services
  tiphys doctor 's3://ml-runs/{namespace}/tiphys' -n team-a --policy program
  tiphys doctor 's3://ml-runs/{namespace}/tiphys' -n team-a --as-program
"""


@with_option_groups
def doctor(
    command: typer.Context,
    url: Annotated[
        str | None, typer.Argument(help="Store to check: s3://, gs:// or az:// URL, file:///dir or a path.")
    ] = None,
    *,
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
    server: ServerOptions,
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
        _examine_cluster(screen, namespaces, server, output)
        return
    if server.context or server.kubeconfig:
        raise UsageError("--context and --kubeconfig are for a cluster; add --cluster, or leave them out")
    own = _one_namespace(url, namespaces)
    if policy:
        store = url.replace(PLACEHOLDER, own) if own else url
        screen.document(bucket_policy(store, policy, principal or ()), Format.JSON)
    else:
        _examine_store(screen, url, own, output, as_program=as_program)


def _one_namespace(url: str, namespaces: list[str]) -> str:
    """The namespace that ``{namespace}`` in the URL of a store stands for; empty if none is given."""
    if namespaces and (len(namespaces) > 1 or PLACEHOLDER not in url):
        raise UsageError(
            f"with the URL of a store, --namespace gives the one namespace that {PLACEHOLDER} in it stands for; add "
            "--cluster to check the namespaces of a cluster, or leave it out"
        )
    return namespaces[0] if namespaces else ""


def _examine_store(screen: Screen, url: str, namespace: str, output: Format, *, as_program: bool) -> None:
    from tiphys_controller.doctor import failed_checks
    from tiphys_controller.doctor.store_credentials import probe_program_credentials
    from tiphys_controller.doctor.store_probe import probe_store

    store = url.replace(PLACEHOLDER, namespace) if namespace else url
    findings = probe_program_credentials(url, namespace) if as_program else []
    if not failed_checks(findings):
        findings += probe_store(store, (DATA,) if as_program else (CONTROL, DATA))
    show_findings(screen, findings, output, {"store": store})
    if failed := failed_checks(findings):
        raise StoreError(f"{store} must not hold runs: {', '.join(failed)} failed; each finding says what to do")


def _examine_cluster(screen: Screen, namespaces: list[str], server: InstallationOptions, output: Format) -> None:
    from tiphys_controller.doctor import check_cluster, failed_checks, observe_cluster

    api = server.connect()
    findings = check_cluster(observe_cluster(api, namespaces))
    show_findings(screen, findings, output, {"server": api.server})
    if failed := failed_checks(findings):
        names = ", ".join(failed)
        raise StoreError(f"cluster {api.server} is not fit for runs: {names} failed; each finding says what to do")

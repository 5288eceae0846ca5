"""``tiphys doctor``: checks whether a store or a cluster meets the requirements of runs."""

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from hera_pipelines.cli.screen import Format, Screen
from hera_pipelines.cli.shared_options import ContextOption, KubeconfigOption, connect_cluster
from tiphys.errors import StoreError, UsageError
from tiphys.store.probe import ProbeFinding, is_store_usable, probe_store

EXAMPLES = """\b
Examples:
  tiphys doctor s3://ml/tiphys
  tiphys doctor ./store -o json
  tiphys doctor --cluster -n ml -n research
"""

_RESULT_TEXTS = {
    True: Text("ok", style="green"),
    False: Text("FAILED", style="bold red"),
    None: Text("warn", style="yellow"),
}
_STATE_TEXTS = {
    "ok": _RESULT_TEXTS[True],
    "failed": _RESULT_TEXTS[False],
    "warning": _RESULT_TEXTS[None],
    "unknown": Text("?", style="yellow"),
}


def doctor(
    command: typer.Context,
    url: Annotated[
        str | None, typer.Argument(help="Store to check: s3://bucket/prefix, file:///dir or a path.")
    ] = None,
    cluster: Annotated[bool, typer.Option("--cluster", help="Check a cluster instead of a store.")] = False,
    namespace: Annotated[
        list[str] | None,
        typer.Option(
            "-n",
            "--namespace",
            metavar="NAME",
            help="Namespace of workflows; may be repeated. Default: all that have the service account tiphys-workflow.",
        ),
    ] = None,
    context: ContextOption = None,
    kubeconfig: KubeconfigOption = None,
    output: Annotated[Format, typer.Option("-o", "--format", help="Output format.")] = Format.TABLE,
) -> None:
    """Check whether a store or a cluster is fit for runs.

    For a store, the checks cover create-only writes, races, listings, checksums
    and clocks; the test objects are removed again. A cluster is only read. Each
    finding names its cause and a remedy. Exit code 75 if a check failed that runs
    need.
    """
    screen: Screen = command.obj
    if cluster == (url is not None):
        raise UsageError("give the URL of a store, or --cluster, and not both")
    if cluster:
        _examine_cluster(screen, namespace or [], context, kubeconfig, output)
    elif namespace or context or kubeconfig:
        raise UsageError("--namespace, --context and --kubeconfig are for a cluster; add --cluster, or leave them out")
    elif url is not None:
        _examine_store(screen, url, output)


def _examine_store(screen: Screen, url: str, output: Format) -> None:
    findings = probe_store(url)
    if output == Format.TABLE:
        screen.table(("RESULT", "CHECK", "FINDING"), [(_RESULT_TEXTS[f.ok], f.name, f.sentence) for f in findings])
    else:
        screen.document(_store_document(url, findings), output)
    if not is_store_usable(findings):
        failed = ", ".join(f.name for f in findings if f.ok is False)
        raise StoreError(f"{url} must not hold runs: {failed} failed; use another store, or repair this one")


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
                (_STATE_TEXTS[f.state.value], f.name, f"{f.sentence}\n→ {f.remedy}" if f.remedy else f.sentence)
                for f in findings
            ],
        )
    else:
        document = {"apiVersion": "tiphys.dev/v1alpha1", "kind": "ClusterFindings", "server": api.server}
        listed = [{**f._asdict(), "state": f.state.value} for f in findings]
        screen.document({**document, "usable": is_cluster_usable(findings), "findings": listed}, output)
    if not is_cluster_usable(findings):
        failed = ", ".join(dict.fromkeys(f.name for f in findings if f.state is CheckStatus.FAILED))
        raise StoreError(f"cluster {api.server} is not fit for runs: {failed} failed; each finding says what to do")

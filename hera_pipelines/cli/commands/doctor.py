"""``tiphys doctor``: may this storage be trusted with runs, and is this cluster fit for them?"""

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from hera_pipelines.cli.screen import Format, Screen
from hera_pipelines.cli.shared_options import ContextOption, KubeconfigOption, connect
from tiphys.errors import StoreError, UsageError
from tiphys.store.probe import Finding, probe, verdict

EXAMPLES = """\b
Examples:
  tiphys doctor s3://ml/tiphys
  tiphys doctor ./store -o json
  tiphys doctor --cluster -n ml -n research
"""

_WORDS = {True: Text("ok", style="green"), False: Text("FAILED", style="bold red"), None: Text("warn", style="yellow")}
_STATES = {
    "ok": _WORDS[True],
    "failed": _WORDS[False],
    "warning": _WORDS[None],
    "unknown": Text("?", style="yellow"),
}


def doctor(
    command: typer.Context,
    url: Annotated[
        str | None, typer.Argument(help="Store to examine: s3://bucket/prefix, file:///dir or a path.")
    ] = None,
    cluster: Annotated[bool, typer.Option("--cluster", help="Examine a cluster in place of a store.")] = False,
    namespace: Annotated[
        list[str] | None,
        typer.Option(
            "-n",
            "--namespace",
            metavar="NAME",
            help="Namespace of workflows; may be repeated. Otherwise those that hold the account tiphys-workflow.",
        ),
    ] = None,
    context: ContextOption = None,
    kubeconfig: KubeconfigOption = None,
    output: Annotated[Format, typer.Option("-o", "--format", help="Form of the findings.")] = Format.TABLE,
) -> None:
    """Examine a store (create-only writes, races, listings, checksums, clocks), or with --cluster a cluster.

    A cluster is only looked at; what was written to a store is removed again.
    Each finding names cause and remedy. Exit code 75 if runs would not work.
    """
    screen: Screen = command.obj
    if cluster == (url is not None):
        raise UsageError("give the URL of a store, or --cluster, and not both")
    if cluster:
        _cluster(screen, namespace or [], context, kubeconfig, output)
    elif namespace or context or kubeconfig:
        raise UsageError("--namespace, --context and --kubeconfig are for a cluster; add --cluster, or leave them out")
    elif url is not None:
        _store(screen, url, output)


def _store(screen: Screen, url: str, output: Format) -> None:
    findings = probe(url)
    if output == Format.TABLE:
        screen.table(("RESULT", "CHECK", "FINDING"), [(_WORDS[f.ok], f.name, f.sentence) for f in findings])
    else:
        screen.document(_document(url, findings), output)
    if not verdict(findings):
        failed = ", ".join(f.name for f in findings if f.ok is False)
        raise StoreError(f"{url} must not hold runs: {failed} failed; use another store, or repair this one")


def _document(url: str, findings: list[Finding]) -> dict[str, object]:
    return {
        "apiVersion": "tiphys.dev/v1alpha1",
        "kind": "StoreFindings",
        "store": url,
        "usable": verdict(findings),
        "findings": [{"name": f.name, "ok": f.ok, "sentence": f.sentence} for f in findings],
    }


def _cluster(
    screen: Screen, namespaces: list[str], context: str | None, kubeconfig: Path | None, output: Format
) -> None:
    from tiphys_controller.doctor import State, examine, observe, usable  # no other command needs it

    api = connect(kubeconfig, context, None)
    findings = examine(observe(api, namespaces))
    if output == Format.TABLE:
        screen.table(
            ("RESULT", "CHECK", "FINDING"),
            [
                (_STATES[f.state.value], f.name, f"{f.sentence}\n→ {f.remedy}" if f.remedy else f.sentence)
                for f in findings
            ],
        )
    else:
        document = {"apiVersion": "tiphys.dev/v1alpha1", "kind": "ClusterFindings", "server": api.server}
        listed = [{**f._asdict(), "state": f.state.value} for f in findings]
        screen.document({**document, "usable": usable(findings), "findings": listed}, output)
    if not usable(findings):
        failed = ", ".join(dict.fromkeys(f.name for f in findings if f.state is State.FAILED))
        raise StoreError(f"cluster {api.server} is not fit for runs: {failed} failed; each finding says what to do")

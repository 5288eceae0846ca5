"""``tiphys doctor``: may this storage be trusted with runs?"""

from typing import Annotated

import typer
from rich.text import Text

from hera_pipelines.cli.screen import Format, Screen
from tiphys.errors import StoreError
from tiphys.store.probe import Finding, probe, verdict

EXAMPLES = """\b
Examples:
  tiphys doctor s3://ml/tiphys
  tiphys doctor ./store -o json
"""

_WORDS = {True: Text("ok", style="green"), False: Text("FAILED", style="bold red"), None: Text("warn", style="yellow")}


def doctor(
    context: typer.Context,
    url: Annotated[str, typer.Argument(help="Store to examine: s3://bucket/prefix, file:///dir or a path.")],
    output: Annotated[Format, typer.Option("-o", "--format", help="Form of the findings.")] = Format.TABLE,
) -> None:
    """Examine a store: create-only writes, races, listings, checksums, clocks.

    Everything it writes it removes again. Exit code 75 if the store may not be used.
    """
    screen: Screen = context.obj
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

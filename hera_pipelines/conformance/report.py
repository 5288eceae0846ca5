"""The report: a document, and a page of HTML with the same content."""

import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from tiphys_controller import API_VERSION
from tiphys_controller.doctor.check import CheckStatus, Finding
from tiphys_controller.doctor.observed import ClusterObservation, read_argo_version
from tiphys_controller.doctor.store_probe import read_reply_headers

import tiphys
from hera_pipelines.conformance.promises import PROMISES
from hera_pipelines.draw.templates import load_picture_template
from tiphys.store import S3Store, Store

RESULTS = {
    CheckStatus.OK: "held",
    CheckStatus.WARNING: "held, with a warning",
    CheckStatus.FAILED: "broken",
    CheckStatus.UNKNOWN: "not tried",
}


def build_report(findings: Sequence[Finding], **facts: object) -> dict[str, Any]:
    """The report as a document; ``facts`` say what was tried, and when. Its ``result`` is the worst of all."""
    counts = Counter(RESULTS[finding.state] for finding in findings)
    promises = [
        {
            "name": finding.check,
            "promise": PROMISES[finding.check],
            "result": RESULTS[finding.state],
            "evidence": finding.sentence,
            "remedy": finding.remedy,
        }
        for finding in findings
    ]
    return {
        "apiVersion": API_VERSION,
        "kind": "ConformanceReport",
        "result": next((result for result in ("broken", "not tried") if counts[result]), "held"),
        "summary": ", ".join(f"{counts[result]} {result}" for result in RESULTS.values() if counts[result]),
        **facts,
        "promises": promises,
    }


def report_page(report: Mapping[str, Any]) -> str:
    """The document of `build_report` as a self-contained page of HTML."""
    return load_picture_template("conformance.html.jinja").render(title=f"Conformance of {report['store']}", **report)


def read_versions(store: Store, cluster: ClusterObservation | None) -> dict[str, str]:
    """Versions of everything that takes part, as far as it names one. Raises `StoreError` without an answer."""
    versions = {"tiphys": tiphys.__version__, "python": platform.python_version(), "system": platform.platform()}
    if isinstance(store, S3Store):
        versions["store"] = read_reply_headers(store).get("server", "it names none")
    if cluster is not None:
        versions["kubernetes"] = str(cluster.version)
        versions["argo"] = ", ".join(str(read_argo_version(found)) for found in cluster.argo.found) or "not found"
        for found in cluster.tiphys.found:
            containers = found["spec"]["template"]["spec"]["containers"]
            versions[found["metadata"]["name"]] = ", ".join(container.get("image", "") for container in containers)
    return versions

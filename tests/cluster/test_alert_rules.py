"""Each alert of the chart fires on the metrics of its fault, and not on those of health, by Prometheus' own test tool.

`promtool` has a clock of its own, so an hour of samples takes no time.
"""

import shutil
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from support.checks.chart import CI_VALUES, dashboard_expressions, find_helm, named, render

TENANTS = next(file for file in CI_VALUES if file.stem == "tenants-values")
HERE = 'namespace="system", service="ours-pods"'
FIT = 'namespace="ml", run="digits", step="fit", pod="digits-fit"'

pytestmark = [
    pytest.mark.skipif(
        not shutil.which("promtool"), reason="promtool, of the Debian package prometheus, is not installed"
    ),
    pytest.mark.skipif(not find_helm(), reason="there is no helm on PATH, nor in the cache of the test cluster"),
]


class Case(NamedTuple):
    """Samples of one minute each, by series, in Prometheus' notation: ``0+1x30`` grows by 1 thirty times."""

    minutes: int
    """When to look."""
    red: dict[str, str]
    green: dict[str, str]


def counted(name: str, **labels: str) -> str:
    """A series of the services."""
    return _series(name, HERE, labels)


def trained(name: str, **labels: str) -> str:
    """A series of a training pod."""
    return _series(name, FIT, labels)


def _series(name: str, target: str, labels: dict[str, str]) -> str:
    own = [f'{key}="{value}"' for key, value in labels.items()]
    return f"{name}{{{', '.join([target, *own])}}}"


def once(series: str, minutes: int = 20) -> Case:
    """A counter that grows once, and one that does not."""
    return Case(minutes, {series: f"0x{minutes - 5} 1x10"}, {series: f"3x{minutes + 10}"})


def level(series: str, minutes: int, bad: float, good: float) -> Case:
    """A gauge at a bad level for all the time, and at a good one."""
    return Case(minutes, {series: f"{bad}x{minutes}"}, {series: f"{good}x{minutes}"})


COMMITTED = "tiphys_checkpoint_last_commit_timestamp_seconds"
SAVES = "tiphys_checkpoint_saves_total"
ORPHANED, WAITING = counted("tiphys_controller_leases_orphaned"), counted("tiphys_gpu_requests_waiting", queue="a")
CASES = {
    "TiphysDown": level(counted("up", pod="ours-plugin-1"), 10, 0, 1),
    "TiphysNoLeader": level(counted("tiphys_controller_leads", pod="c"), 10, 0, 1),
    "TiphysStoreDown": level(counted("tiphys_store_up", tenant="ml"), 10, 0, 1),
    "TiphysUnavailable": Case(
        30,
        {counted("tiphys_plugin_answers_total", tenant="ml", answer="unavailable"): "0+1x30"},
        {counted("tiphys_plugin_answers_total", tenant="ml", answer="succeeded"): "0+1x30"},
    ),
    "TiphysAttemptForced": once(counted("tiphys_attempts_forced_total", tenant="ml")),
    "TiphysLeaseForced": once(counted("tiphys_leases_forced_total")),
    "TiphysLeaseOrphaned": Case(180, {ORPHANED: "1x180", WAITING: "2x180"}, {ORPHANED: "1x180", WAITING: "0x180"}),
    "TiphysLeaseCapped": level(counted("tiphys_leases_capped_total", tenant="ml"), 5, 1, 0),
    "TiphysLedgerShareNearlyUsed": level(counted("tiphys_ledger_share_used", tenant="ml"), 15, 0.9, 0.7),
    "TiphysLedgerNearlyFull": level(counted("tiphys_ledger_room_used"), 15, 0.9, 0.7),
    "TiphysCheckpointSkipped": once(counted("tiphys_checkpoints_skipped_total", tenant="ml")),
    "TiphysBreakerOpen": level(counted("tiphys_controller_breakers_open"), 5, 1, 0),
    "TiphysResumeFails": Case(
        40,
        {counted("tiphys_controller_failures_total", what="resume"): "0+1x40"},
        {counted("tiphys_controller_failures_total", what="look"): "0+1x40"},
    ),
    "TiphysCallsRefused": Case(
        20,
        {counted("tiphys_controller_http_calls_total", status="401"): "0+60x20"},
        {counted("tiphys_controller_http_calls_total", status="202"): "0+60x20"},
    ),
    "TiphysQueueStarving": level(counted("tiphys_gpu_requests_oldest_seconds", queue="a"), 5, 14_401, 14_399),
    "TiphysRunFailed": Case(
        20,
        {counted("tiphys_submissions_ended_total", tenant="ml", phase="Failed"): "0x15 1x10"},
        {counted("tiphys_submissions_ended_total", tenant="ml", phase="Succeeded"): "0+1x30"},
    ),
    "TiphysOutOfMemorySpike": Case(
        40,
        {counted("tiphys_attempts_ended_total", tenant="ml", cause="out_of_memory"): "0x10 1x5 3x5 6x30"},
        {counted("tiphys_attempts_ended_total", tenant="ml", cause="preemption"): "0+1x60"},
    ),
    "TiphysTrainingStalled": Case(
        40,
        {trained("tiphys_train_steps_total", rank="0"): "0+60x20 1200x30"},
        {
            trained("tiphys_train_steps_total", rank="0"): "0+60x20 1200x10 1201x30",
            trained("tiphys_train_steps_total", attempt="2"): "_x30 7x20",  # it has just begun, and steps take minutes
        },
    ),
    "TiphysCheckpointStale": Case(
        60,
        {trained(COMMITTED): "0x60", trained("tiphys_checkpoint_interval_seconds"): "600x60"},
        {trained(COMMITTED): "0x20 1800x40", trained("tiphys_checkpoint_interval_seconds"): "600x60"},
    ),
    "TiphysCheckpointUploadFailing": Case(
        40,
        {trained(SAVES, result="failed"): "0+1x40", trained(SAVES, result="committed"): "2x40"},
        {trained(SAVES, result="failed"): "0+1x40", trained(SAVES, result="committed"): "2x30 3x10"},
    ),
}


def rules() -> dict[str, Any]:
    spec: dict[str, Any] = named(render(file=TENANTS), "PrometheusRule", "ours")["spec"]
    return spec


def test_every_alert_has_a_case() -> None:
    assert {rule["alert"] for group in rules()["groups"] for rule in group["rules"]} == set(CASES)


@pytest.mark.parametrize("state", ["red", "green"])
@pytest.mark.parametrize("alert", CASES)
def test_an_alert_fires_on_its_fault_only(alert: str, state: str, tmp_path: Path) -> None:
    case = CASES[alert]
    series = case.red if state == "red" else case.green
    firing = f'count(ALERTS{{alertname="{alert}", alertstate="firing"}}) or vector(0)'
    looked = {"expr": firing, "eval_time": f"{case.minutes}m", "exp_samples": [{"value": int(state == "red")}]}
    given = [{"series": name, "values": values} for name, values in series.items()]
    tests = [{"interval": "1m", "input_series": given, "promql_expr_test": [looked]}]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(rules()))
    (tmp_path / "test.yaml").write_text(yaml.safe_dump({"rule_files": ["rules.yaml"], "tests": tests}))
    done = subprocess.run(
        ["promtool", "test", "rules", "test.yaml"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_alerts_link_to_their_runbooks_where_these_are() -> None:
    found = render("prometheusRule.runbooks=https://wiki.example.com/runbooks", file=TENANTS)
    for rule in named(found, "PrometheusRule", "ours")["spec"]["groups"][0]["rules"]:
        assert rule["annotations"]["runbook_url"] == f"https://wiki.example.com/runbooks#{rule['alert'].lower()}"


def test_every_query_of_a_dashboard_is_one(tmp_path: Path) -> None:
    recorded = [{"record": f"panel:{number}", "expr": expr} for number, expr in enumerate(dashboard_expressions())]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": recorded}]}))
    done = subprocess.run(["promtool", "check", "rules", tmp_path / "rules.yaml"], capture_output=True, text=True)
    assert recorded
    assert done.returncode == 0, done.stdout + done.stderr

"""What the training loop tells Prometheus, where it can be seen, and what happens where it cannot.

| asked for | shown |
|---|---|
| nothing | nothing |
| a port | an endpoint; local ranks on ports of their own |
| what cannot be done | one line in the log, and the training goes on |
"""

import os
import re
import socket
import sys
import urllib.request
from datetime import UTC, datetime
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tiphys.checkpoint.telemetry.metrics import (
    METRIC_DECLARATIONS,
    SAVE_FAILURE_CAUSES,
    MetricsEndpoint,
    NoMetrics,
    TrainingMetrics,
    classify_save_failure,
    open_metrics,
)
from tiphys.errors import FencedError, ForbiddenError, IntegrityError, StoreError, UsageError

PAGE = Path(__file__).parents[4] / "docs" / "checkpoints.md"
ACCEPT = os.environ.get("TIPHYS_GOLDEN") == "1"


def samples(text):
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                others = {name: value for name, value in sample.labels.items() if name != "rank"}
                found[(sample.name, *others.values())] = sample.value
    return found


def shown(metrics):
    from prometheus_client import generate_latest

    return samples(generate_latest(metrics.registry).decode())


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_steps_and_those_that_a_failure_would_cost():
    metrics = TrainingMetrics()
    for step in (1, 2, 3):
        metrics.record_step(step)
    assert shown(metrics)["tiphys_train_steps_total",] == 3
    assert shown(metrics)["tiphys_train_steps_since_checkpoint",] == 3
    metrics.record_save(2)  # committed behind the training
    assert shown(metrics)["tiphys_train_steps_since_checkpoint",] == 1
    metrics.record_save()
    assert shown(metrics)["tiphys_train_steps_since_checkpoint",] == 0


def test_a_resumed_process_counts_its_own_steps():
    known, unknown = TrainingMetrics(), TrainingMetrics()
    known.record_restore(1.0, 5, global_step=100)
    for metrics in (known, unknown):
        metrics.record_step(110)
        metrics.record_step(120)
    assert shown(known)["tiphys_train_steps_total",] == 20
    assert shown(known)["tiphys_train_steps_since_checkpoint",] == 20
    assert shown(unknown)["tiphys_train_steps_total",] == 11


def test_saves_by_result_and_failures_by_cause():
    metrics = TrainingMetrics()
    metrics.record_stall(0.05)
    metrics.record_upload(2.0, 1000)
    metrics.record_save(1)
    metrics.record_failure("storage")
    metrics.record_failure("cosmic rays")
    metrics.record_skip()
    found = shown(metrics)
    assert found["tiphys_checkpoint_saves_total", "committed"] == 1
    assert found["tiphys_checkpoint_saves_total", "failed"] == 2
    assert found["tiphys_checkpoint_saves_total", "skipped"] == 1
    assert found["tiphys_checkpoint_save_failures_total", "storage"] == 1
    assert found["tiphys_checkpoint_save_failures_total", "other"] == 1
    assert found["tiphys_checkpoint_upload_bytes_total",] == 1000
    assert found["tiphys_checkpoint_stall_seconds_sum",] == 0.05
    assert found["tiphys_checkpoint_upload_seconds_count",] == 1


def test_metrics_show_the_last_commit_and_the_interval_of_saves():
    times = iter([100, 160, 250])
    timed = TrainingMetrics(interval_seconds=600.0, now=lambda: datetime.fromtimestamp(next(times), UTC))
    assert shown(timed)["tiphys_checkpoint_last_commit_timestamp_seconds",] == 100, "the start counts as a commit"
    timed.record_save(1)
    timed.record_save(2)
    assert shown(timed)["tiphys_checkpoint_last_commit_timestamp_seconds",] == 250
    assert shown(timed)["tiphys_checkpoint_interval_seconds",] == 600

    clock = iter([160.0, 250.0])
    counted = TrainingMetrics(clock=lambda: next(clock))
    counted.record_save(1)
    assert ("tiphys_checkpoint_interval_seconds",) not in shown(counted), "one save is no interval"
    counted.record_save(2)
    assert shown(counted)["tiphys_checkpoint_interval_seconds",] == 90


def test_a_first_failure_is_an_increase():
    found = shown(TrainingMetrics())
    assert {found["tiphys_checkpoint_saves_total", result] for result in ("committed", "failed", "skipped")} == {0}


def test_restores():
    metrics = TrainingMetrics()
    metrics.record_verify_failure()
    metrics.record_restore(3.0, 2000)
    found = shown(metrics)
    assert found["tiphys_checkpoint_verify_failures_total",] == 1
    assert found["tiphys_checkpoint_restore_bytes_total",] == 2000
    assert found["tiphys_checkpoint_restore_seconds_sum",] == 3.0


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (StoreError("x"), "storage"),
        (ForbiddenError("x"), "forbidden"),
        (IntegrityError("x"), "integrity"),
        (FencedError("x"), "fenced"),
        (UsageError("x"), "state"),
        (TimeoutError("x"), "timeout"),
        (MemoryError("x"), "other"),
    ],
)
def test_causes_are_few_and_known(error, cause):
    assert classify_save_failure(error) == cause
    assert cause in SAVE_FAILURE_CAUSES


def test_no_label_has_values_without_a_bound():
    assert {label for declared in METRIC_DECLARATIONS for label in declared.labels} == {"result", "cause"}
    metrics = TrainingMetrics(rank="3")
    metrics.record_step(1)
    families = [family for family in metrics.registry.collect() if family.samples]
    assert {sample.labels.get("rank") for family in families for sample in family.samples} == {"3"}


def test_kinds_of_metrics_take_the_same_calls():
    calls = {name for name in vars(TrainingMetrics) if not name.startswith("_")}
    assert calls == {name for name in vars(NoMetrics) if not name.startswith("_")}


def test_metrics_are_off_unless_asked_for(capsys):
    metrics = open_metrics({})
    metrics.record_step(1)
    metrics.close()
    assert type(metrics) is NoMetrics
    assert capsys.readouterr().err == ""


def test_an_endpoint_answers():
    metrics: NoMetrics = NoMetrics()
    while type(metrics) is NoMetrics:  # somebody else may take the port first
        port = free_port()
        metrics = open_metrics({"TIPHYS_METRICS": f"port:127.0.0.1:{port}", "RANK": "2"})
    try:
        metrics.record_step(7)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
            text = answer.read().decode()
    finally:
        metrics.close()
    assert samples(text)["tiphys_train_steps_total",] == 1
    assert 'tiphys_train_steps_total{rank="2"} 1.0' in text


def test_local_ranks_have_ports_of_their_own():
    with socket.socket() as first:
        first.bind(("127.0.0.1", 0))
        first.listen()
        port = first.getsockname()[1]
        metrics = open_metrics({"TIPHYS_METRICS": f"port:127.0.0.1:{port - 1}", "LOCAL_RANK": "1"})
        assert type(metrics) is NoMetrics  # it asked for the port that is taken


def test_a_port_that_is_taken_costs_the_metrics_and_not_the_training(capsys):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        metrics = open_metrics({"TIPHYS_METRICS": f"port:127.0.0.1:{other.getsockname()[1]}"})
        metrics.record_step(1)
    assert re.match(
        r"tiphys: no metrics, although TIPHYS_METRICS=port:127.* the training continues", capsys.readouterr().err
    )


def test_an_image_without_the_library_trains_without_metrics(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    assert type(open_metrics({"TIPHYS_METRICS": "port:9464"})) is NoMetrics
    assert "lacks prometheus-client; install tiphys[metrics]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "exposure"),
    [
        ("port:9464", MetricsEndpoint(address="0.0.0.0", port=9464)),
        ("port:127.0.0.1:9464", MetricsEndpoint(address="127.0.0.1", port=9464)),
        ("port:[::1]:9464", MetricsEndpoint(address="::1", port=9464)),
    ],
)
def test_metrics_are_exposed_at_a_port(text, exposure):
    assert MetricsEndpoint.parse(text) == exposure


@pytest.mark.parametrize("text", ["9464", "port:", "port:0", "port:70000", "textfile:/var/lib/node", "statsd:8125"])
def test_an_invalid_metrics_setting_is_refused_before_the_training_begins(text):
    with pytest.raises(UsageError, match=r"TIPHYS_METRICS=.* is not valid: write port:9464"):
        open_metrics({"TIPHYS_METRICS": text})


def metrics_table():
    """Return the declarations as the Markdown table of the documentation."""
    rows = ["| metric | kind | meaning |", "|---|---|---|"]
    for declared in METRIC_DECLARATIONS:
        exported_name = declared.name + ("_total" if declared.kind == "counter" else "")
        rows.append(f"| `{exported_name}` | {declared.kind} | {declared.meaning} |")
    return "\n".join(rows) + "\n"


def test_the_page_lists_every_metric():
    page = PAGE.read_text()
    expected = re.sub(r"\| metric \| kind \| meaning \|\n(\|.*\n)+", lambda _: metrics_table(), page)
    if ACCEPT:
        PAGE.write_text(expected)
    assert metrics_table() in PAGE.read_text(), "if this is meant, run `make golden` and read the diff"

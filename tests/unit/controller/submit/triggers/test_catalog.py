"""Which triggers count, and at what the triggers of a namespace may look.

| the administrator allows | a trigger of `ml` at | |
|---|---|---|
| `s3://raw/{namespace}` | `raw/ml/…` | allowed |
| | `raw/nlp/…`, `raw/ml-2/…`, `raw/ml`, `raw/`, another bucket | refused |
| `s3://raw` | anything in `raw` | allowed |
| anything | a run store, its own or another's | refused |
"""

from typing import Any

import pytest
from support.stories.triggers import CREATED, SOURCE, STORE_URL, template, version
from tiphys_controller.submit.triggers.catalog import (
    MAX_TRIGGERS_PER_NAMESPACE,
    ObjectSources,
    TriggerCatalog,
    read_trigger,
    read_triggers,
)

from tiphys.errors import UsageError
from tiphys.protocol.compiled_workflow import Manifest
from tiphys.records import TriggerSpec
from tiphys.records.trigger import TRIGGER_ANNOTATION

SOURCES = ObjectSources([SOURCE], STORE_URL)


@pytest.mark.parametrize(
    ("allowed", "objects"),
    [
        ("s3://raw/{namespace}", "s3://raw/ml/"),
        ("s3://raw/{namespace}/", "s3://raw/ml/in/2026"),
        ("s3://raw-{namespace}", "s3://raw-ml/in/"),
        ("s3://raw", "s3://raw"),
        ("s3://raw/", "s3://raw/anything"),
        ("s3://runs", "s3://runs/ml/data/"),
    ],
)
def test_a_trigger_may_look_at_what_its_namespace_is_allowed(allowed: str, objects: str) -> None:
    ObjectSources([allowed], STORE_URL).check("ml", TriggerSpec(objects=objects))


@pytest.mark.parametrize(
    ("allowed", "objects"),
    [
        ("s3://raw/{namespace}", "s3://raw/nlp/"),
        ("s3://raw/{namespace}", "s3://raw/ml-2/"),
        ("s3://raw/{namespace}", "s3://raw/ml"),
        ("s3://raw/{namespace}", "s3://raw/m"),
        ("s3://raw/{namespace}", "s3://raw"),
        ("s3://raw/{namespace}", "s3://other/ml/"),
        ("s3://raw/{namespace}", "s3://raw/%6dl/"),
        ("s3://raw-{namespace}", "s3://raw-nlp/"),
        ("s3://raw", "s3://raw2/"),
    ],
)
def test_a_trigger_may_look_at_nothing_else(allowed: str, objects: str) -> None:
    with pytest.raises(UsageError, match="the administrator allows triggers of namespace ml only"):
        ObjectSources([allowed], STORE_URL).check("ml", TriggerSpec(objects=objects))


@pytest.mark.parametrize("objects", ["s3://runs/ml/tiphys/", "s3://runs/nlp/tiphys/data/runs/"])
def test_objects_of_a_run_store_cannot_be_trigger_sources(objects: str) -> None:
    with pytest.raises(UsageError, match="is a run store"):
        ObjectSources(["s3://runs"], STORE_URL).check("ml", TriggerSpec(objects=objects))


@pytest.mark.parametrize(
    ("key", "stored"),
    [
        ("ml/tiphys/control/runs/a/run.json", True),
        ("nlp/tiphys/data/x", True),
        ("ml/tiphys", False),
        ("ml/tiphys2/x", False),
        ("ml/a/tiphys/x", False),
    ],
)
def test_objects_of_run_stores_are_known(key: str, stored: bool) -> None:
    assert ObjectSources(["s3://runs"], STORE_URL).is_stored_by_tiphys("runs", key) is stored
    assert not ObjectSources(["s3://runs"], "/a/folder").is_stored_by_tiphys("runs", key)


@pytest.mark.parametrize("url", ["s3://raw/{name}", "raw/ml", "file:///raw", "s3://raw--x-s3/", "s3://", "s3://raw?x"])
def test_a_source_that_cannot_be_is_refused_at_the_start(url: str) -> None:
    with pytest.raises(UsageError):
        ObjectSources([url], STORE_URL)


def test_a_trigger_begins_when_its_template_was_created_or_when_it_says() -> None:
    plain, early = template(objects="s3://raw/ml/"), template(objects="s3://raw/ml/", since="2026-01-01T00:00:00Z")
    for document, old in ((plain, False), (early, True)):
        trigger = read_trigger(document)
        assert trigger is not None
        assert trigger.wants(version("ml/new"))
        assert trigger.wants(version("ml/same second", after_seconds=0.0))
        assert trigger.wants(version("ml/old", after_seconds=-1.0)) is old
    assert trigger.created_at == CREATED


@pytest.mark.parametrize(
    ("key", "matches"),
    [
        ("ml/in/a.csv", True),
        ("ml/in/2026/b.csv", True),
        ("ml/in/a.CSV", False),
        ("ml/in/a.csv.tmp", False),
        ("ml/in/.csv/", False),
        ("ml/a.csv", False),
        ("ml/in/<b>\x1b[2J\n.csv", True),
    ],
)
def test_prefix_and_pattern_choose_objects(key: str, matches: bool) -> None:
    trigger = read_trigger(template(objects="s3://raw/ml/in/", pattern="*.csv"))
    assert trigger is not None
    assert trigger.wants(version(key)) is matches
    assert not trigger.wants(version(key, bucket="other"))


def test_a_bad_trigger_leaves_the_others_alone() -> None:
    damaged = template("damaged", objects="s3://raw/ml/")
    damaged["metadata"]["annotations"][TRIGGER_ANNOTATION] = "{"
    foreign = template("foreign", objects="s3://raw/nlp/")
    plain = template("plain")
    read = read_triggers([damaged, foreign, plain, template(objects="s3://raw/ml/")], SOURCES)
    assert [one.template for one in read.triggers] == ["digits"]
    assert [(one.template, reason) for one in read.problems for reason in [one.reason.split()[0]]] == [
        ("damaged", "annotation"),
        ("foreign", "it"),
    ]


def test_a_namespace_has_a_limited_number_of_triggers() -> None:
    many = [template(f"t-{number:03}", objects="s3://raw/ml/") for number in range(MAX_TRIGGERS_PER_NAMESPACE + 1)]
    read = read_triggers([*many, template(namespace="nlp", objects="s3://raw/nlp/")], SOURCES)
    assert len(read.triggers) == MAX_TRIGGERS_PER_NAMESPACE + 1
    assert [(one.namespace, one.template) for one in read.problems] == [("ml", f"t-{MAX_TRIGGERS_PER_NAMESPACE}")]


def test_the_api_server_is_asked_once_in_a_while() -> None:
    now, asked = [0.0], []

    def templates() -> list[Manifest]:
        asked.append(now[0])
        return []

    catalog = TriggerCatalog(templates, SOURCES, lambda: now[0])
    for moment in (0.0, 5.0, 10.0, 11.0, 12.0):
        now[0] = moment
        catalog.read(10.0)
    catalog.read(0.0)
    now[0] = 13.0
    catalog.read(0.0)
    assert asked == [0.0, 10.0, 12.0, 13.0]


@pytest.mark.parametrize(
    ("fields", "mistake"),
    [
        ({"objects": "raw/ml"}, "write s3://bucket/prefix/"),
        ({"objects": "s3://raw--x-s3/ml/"}, "directory bucket"),
        ({"objects": "s3://raw/" + "k" * 1025}, "longer than 1024 bytes"),
        ({"objects": "s3://raw/", "pattern": "*" * 201}, "at most 200"),
        ({"objects": "s3://raw/", "parameters": {"x": "versionId"}}, "Input should be 'url'"),
        ({"objects": "s3://raw/", "since": "2026-01-01T00:00:00"}, "timezone"),
        ({"objects": "s3://raw/", "resume": "../x"}, "run name"),
        ({"objects": "s3://raw/", "resume": "nightly", "parameters": {"x": "url"}}, "either resume or parameters"),
    ],
)
def test_a_trigger_that_cannot_be_meant_is_refused(fields: dict[str, Any], mistake: str) -> None:
    with pytest.raises(ValueError, match=mistake):
        TriggerSpec(**fields)


def test_a_pattern_of_many_stars_is_matched_in_time() -> None:
    spec = TriggerSpec(objects="s3://raw/", pattern="*a" * 99 + "b")
    assert not spec.matches("raw", "a" * 1024)

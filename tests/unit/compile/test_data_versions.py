"""What compile makes of data that a step declares: versions in the step's spec and in the program's environment."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.builders.authored_workflows import STORE, by_name, gated, step, train, workflow
from support.servers.lakefs import KEY, SECRET, serving

from hera_pipelines import CronPipeline, Dvc, Pipeline, Step, Train, load_pipeline
from hera_pipelines.compile import CompileOptions, compile_workflow
from hera_pipelines.compile.settings import DataSource
from tiphys.errors import NotFoundError, UsageError
from tiphys.protocol.compiled_workflow import CompiledPipeline, Manifest
from tiphys.records import DataVersion

TRAIN, RAW = Dvc("data/train"), Dvc("data/raw.dvc")


class Versions:
    """Answers the n-th question with version n."""

    def __init__(self) -> None:
        self.asked: list[DataSource] = []

    def __call__(self, source: DataSource) -> DataVersion:
        self.asked.append(source)
        return DataVersion(name=str(source), algorithm="md5", digest=f"{len(self.asked):032x}", size_bytes=7, files=2)


def compiled(*templates: Manifest, read: Any = None) -> Manifest:
    return compile_workflow(workflow(*templates), CompileOptions(store=STORE, read_data_version=read or Versions()))


def data_of(manifest: Manifest, name: str) -> list[str]:
    return [str(one) for one in CompiledPipeline.from_manifest(manifest).steps[name].data]


def environment_of(manifest: Manifest, name: str) -> dict[str, str]:
    templates = by_name(manifest)
    template = templates.get(f"{name}-run") or templates[name]
    program = template.get("container") or template["script"]
    return {entry["name"]: entry.get("value", "") for entry in program.get("env") or []}


@pytest.mark.parametrize("kind", [step, gated, train])
def test_the_versions_are_in_the_spec_and_reach_the_program(kind: Any) -> None:
    manifest = compiled(kind("fit", asked={"data": (TRAIN, RAW)}))
    assert data_of(manifest, "fit") == [f"md5 {1:032x}", f"md5 {2:032x}"]
    first, second = json.loads(environment_of(manifest, "fit")["TIPHYS_DATA"])
    assert first == {
        "name": "Dvc('data/train')",
        "algorithm": "md5",
        "digest": f"{1:032x}",
        "size_bytes": 7,
        "files": 2,
    }
    assert second["digest"] == f"{2:032x}"
    assert "dvc.lock" not in json.dumps(manifest)


def test_a_step_without_data_is_compiled_as_before() -> None:
    manifest = compiled(step("prep"), train("fit", asked={"data": (TRAIN,)}))
    assert "TIPHYS_DATA" not in environment_of(manifest, "prep")
    assert '"data"' not in by_name(manifest)["prep"]["metadata"]["annotations"]["tiphys.dev/step"]


def test_steps_have_the_same_version_of_the_same_data() -> None:
    versions = Versions()
    manifest = compiled(
        step("prep", asked={"data": (TRAIN,)}), train("fit", asked={"data": (TRAIN, RAW)}), read=versions
    )
    assert versions.asked == [TRAIN, RAW]
    assert data_of(manifest, "prep") == data_of(manifest, "fit")[:1]


def test_the_same_data_twice_is_refused() -> None:
    with pytest.raises(UsageError, match=r"step 'fit': its data .* is given twice; keep one"):
        compiled(train("fit", asked={"data": (TRAIN, Dvc("data/train"))}))


def test_an_error_keeps_its_kind_and_names_the_step() -> None:
    def missing(source: DataSource) -> DataVersion:
        raise NotFoundError(f"{source} is not there")

    with pytest.raises(NotFoundError, match=r"step 'fit': Dvc\('data/train'\) is not there"):
        compiled(train("fit", asked={"data": (TRAIN,)}), read=missing)


def test_data_that_cannot_be_read_at_compile_is_refused() -> None:
    with pytest.raises(UsageError, match="cannot be read here"):
        compile_workflow(workflow(step("fit", asked={"data": (TRAIN,)})), CompileOptions(store=STORE))


@pytest.mark.parametrize("data", ["data/train", [TRAIN, "x"], 3, None, {"path": "data/train"}])
def test_an_invalid_data_source_is_refused(data: Any) -> None:
    with pytest.raises(UsageError, match="step 'fit': data cannot be"):
        Step(name="fit", image="i", command=["fit"], data=data)


def test_no_more_data_than_the_records_have_room_for() -> None:
    with pytest.raises(UsageError, match="step 'fit': data cannot be"):
        Train(name="fit", image="i", command=["fit"], data=[Dvc(f"data/{number}") for number in range(17)])


@pytest.mark.parametrize(("characters", "is_refused"), [(900, False), (1000, True)])
def test_the_versions_of_a_step_have_a_limit_together(characters: int, is_refused: bool) -> None:
    sources = tuple(Dvc(f"data/{number}") for number in range(16))

    def long(source: DataSource) -> DataVersion:
        return DataVersion(name=f"{source}{'x' * characters}", algorithm="md5", digest="0" * 32)

    if not is_refused:
        assert len(data_of(compiled(train("fit", asked={"data": sources}), read=long), "fit")) == 16
        return
    with pytest.raises(UsageError, match=r"step 'fit': the versions of its data .* 17,\d{3} bytes, .* 16,384 bytes"):
        compiled(train("fit", asked={"data": sources}), read=long)


def test_a_character_counts_as_the_program_gets_it() -> None:
    """JSON in the environment is ASCII, in which one such character takes 12 bytes."""

    def long(_: DataSource) -> DataVersion:
        return DataVersion(name="\N{WHALE}" * 1024, algorithm="md5", digest="0" * 32, uri="\N{WHALE}" * 400)

    with pytest.raises(UsageError, match="declare a folder in the place of its parts, or shorten the paths"):
        compiled(train("fit", asked={"data": (TRAIN,)}), read=long)


def test_a_keyword_that_there_is_not_is_refused() -> None:
    with pytest.raises(UsageError, match="has no keyword 'lok'; did you mean 'lock'"):
        Dvc("data/train", lok="x")  # type: ignore[call-arg]


def lock(folder: Path, digest: str) -> None:
    outs = f"    outs:\n    - path: data/train\n      hash: md5\n      md5: {digest}\n"
    (folder / "dvc.lock").write_text(f"schema: '2.0'\nstages:\n  prepare:\n    cmd: x\n{outs}")


def test_every_compile_reads_the_version_of_that_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with Pipeline("digits", store=STORE) as pipeline:
        Train(name="fit", image="i", command=["fit"], data=TRAIN)()
    lock(tmp_path, "0" * 32)
    assert data_of(pipeline.compile(), "fit") == ["md5 " + "0" * 32]
    lock(tmp_path, "1" * 32)
    assert data_of(pipeline.compile(), "fit") == ["md5 " + "1" * 32]


def test_a_schedule_keeps_the_version_of_its_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lock(tmp_path, "0" * 32)
    with CronPipeline("nightly", schedules=["0 2 * * *"], store=STORE) as pipeline:
        Train(name="fit", image="i", command=["fit"], data=[TRAIN])()
    assert data_of(pipeline.workflow(), "fit") == ["md5 " + "0" * 32]
    assert "0" * 32 in pipeline.to_yaml()


MARKED = """
apiVersion: argoproj.io/v1alpha1
kind: Workflow
metadata: {name: digits, annotations: {tiphys.dev/store: s3://ml-runs/tiphys}}
spec:
  entrypoint: main
  templates:
  - name: main
    dag: {tasks: [{name: fit, template: fit}]}
  - name: fit
    metadata:
      annotations: {tiphys.dev/adopt: KIND, tiphys.dev/data: "data/train, lakefs://datasets/main/labels"}
    container: {image: fit, command: [fit]}
"""


@pytest.mark.parametrize("kind", ["step", "train"])
def test_a_template_written_as_yaml_names_its_data_in_an_annotation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    lock(tmp_path, "0" * 32)
    (tmp_path / "digits.yaml").write_text(MARKED.replace("KIND", kind))
    with serving() as server:
        commit = server.commit("datasets", "main")
        for name, value in (
            ("SERVER_ENDPOINT_URL", server.url),
            ("CREDENTIALS_ACCESS_KEY_ID", KEY),
            ("CREDENTIALS_SECRET_ACCESS_KEY", SECRET),
        ):
            monkeypatch.setenv(f"LAKECTL_{name}", value)
        manifest = load_pipeline(tmp_path / "digits.yaml").compile()
    assert data_of(manifest, "fit") == ["md5 " + "0" * 32, f"commit {commit}"]
    text = json.dumps(manifest)
    assert "tiphys.dev/data" not in text
    assert not [secret for secret in (KEY, SECRET, server.url) if secret in text]
    assert json.loads(environment_of(manifest, "fit")["TIPHYS_DATA"])[1]["uri"] == f"lakefs://datasets/{commit}/labels"

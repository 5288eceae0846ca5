"""The Python that README and the pages show does what the text beside it says."""

import re
from pathlib import Path
from typing import Any

import yaml

from hera_pipelines import load_pipeline
from tiphys.protocol.compiled_workflow import CompiledPipeline
from tiphys.protocol.step_spec import STORE_SECRET

ROOT = Path(__file__).parents[2]
STEPS = """
from pathlib import Path
from typing import Annotated
from hera.workflows import Artifact
from hera_pipelines import Pipeline, step, train

IMAGE = "ghcr.io/acme/digits:1.4"

"""
FIT = """

@train(image=IMAGE)
def fit(data: Annotated[Path, Artifact(name="data")], lr: float) -> None: ...

"""


def samples(page: str) -> list[str]:
    """Python blocks of a page, in order."""
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def steps_of(source: str, folder: Path) -> dict[str, Any]:
    """Steps of the pipeline that a sample defines, after compile."""
    (folder / "sample.py").write_text(source)
    return dict(CompiledPipeline.from_manifest(load_pipeline(folder / "sample.py").compile()).steps)


def test_the_tutorials_pipeline_compiles_for_a_cluster_as_it_stands(tmp_path: Path) -> None:
    [pipeline] = samples("docs/tutorial.md")
    (tmp_path / "digits.py").write_text(pipeline)

    compiled = CompiledPipeline.from_manifest(
        load_pipeline(tmp_path / "digits.py").compile(store="s3://ml-runs/tiphys")
    )

    assert list(compiled.steps) == ["prepare", "probe", "choose", "fit", "register"]
    assert compiled.steps["probe"].fan_out
    assert compiled.steps["fit"].checkpoints is not None


def test_the_calls_of_the_page_for_hera_users_compile(tmp_path: Path) -> None:
    calls, function = samples("docs/from-hera.md")

    steps = steps_of(STEPS + function + FIT + calls, tmp_path)

    assert list(steps) == ["preprocess", "fit"]
    assert steps["preprocess"].artifacts == ("data",)


def test_the_artifact_repository_of_the_guide_is_the_bucket_of_its_stores() -> None:
    page = (ROOT / "docs/install.md").read_text()
    [block] = re.findall(r"```yaml\n(# kubectl -n team-a apply.*?)```", page, re.DOTALL)
    config = yaml.safe_load(block)
    default = config["metadata"]["annotations"]["workflows.argoproj.io/default-artifact-repository"]
    repository = yaml.safe_load(config["data"][default])["s3"]

    assert f"s3://{repository['bucket']}/{{namespace}}/tiphys" in page
    assert not repository["keyFormat"].startswith("{{workflow.namespace}}/tiphys")
    secrets = [repository["accessKeySecret"], repository["secretKeySecret"]]
    assert [secret["name"] for secret in secrets] == [STORE_SECRET] * 2
    assert all(f"--from-literal={secret['key']}=" in page for secret in secrets)

"""A training that is continued on new data, as a run of its own.

    tiphys run examples/18-fork-with-new-data.py --run base
    tiphys fork base -p source=2026-11 --run november

The fork reads the new data, and its training starts from the newest checkpoint of the
run `base`, which stays as it was: what both have in common is stored once, and the
lineage names the checkpoint from which the fork came. `-p source=…` is a change of
parameters, which `tiphys resume` refuses, because it would give one run two meanings.
"""

import os
from pathlib import Path
from typing import Annotated

from hera.workflows import Artifact, Parameter

from hera_pipelines import Checkpoints, Pipeline, step, train
from tiphys import checkpoint

IMAGE = "ghcr.io/acme/digits:1.4"
Data = Annotated[Path, Artifact(name="data", path="/tmp/data")]
Model = Annotated[dict[str, float], Artifact(name="model")]


@step(image=IMAGE)
def collect(source: str) -> Data:
    target = Path(os.environ["TIPHYS_OUTPUT_DATA"])
    target.write_text(f"examples of {source}")
    return target


@train(image=IMAGE, checkpoints=Checkpoints(every="50 steps", save_time="10s"), grace="1m")
def fit(data: Data, steps: int = 200) -> Model:
    examples = data.read_text()
    with checkpoint.session() as session:
        state = session.restore(default={"step": 0, "weight": 0.0})
        begins = int(state["step"])
        for number in range(begins, begins + steps):
            state = {"step": number + 1, "weight": state["weight"] + len(examples)}
            session.step(number + 1, state)
    return {"weight": state["weight"], "began_at_step": begins}


with Pipeline(
    "new-data", store="s3://ml-runs/tiphys", arguments=[Parameter(name="source", value="2026-10")]
) as pipeline:
    fit(collect(source=pipeline.get_parameter("source")))

"""The smallest pipeline: one container that trains and saves checkpoints.

    tiphys compile examples/01-minimal.py | argo submit -

The program does not depend on Tiphys: it reads CHECKPOINT_URI. A program that
uses `tiphys.checkpoint` resumes automatically.
"""

from hera.workflows import DAG, Artifact

from hera_pipelines import Checkpoints, Pipeline, Train

with Pipeline("minimal", store="s3://ml-runs/tiphys", entrypoint="main") as pipeline:
    fit = Train(
        name="fit",
        image="ghcr.io/acme/digits:1.4",
        command=["python", "train.py"],
        outputs=[Artifact(name="model", path="/tmp/model")],
        checkpoints=Checkpoints(every="10m", keep_last=3, save_time="20s"),
        grace="2m",
    )
    with DAG(name="main"):
        fit()

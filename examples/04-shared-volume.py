"""Checkpoints on a shared volume: saves are faster than to object storage, and the next attempt finds them.

The claim is independent of any Workflow and ReadWriteMany, so the next attempt
can mount it on another node. Attempts and events are still recorded in the run
store.
"""

from hera.workflows import DAG, Artifact

from hera_pipelines import Checkpoints, Pipeline, SharedVolume, Train

with Pipeline("shared-volume", store="s3://ml-runs/tiphys", entrypoint="main") as pipeline:
    fit = Train(
        name="fit",
        image="ghcr.io/acme/digits:1.4",
        command=["python", "train.py"],
        outputs=[Artifact(name="model", path="/tmp/model")],
        checkpoints=Checkpoints(
            every="2m",
            save_time="5s",
            volume=SharedVolume(claim="training-checkpoints", mount_path="/mnt/checkpoints"),
        ),
    )
    with DAG(name="main"):
        fit()

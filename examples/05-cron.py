"""A pipeline on a schedule that deletes its finished Workflows and pods.

While a run takes longer than a night, no second one starts: concurrencyPolicy
is Forbid by default.
"""

from hera.workflows import Artifact, Container
from hera.workflows.models import PodGC, TTLStrategy

from hera_pipelines import Checkpoints, CronPipeline, Train

IMAGE = "ghcr.io/acme/digits:1.4"

with CronPipeline(
    "nightly",
    store="s3://ml-runs/tiphys",
    schedules=["0 2 * * *"],
    timezone="Europe/Berlin",
    active_deadline_seconds=20 * 3600,
    ttl_strategy=TTLStrategy(seconds_after_completion=7 * 24 * 3600),
    pod_gc=PodGC(strategy="OnPodSuccess"),
    on_exit="notify",
) as pipeline:
    Container(name="notify", image=IMAGE, command=["python", "notify.py"], args=["{{workflow.status}}"])
    fit = Train(
        name="fit",
        image=IMAGE,
        command=["python", "train.py"],
        outputs=[Artifact(name="model", path="/tmp/model")],
        checkpoints=Checkpoints(every="10m"),
        deadline="12h",
    )
    fit()

"""GPUs of one type from a queue, on spot nodes, with a retry budget for each failure cause.

A preemption loses only the time since the last checkpoint, so its retries are
unlimited. A program that fails by itself is not retried.
"""

from hera.workflows import DAG, Artifact, Resources
from hera.workflows.models import ExecAction, Lifecycle, LifecycleHandler

from hera_pipelines import GKE_SPOT, Checkpoints, Pipeline, Retries, Train

with Pipeline("gpu-queue", store="s3://ml-runs/tiphys", entrypoint="main") as pipeline:
    fit = Train(
        name="fit",
        image="ghcr.io/acme/llm:2.0",
        command=["torchrun", "--nproc-per-node=4", "train.py"],
        outputs=[Artifact(name="model", path="/tmp/model")],
        resources=Resources(cpu_request=16, memory_request="128Gi"),
        lifecycle=Lifecycle(pre_stop=LifecycleHandler(exec=ExecAction(command=["touch", "/tmp/save-now"]))),
        gpus=4,
        gpu_type="NVIDIA-A100-SXM4-80GB",
        min_gpu_memory_mb=80_000,
        queue="research",
        priority=10,
        spot=GKE_SPOT,
        checkpoints=Checkpoints(every="10m", keep_last=3, save_time="90s"),
        grace="2m",
        retries=Retries(preemption=None, infrastructure=10, out_of_memory=0),
    )
    with DAG(name="main"):
        fit()

"""Training on four nodes: one torchrun per node, and 32 GPUs that are granted all at once.

If a node is lost, the other three save and end. The next attempt resumes from
their checkpoint when 32 GPUs are free again.
"""

from typing import Annotated

from hera.workflows import Artifact, Parameter, Resources

from hera_pipelines import Checkpoints, Pipeline, Train, step


@step(image="python:3.12")
def shard(corpus: str) -> Annotated[str, Artifact(name="index")]:
    return f"shards of {corpus}"


with Pipeline(
    "distributed",
    store="s3://ml-runs/tiphys",
    arguments=[Parameter(name="corpus", value="s3://raw/corpus"), Parameter(name="lr", value="3e-4")],
) as pipeline:
    index = shard(corpus=pipeline.get_parameter("corpus"))
    fit = Train(
        name="fit",
        image="ghcr.io/acme/llm:2.0",
        command=["torchrun", "train.py"],
        args=["--lr={{inputs.parameters.lr}}", "--index={{inputs.artifacts.index.path}}"],
        inputs=[Parameter(name="lr"), Artifact(name="index", path="/tmp/index")],
        outputs=[Artifact(name="model", path="/tmp/model")],
        resources=Resources(cpu_request=64, memory_request="512Gi"),
        nodes=4,
        gpus=8,
        gpu_type="NVIDIA-H100-80GB-HBM3",
        queue="research",
        checkpoints=Checkpoints(every="10m", keep_last=3, save_time="90s"),
        grace="3m",
        deadline="7d",
    )
    fit(index=index, lr=pipeline.get_parameter("lr"))

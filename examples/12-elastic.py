"""Training on two to four nodes: after the loss of a node, torchrun continues with the others in the same attempt.

An attempt starts with up to four free nodes, and with at least two. The GPUs of
a lost node return to the queue; when GPUs are idle, the attempt gets another node.
Preemption takes nodes above the minimum before it ends the whole training.
"""

from hera.workflows import DAG

from hera_pipelines import Checkpoints, Pipeline, Train

with Pipeline("elastic", store="s3://ml-runs/tiphys", entrypoint="main") as pipeline:
    fit = Train(
        name="fit",
        image="ghcr.io/acme/llm:2.0",
        command=["torchrun", "train.py"],
        nodes="2:4",
        gpus=8,
        gpu_type="NVIDIA-H100-80GB-HBM3",
        queue="research",
        priority=-10,
        checkpoints=Checkpoints(every="10m", keep_last=3, save_time="90s"),
        grace="3m",
    )
    with DAG(name="main"):
        fit()

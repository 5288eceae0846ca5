"""Training on two to four nodes: torchrun goes on with those that are left when one is lost, in the same attempt.

An attempt starts with as many of four nodes as are free, and with two at the
least. What a lost node held goes back to the queue; others who need GPUs get
those that this training can spare before it has to go as a whole.
"""

from hera.workflows import DAG

from hera_pipelines import Checkpoints, Pipeline, Train

with Pipeline("elastic", store="s3://ml/tiphys", entrypoint="main") as pipeline:
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

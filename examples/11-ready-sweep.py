"""The ready sweep: trains the ready pipeline with twelve sets of parameters and registers the best model.

templates/sweep.yaml is its compiled form. It contains the trials, so each
Workflow of the template has the same ones.
"""

from hera_pipelines import Checkpoints, grid
from hera_pipelines.pipelines import Program, Training, sweep_pipeline

IMAGE = "{{workflow.parameters.image}}"


def program(name: str, *args: str) -> Program:
    return Program(image=IMAGE, command=["python", "-m", f"digits.{name}", *args])


pipeline = sweep_pipeline(
    "sweep",
    store="s3://ml-runs/tiphys",
    source="s3://raw/digits",
    parameters={"image": "ghcr.io/acme/digits:1.4"},
    validate=program("validate", "{{inputs.parameters.source}}"),
    preprocess=program("preprocess", "{{inputs.parameters.source}}"),
    train=program("train", "--lr={{inputs.parameters.lr}}", "--width={{inputs.parameters.width}}"),
    register=program("register"),
    sweep=grid(lr=[0.001, 0.003, 0.01, 0.03], width=[64, 128, 256]),
    metric="loss",
    training=Training(gpus=1, queue="research", checkpoints=Checkpoints(every="10m", save_time="30s"), grace="2m"),
    service_account_name="tiphys-workflow",  # the chart makes it, with the rights that Argo's pods need
)

"""The ready pipeline: validate, preprocess, train, register. You write four programs.

templates/ contains the compiled WorkflowTemplate and CronWorkflow. Image, data and
learning rate are parameters, so one template serves many models:

    argo submit --from workflowtemplate/train -p image=ghcr.io/acme/faces:2.0 -p lr=0.3
"""

from hera_pipelines import Checkpoints
from hera_pipelines.pipelines import Program, Training, train_pipeline

IMAGE = "{{workflow.parameters.image}}"


def program(name: str, *args: str) -> Program:
    return Program(image=IMAGE, command=["python", "-m", f"digits.{name}", *args])


pipeline = train_pipeline(
    "train",
    store="s3://ml-runs/tiphys",
    source="s3://raw/digits",
    parameters={"image": "ghcr.io/acme/digits:1.4", "lr": "0.1"},
    validate=program("validate", "{{inputs.parameters.source}}"),
    preprocess=program("preprocess", "{{inputs.parameters.source}}"),
    train=program("train", "--lr", "{{workflow.parameters.lr}}"),
    register=program("register"),
    training=Training(gpus=1, queue="research", checkpoints=Checkpoints(every="10m", save_time="30s"), grace="2m"),
    service_account_name="tiphys-workflow",  # the chart makes it, with the rights that Argo's pods need
)

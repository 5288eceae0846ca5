"""A fan-out: one training step per item, and one step that collects the results of all items.

Items of `with_items` are known at compile time. Items of `with_param` are known
after the previous task, so compile limits how many run at the same time.
"""

from hera.workflows import DAG, Parameter
from hera.workflows.models import ValueFrom

from hera_pipelines import Checkpoints, Pipeline, Step, Train

IMAGE = "ghcr.io/acme/sweep:0.3"
LOSS = Parameter(name="loss", value_from=ValueFrom(path="/tmp/loss"))

with Pipeline("sweep", store="s3://ml-runs/tiphys", entrypoint="main") as pipeline:
    propose = Step(
        name="propose",
        image=IMAGE,
        command=["python", "propose.py"],
        outputs=[Parameter(name="candidates", value_from=ValueFrom(path="/tmp/candidates.json"))],
    )
    explore = Train(
        name="explore",
        image=IMAGE,
        command=["python", "train.py"],
        args=["--lr", "{{inputs.parameters.lr}}"],
        inputs=[Parameter(name="lr")],
        outputs=[LOSS],
        checkpoints=Checkpoints(every="5m"),
    )
    best = Step(
        name="best",
        image=IMAGE,
        command=["python", "best.py"],
        args=["{{inputs.parameters.first}}", "{{inputs.parameters.second}}"],
        inputs=[Parameter(name="first"), Parameter(name="second")],
        outputs=[Parameter(name="lr", value_from=ValueFrom(path="/tmp/lr"))],
    )
    with DAG(name="main"):
        candidates = propose()
        known = explore(name="known", lr="{{item.lr}}", with_items=[{"lr": 0.1}, {"lr": 0.01}])
        found = explore(name="found", lr="{{item}}", with_param=candidates.get_parameter("candidates"))
        best(first=known, second=found)

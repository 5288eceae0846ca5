"""A sweep: twenty trainings with different parameters, four at a time; the next step takes the best model.

Each trial is an independent training: it waits in the queue for its GPU, saves
checkpoints, and resumes after a preemption. `tiphys sweep RUN` lists the trials.
"""

from hera.workflows import Artifact, Parameter
from hera.workflows.models import ValueFrom

from hera_pipelines import Checkpoints, Pipeline, Step, Train, best, choice, log_uniform, random_search

IMAGE = "ghcr.io/acme/digits:1.4"

with Pipeline("digits-sweep", store="s3://ml-runs/tiphys") as pipeline:
    prepare = Step(
        name="prepare",
        image=IMAGE,
        command=["python", "prepare.py"],
        outputs=[Artifact(name="data", path="/tmp/data")],
    )
    fit = Train(
        name="fit",
        image=IMAGE,
        command=["python", "train.py"],
        args=["--lr={{inputs.parameters.lr}}", "--width={{inputs.parameters.width}}"],
        inputs=[Artifact(name="data", path="/tmp/data"), Parameter(name="lr"), Parameter(name="width")],
        outputs=[
            Artifact(name="model", path="/tmp/model"),
            Parameter(name="loss", value_from=ValueFrom(path="/tmp/loss")),
        ],
        gpus=1,
        queue="research",
        checkpoints=Checkpoints(every="10m", save_time="20s", keep_best="loss:min"),
        grace="2m",
    )
    register = Step(
        name="register",
        image=IMAGE,
        command=["python", "register.py"],
        args=["{{inputs.parameters.trial}}"],
        inputs=[Artifact(name="model", path="/tmp/model"), Parameter(name="trial")],
    )
    trials = fit(
        data=prepare(),
        sweep=random_search(20, seed=7, lr=log_uniform(1e-4, 1e-1), width=choice(64, 128, 256)),
        parallel=4,
    )
    winner = best(trials, metric="loss", mode="min")
    register(model=winner, trial=winner)

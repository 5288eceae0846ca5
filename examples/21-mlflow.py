"""One run of MLflow for each run, with a nested one for each step, and a model that is registered once.

`fit` knows nothing of it: `mlflow.log_metric` continues the run of the step, also after a preemption, a resume or in
another cluster. `register` verifies the model, registers it as a version, and sets the alias last.

The Secret `mlflow` holds MLFLOW_TRACKING_URI and credentials. On this machine they come from the shell:

    MLFLOW_TRACKING_URI=http://127.0.0.1:5000 tiphys run 21-mlflow.py
"""

from typing import Annotated

from hera.workflows import Artifact, Parameter, SecretEnvFrom

from hera_pipelines import Checkpoints, Mlflow, Pipeline, RegisterModel, train

IMAGE = "ghcr.io/acme/digits:2.1"  # with tiphys[numpy,mlflow]
SECRET = SecretEnvFrom(name="mlflow", optional=True)


@train(
    image=IMAGE,
    env_from=SECRET,
    tracking=Mlflow(experiment="digits"),
    checkpoints=Checkpoints(every="10 steps", save_time="30s"),
    grace="2m",
)
def fit(steps: int) -> Annotated[bytes, Artifact(name="model")]:
    import mlflow
    import numpy as np

    from tiphys import checkpoint

    with checkpoint.session(total_steps=steps) as session:
        state = session.restore(default={"step": 0, "weights": np.ones(8)})
        while state["step"] < steps:
            state["weights"] = state["weights"] * 0.9
            state["step"] += 1
            loss = float(np.square(state["weights"]).mean())
            mlflow.log_metric("loss", loss, step=state["step"])
            session.step(state["step"], state, metrics={"loss": loss})
    return state["weights"].tobytes()


register = RegisterModel(name="register", model="digits", alias="champion", image=IMAGE, env_from=SECRET)

with Pipeline("mlflow", store="s3://ml-runs/tiphys", arguments=[Parameter(name="steps", value="30")]) as pipeline:
    register(model=fit(steps=pipeline.get_parameter("steps")))

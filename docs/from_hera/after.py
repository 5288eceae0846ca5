from hera.workflows import DAG, Artifact, Parameter, script

from hera_pipelines import Pipeline, train

IMAGE = "ghcr.io/acme/digits:1.4"
DATA = Artifact(name="data", path="/data/digits")
MODEL = Artifact(name="model", path="/data/model")


@script(image=IMAGE, outputs=[DATA])
def preprocess(source: str) -> None:
    from pathlib import Path

    Path("/data/digits").write_text(f"digits from {source}")


@train(image=IMAGE, inputs=[DATA], outputs=[MODEL])
def fit(lr: float = 0.1) -> None:
    from acme.digits import train_on

    train_on("/data/digits", lr=lr, save_to="/data/model")


with Pipeline(generate_name="digits-", entrypoint="main", store="s3://ml-runs/tiphys") as workflow, DAG(name="main"):
    data = preprocess(arguments={"source": "s3://raw/digits"})
    model = fit(arguments=[data.get_artifact("data"), Parameter(name="lr", value=0.3)])
    data >> model

from hera.workflows import DAG, Artifact, Parameter, Workflow, script

IMAGE = "ghcr.io/acme/digits:1.4"
DATA = Artifact(name="data", path="/data/digits")
MODEL = Artifact(name="model", path="/data/model")


@script(image=IMAGE, outputs=[DATA])
def preprocess(source: str) -> None:
    from pathlib import Path

    Path("/data/digits").write_text(f"digits from {source}")


@script(image=IMAGE, inputs=[DATA], outputs=[MODEL])
def fit(lr: float = 0.1) -> None:
    from acme.digits import train_on

    train_on("/data/digits", lr=lr, save_to="/data/model")


with Workflow(generate_name="digits-", entrypoint="main") as workflow, DAG(name="main"):
    data = preprocess(arguments={"source": "s3://raw/digits"})
    model = fit(arguments=[data.get_artifact("data"), Parameter(name="lr", value=0.3)])
    data >> model

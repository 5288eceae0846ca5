"""The demo's pipeline file, as ``tiphys run`` takes it.

BLAS runs on one thread, because the order in which threads add floats changes
the last bits, and the demo compares bits.
"""

from hera.workflows import Artifact, Env, Parameter
from hera.workflows.models import ValueFrom

from hera_pipelines import Checkpoints, Pipeline, Retries, Step, Train

STEPS = 2000
SAVE_EVERY = 100

IMAGE = "ghcr.io/tiphys/demo:0.1.0"
ONE_THREAD = [Env(name=name, value="1") for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")]


def demo_command(name: str) -> list[str]:
    """Command line of a program of the demo."""
    return ["python", "-m", f"hera_pipelines.demo.{name}"]


def output_parameter(name: str) -> Parameter:
    """An output parameter, read from a file that the program writes."""
    return Parameter(name=name, value_from=ValueFrom(path=f"/tmp/{name}"))  # noqa: S108  a path in the container


validate = Step(
    name="validate",
    image=IMAGE,
    command=demo_command("validate"),
    outputs=output_parameter("fingerprint"),
    env=ONE_THREAD,
)

preprocess = Step(
    name="preprocess",
    image=IMAGE,
    command=demo_command("preprocess"),
    args=["--seed", "{{inputs.parameters.seed}}"],
    inputs=[Parameter(name="seed"), Parameter(name="fingerprint")],
    outputs=Artifact(name="dataset", path="/data/dataset"),
    env=ONE_THREAD,
)

train = Train(
    name="train",
    image=IMAGE,
    command=demo_command("train"),
    args=[
        *("--seed", "{{inputs.parameters.seed}}"),
        *("--step-log", "{{inputs.parameters.step-log}}"),
        *("--steps", str(STEPS)),
    ],
    inputs=[Parameter(name="seed"), Parameter(name="step-log"), Artifact(name="dataset", path="/data/dataset")],
    outputs=Artifact(name="model", path="/model/weights"),
    checkpoints=Checkpoints(every=f"{SAVE_EVERY} steps", keep_last=None),
    retries=Retries(backoff="1s"),
    env=ONE_THREAD,
)

register = Step(
    name="register",
    image=IMAGE,
    command=demo_command("register"),
    args=["--seed", "{{inputs.parameters.seed}}"],
    inputs=[
        Parameter(name="seed"),
        Artifact(name="dataset", path="/data/dataset"),
        Artifact(name="model", path="/model/weights"),
    ],
    outputs=[Artifact(name="card", path="/tmp/card.json"), output_parameter("accuracy"), output_parameter("sha256")],  # noqa: S108
    env=ONE_THREAD,
)

with Pipeline(
    "digits", arguments=[Parameter(name="seed", value="7"), Parameter(name="step-log", value="")]
) as pipeline:
    seed = pipeline.get_parameter("seed")
    checked = validate()
    data = preprocess(seed=seed, fingerprint=checked)
    model = train(seed=seed, step_log=pipeline.get_parameter("step-log"), dataset=data)
    register(seed=seed, dataset=data, model=model)

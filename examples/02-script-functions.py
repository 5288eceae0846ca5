"""Python functions as steps: the result of one function is the argument of the next.

Each function runs in its own container, with what it uses of this file: imports,
constants, other functions. An artifact arrives as a path. The annotation says where the
returned value is written: as text, bytes, JSON or a copy of a path. The report may be
printed again, so it is plain: Argo runs it without Tiphys.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from hera.workflows import Artifact, Parameter

from hera_pipelines import Checkpoints, Pipeline, Retries, plain, step, train
from tiphys import checkpoint

IMAGE = "ghcr.io/acme/digits:1.4"
STEPS = 1000

Data = Annotated[Path, Artifact(name="data", path="/tmp/data")]
Model = Annotated[dict[str, float], Artifact(name="model")]
Loss = Annotated[float, Parameter(name="loss")]


@dataclass
class Line:
    weight: float = 0.0

    def learn(self, examples: str, lr: float) -> None:
        self.weight += lr * len(examples)


@step(image=IMAGE, retries=Retries(infrastructure=3))
def preprocess(source: str) -> Data:
    target = Path("/tmp/data")
    target.write_text(f"digits from {source}")
    return target


@train(image=IMAGE, checkpoints=Checkpoints(every="100 steps", save_time="10s"), grace="1m")
def fit(data: Data, lr: float = 0.1) -> tuple[Model, Loss]:
    examples = data.read_text()
    with checkpoint.session(total_steps=STEPS) as session:
        state = session.restore(default={"step": 0, "weight": 0.0})
        line = Line(state["weight"])
        for number in range(int(state["step"]), STEPS):
            line.learn(examples, lr)
            session.step(number + 1, {"step": number + 1, "weight": line.weight})
    return {"weight": line.weight}, 1 / line.weight


@plain(image=IMAGE)
def report(loss: float) -> None:
    print(f"loss {loss}")


with Pipeline(
    "functions",
    store="s3://ml-runs/tiphys",
    arguments=[Parameter(name="source", value="s3://raw/digits"), Parameter(name="lr", value="0.1")],
    run_name="functions-lr{lr}",
) as pipeline:
    data = preprocess(source=pipeline.get_parameter("source"))
    model = fit(data, lr=pipeline.get_parameter("lr"))
    report(loss=model)

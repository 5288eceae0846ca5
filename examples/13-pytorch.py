"""Plain PyTorch: one function trains, saves its whole state, and resumes on the same bits.

The image needs the wheel of Tiphys with the extra `torch`. On this machine the Python of
`tiphys run` has to have PyTorch, too.
"""

from typing import Annotated

from hera.workflows import Artifact, Parameter

from hera_pipelines import Checkpoints, Pipeline, train

Model = Annotated[bytes, Artifact(name="model")]
Loss = Annotated[float, Parameter(name="loss")]


@train(
    image="ghcr.io/acme/torch:2.9",
    checkpoints=Checkpoints(every="200 steps", keep_last=2, save_time="10s"),
    grace="1m",
)
def fit(steps: int) -> tuple[Model, Loss]:
    import io

    import torch

    from tiphys import checkpoint
    from tiphys.checkpoint.adapters.pytorch import capture, load

    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loss = torch.tensor(float("nan"))
    with checkpoint.session(total_steps=steps) as session:
        state = session.restore()
        step = load(state, model, optimizer=optimizer)["step"] if state else 0
        while step < steps:
            x = torch.randn(64, 8)
            loss = (model(x).squeeze() - x.square().mean(1)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            session.step(step, lambda step=step: capture(model, optimizer=optimizer, step=step), metrics={"loss": loss})
    weights = io.BytesIO()
    torch.save(model.state_dict(), weights)
    return weights.getvalue(), float(loss)


with Pipeline("pytorch", store="s3://ml-runs/tiphys", arguments=[Parameter(name="steps", value="1000")]) as pipeline:
    fit(steps=pipeline.get_parameter("steps"))

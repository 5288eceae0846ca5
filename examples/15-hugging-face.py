"""The Trainer of Hugging Face: the callback keeps those of its checkpoints that are due, and restores the newest.

The image needs the wheel of Tiphys with the extra `torch`, transformers and accelerate.
"""

from typing import Annotated

from hera.workflows import Artifact, Parameter

from hera_pipelines import Checkpoints, Pipeline, train


@train(
    image="ghcr.io/acme/transformers:4.57",
    checkpoints=Checkpoints(every="10m", keep_last=2, save_time="30s"),
    grace="2m",
)
def fit(steps: int) -> Annotated[bytes, Artifact(name="model")]:
    import io

    import torch
    import transformers

    from tiphys import checkpoint
    from tiphys.checkpoint.adapters.transformers import TiphysCallback

    class Regression(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(8, 1)

        def forward(self, x):
            return {"loss": (self.layer(x).squeeze() - x.mean(1)).square().mean()}

    model = Regression()
    options = transformers.TrainingArguments("out", max_steps=steps, save_steps=20, report_to=[])
    with checkpoint.session() as session:
        callback = TiphysCallback(session)
        rows = [{"x": row} for row in torch.randn(640, 8)]
        trainer = transformers.Trainer(model, options, train_dataset=rows, callbacks=[callback])
        trainer.train(resume_from_checkpoint=callback.restore("out"))
    weights = io.BytesIO()
    torch.save(model.state_dict(), weights)
    return weights.getvalue()


with Pipeline(
    "hugging-face", store="s3://ml-runs/tiphys", arguments=[Parameter(name="steps", value="100")]
) as pipeline:
    fit(steps=pipeline.get_parameter("steps"))

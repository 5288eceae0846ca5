"""Lightning: the callback saves and resumes, in the middle of an epoch, and the rest is Lightning as usual.

The image needs the wheel of Tiphys with the extra `torch`, and lightning.
"""

from typing import Annotated

from hera.workflows import Artifact, Parameter

from hera_pipelines import Checkpoints, Pipeline, train


@train(
    image="ghcr.io/acme/lightning:2.5",
    checkpoints=Checkpoints(every="10m", keep_last=2, save_time="20s"),
    grace="2m",
)
def fit(steps: int) -> Annotated[bytes, Artifact(name="model")]:
    import io

    import lightning.pytorch as pl
    import torch

    from tiphys import checkpoint
    from tiphys.checkpoint.adapters.lightning import TiphysCheckpoint

    class Regression(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(8, 1)

        def training_step(self, batch, _):
            return (self.layer(batch).squeeze() - batch.mean(1)).square().mean()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    model = Regression()
    data = torch.utils.data.DataLoader(torch.randn(640, 8), batch_size=64)
    with checkpoint.session() as session:
        trainer = pl.Trainer(max_steps=steps, callbacks=[TiphysCheckpoint(session)], logger=False)
        trainer.fit(model, data)
    weights = io.BytesIO()
    torch.save(model.state_dict(), weights)
    return weights.getvalue()


with Pipeline("lightning", store="s3://ml-runs/tiphys", arguments=[Parameter(name="steps", value="200")]) as pipeline:
    fit(steps=pipeline.get_parameter("steps"))

"""Lightning with ModelCheckpoint(save_last=True), as its guide has it. It knows nothing of Tiphys."""

from printing import digest, generators, say

say("start")

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import nn

STEPS, BATCH = 36, 8


class Prints(Callback):
    def on_train_start(self, trainer, module):
        say("resumed", step=trainer.global_step, **parts(trainer, module))

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_index):
        say("step", step=trainer.global_step, ids=batch[0].tolist(), **parts(trainer, module))

    def on_train_batch_start(self, trainer, module, batch, batch_index):
        if trainer.global_step and trainer.global_step % 4 == 0:
            say("saved", step=trainer.global_step)

    def on_validation_start(self, trainer, module):
        if not trainer.sanity_checking:
            say("evaluation")


def parts(trainer, module):
    states = {"weights": module.state_dict(), "optimizer": trainer.optimizers[0].state_dict()["state"]}
    return {name: digest(state) for name, state in states.items()} | {"generators": generators()}


class Images(torch.utils.data.Dataset):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        say("load")
        return index, torch.randn(3, 40, 40, generator=torch.Generator().manual_seed(index)), index % 10


class Classifier(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 24, 3), nn.ReLU(), nn.Flatten(), nn.Linear(24 * 38 * 38, 10))

    def training_step(self, batch, _):
        _, images, labels = batch
        return nn.functional.cross_entropy(self.layers(images), labels)

    def validation_step(self, batch, _):
        _, images, labels = batch
        self.log("val_loss", nn.functional.cross_entropy(self.layers(images), labels))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main():
    torch.set_num_threads(1)
    pl.seed_everything(0)
    training = torch.utils.data.DataLoader(Images(96), batch_size=BATCH, shuffle=True, num_workers=1)
    validation = torch.utils.data.DataLoader(Images(8), batch_size=BATCH, num_workers=1)
    keep = ModelCheckpoint(
        dirpath="ckpt", every_n_train_steps=4, save_top_k=2, monitor="step", mode="max", save_last=True
    )
    trainer = pl.Trainer(
        max_steps=STEPS,
        accelerator="cpu",
        callbacks=[keep, Prints()],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(), training, validation, ckpt_path="last")
    say("finished", step=trainer.global_step)


if __name__ == "__main__":
    main()

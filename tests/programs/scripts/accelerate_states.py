"""Accelerate with numbered states, as its guide has it. It knows nothing of Tiphys."""

from printing import digest, generators, say

say("start")

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from torch import nn
from torch.utils.data import DataLoader, Dataset

STEPS, BATCH, SAVE_EVERY = 36, 8, 4


class Images(Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, index):
        say("load")
        return index, torch.randn(3, 40, 40, generator=torch.Generator().manual_seed(index)), index % 10


class Progress:
    step = 0

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        self.step = state["step"]


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    project = ProjectConfiguration(project_dir="out", automatic_checkpoint_naming=True, total_limit=3)
    accelerator = Accelerator(cpu=True, project_config=project)
    model = nn.Sequential(nn.Conv2d(3, 24, 3), nn.ReLU(), nn.Flatten(), nn.Linear(24 * 38 * 38, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    training = DataLoader(Images(), batch_size=BATCH, shuffle=True)
    model, optimizer, training = accelerator.prepare(model, optimizer, training)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)

    def parts():
        states = {"weights": accelerator.unwrap_model(model).state_dict(), "optimizer": optimizer.state_dict()}
        return {name: digest(state) for name, state in states.items()} | {"generators": generators()}

    try:
        accelerator.load_state()
        accelerator.project_configuration.iteration = progress.step // SAVE_EVERY
    except (FileNotFoundError, IndexError, ValueError):
        print("starting from scratch")
    say("resumed", step=progress.step, **parts())
    while progress.step < STEPS:
        epoch = accelerator.skip_first_batches(training, progress.step % len(training))
        for ids, images, labels in epoch:
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            progress.step += 1
            say("step", step=progress.step, ids=ids.tolist(), **parts())
            if progress.step % SAVE_EVERY == 0:
                accelerator.save_state()
                say("saved", step=progress.step)
            if progress.step == STEPS:
                break
    accelerator.end_training()
    say("finished", step=progress.step)


if __name__ == "__main__":
    main()

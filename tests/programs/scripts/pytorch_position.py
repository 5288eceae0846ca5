"""PyTorch with torchdata's loader of two workers, whose position and order the session keeps as well."""

from printing import digest, generators, say

say("start")

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from tiphys import checkpoint
from tiphys.checkpoint.adapters.pytorch import capture, load

STEPS, BATCH = 36, 8


class Images(Dataset):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        say("load")
        return index, torch.randn(3, 48, 48, generator=torch.Generator().manual_seed(index)), index % 10


def evaluate(model, loader):
    model.eval()
    say("evaluation")
    with torch.no_grad():
        for _, images, _ in loader:
            model(images)
    model.train()


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(
        *(nn.Conv2d(3, 24, 3), nn.ReLU(), nn.BatchNorm2d(24), nn.Conv2d(24, 24, 3, stride=2), nn.ReLU()),
        *(nn.Flatten(), nn.Dropout(0.2), nn.Linear(24 * 22 * 22, 10)),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    training = StatefulDataLoader(Images(96), batch_size=BATCH, shuffle=True, num_workers=2)
    test = DataLoader(Images(16), batch_size=BATCH, num_workers=2)

    def parts():
        states = {"weights": model.state_dict(), "optimizer": optimizer.state_dict()}
        return {name: digest(state) for name, state in states.items()} | {"generators": generators()}

    with checkpoint.session(total_steps=STEPS) as session:  # Tiphys
        step = (
            load(state, model, optimizer=optimizer, sampler=training)["step"] if (state := session.restore()) else 0
        )  # Tiphys
        say("resumed", step=step, **parts())
        while step < STEPS:
            for ids, images, labels in training:
                loss = nn.functional.cross_entropy(model(images), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step += 1
                say("step", step=step, ids=ids.tolist(), **parts())
                session.step(step, lambda: capture(model, optimizer=optimizer, sampler=training, step=step))  # Tiphys
                if step == STEPS:
                    break
            evaluate(model, test)
    say("finished", step=step)


if __name__ == "__main__":
    main()

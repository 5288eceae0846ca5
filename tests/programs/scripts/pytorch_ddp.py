"""PyTorch's tutorial of torchrun: two ranks with a loader worker each. Three lines keep the state of all ranks."""

from printing import digest, say

say("start")

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from tiphys import checkpoint
from tiphys.checkpoint.adapters.pytorch import capture, load

STEPS, BATCH = 30, 6


class Images(Dataset):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        say("load")
        return index, torch.randn(3, 40, 40, generator=torch.Generator().manual_seed(index)), index % 10


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
    dist.init_process_group("gloo")
    network = nn.Sequential(nn.Conv2d(3, 24, 3), nn.ReLU(), nn.Flatten(), nn.Linear(24 * 38 * 38, 10))
    model = DistributedDataParallel(network)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sampler = DistributedSampler(Images(96))
    training = DataLoader(Images(96), batch_size=BATCH, sampler=sampler, num_workers=1)
    test = DataLoader(Images(12), batch_size=BATCH, num_workers=1)

    def parts():
        states = {"weights": model.module.state_dict(), "optimizer": optimizer.state_dict()}
        return {name: digest(state) for name, state in states.items()}

    with checkpoint.session(total_steps=STEPS) as session:  # Tiphys
        step = load(state, model.module, optimizer=optimizer)["step"] if (state := session.restore()) else 0  # Tiphys
        say("resumed", step=step, **parts())
        while step < STEPS:
            sampler.set_epoch(step // len(training))
            for ids, images, labels in training:
                loss = nn.functional.cross_entropy(model(images), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step += 1
                say("step", step=step, ids=ids.tolist(), **parts())
                session.step(step, lambda: capture(model.module, optimizer=optimizer, step=step))  # Tiphys
                if step == STEPS:
                    break
            evaluate(model.module, test)
    dist.destroy_process_group()
    say("finished", step=step)


if __name__ == "__main__":
    main()

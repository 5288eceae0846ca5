"""The examples of docs/checkpoints.md are programs that work: each trains, saves, and resumes where it was."""

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed here: make test-torch")

import torch
from support.builders.lineage import LINEAGE, RUN, STEP, claim_of, ref, write_claim

from tiphys import checkpoint
from tiphys.lineage.select import list_commits
from tiphys.store import DirectoryStore, read_events

# What Lightning and the Trainer say about their own dependencies, and DCP about a single process.
pytestmark = pytest.mark.filterwarnings("ignore")

SECTION = Path(__file__).parents[2].joinpath("docs/checkpoints.md").read_text().partition("## PyTorch")[2]
PLAIN, DCP, FRAMEWORKS = re.findall(r"```python\n(.*?)```", SECTION.partition("\n## ")[0], re.DOTALL)
LIGHTNING, HUGGING_FACE = FRAMEWORKS.strip().split("\n\n")[1:]
IMPORTS = FRAMEWORKS.partition("\n\n")[0]


def surroundings() -> dict[str, Any]:
    """What the examples take for granted."""
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())

    def train_one_step() -> None:
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()

    return {"model": model, "optimizer": optimizer, "train_one_step": train_one_step, "checkpoint": checkpoint}


def with_lightning() -> dict[str, Any]:
    import lightning.pytorch as pl

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(8, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.layer(batch).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    def trainer(**options: Any) -> Any:
        return pl.Trainer(**options, accelerator="cpu", devices=1, logger=False, enable_progress_bar=False)

    data = torch.utils.data.DataLoader(torch.randn(40, 8), batch_size=8)
    return {"model": Model(), "data": data, "Trainer": trainer, "checkpoint": checkpoint}


def with_hugging_face() -> dict[str, Any]:
    import transformers

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(8, 1)

        def forward(self, x: Any) -> dict[str, Any]:
            return {"loss": self.layer(x).square().mean()}

    def arguments(output_dir: str, save_steps: int) -> Any:
        return transformers.TrainingArguments(
            output_dir, save_steps=save_steps, max_steps=20, use_cpu=True, report_to=[], disable_tqdm=True
        )

    return {
        "model": Model(),
        "data": [{"x": row} for row in torch.randn(40, 8)],
        "TrainingArguments": arguments,
        "HuggingFaceTrainer": transformers.Trainer,
        "checkpoint": checkpoint,
    }


@pytest.mark.parametrize(
    ("program", "given"),
    [
        (PLAIN, surroundings),
        (DCP, surroundings),
        (f"{IMPORTS}\n{LIGHTNING}", with_lightning),
        (f"{IMPORTS}\n{HUGGING_FACE}", with_hugging_face),
    ],
    ids=["plain", "dcp", "lightning", "hugging face"],
)
def test_the_example_trains_saves_and_resumes(program, given, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = DirectoryStore(tmp_path / "store")
    environ = {"STORE": store.url, "RUN": RUN, "STEP": STEP, "LINEAGE": LINEAGE, "SAVE_EVERY": "5 steps"}
    for name, value in environ.items():
        monkeypatch.setenv(f"TIPHYS_{name}", value)

    for attempt, start in ((1, None), (2, ref(1, 20))):
        write_claim(store, claim_of(attempt, start))
        monkeypatch.setenv("TIPHYS_ATTEMPT", str(attempt))
        monkeypatch.setenv("TIPHYS_RESUME_FROM", str(start or ""))
        exec(program, given())

    assert ref(1, 20) in list_commits(store, LINEAGE)
    assert "attempt 2 resumes from step 20 (checkpoint 20 of attempt 1)" in [e.message for e in read_events(store, RUN)]

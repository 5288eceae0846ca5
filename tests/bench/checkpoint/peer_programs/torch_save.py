"""What most programs do: torch.save into a file, and boto3's transfer manager, which uploads ten parts at a time."""

import tempfile
from pathlib import Path

import boto3
import torch
from protocol import BUCKET, Wait, arrays, is_over, report

state = {name: torch.from_numpy(array) for name, array in arrays().items()}
client = boto3.client("s3")
folder = tempfile.TemporaryDirectory()


def save(number: int) -> Wait:
    file = Path(folder.name) / "state.pt"
    torch.save(state, file)
    client.upload_file(str(file), BUCKET, f"torch/{number}.pt")
    return is_over


with folder:
    report(save)

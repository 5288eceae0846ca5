"""Orbax, whose asynchronous save writes to a disk; a bucket that is not Google's it cannot write, so the upload of its
files by boto3's transfer manager follows, four files at a time.
"""

import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import boto3
import jax
import orbax.checkpoint as ocp
from protocol import BUCKET, Wait, arrays, report

state = {name: jax.numpy.asarray(array) for name, array in arrays().items()}
client = boto3.client("s3")
folder = tempfile.TemporaryDirectory()
checkpointer = ocp.AsyncCheckpointer(ocp.StandardCheckpointHandler())


def save(number: int) -> Wait:
    where = Path(folder.name) / str(number)
    checkpointer.save(where, args=ocp.args.StandardSave(state))
    return lambda: upload(where)


def upload(where: Path) -> None:
    checkpointer.wait_until_finished()
    files = [file for file in where.rglob("*") if file.is_file()]
    with ThreadPoolExecutor(4) as pool:
        sent = [pool.submit(client.upload_file, str(file), BUCKET, f"orbax/{file}") for file in files]
    for one in sent:
        one.result()


with folder:
    report(save)
    checkpointer.close()

"""The S3 server of the benchmark: versitygw on a folder of its own, or moto where there is no Go to build it with."""

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

import boto3
from bench.progress import say
from cluster.harness.binaries import build_one
from cluster.harness.errors import HarnessError
from cluster.harness.settings import Settings
from support.processes.polling import until
from support.servers.ports import free_ports
from support.servers.s3 import ENVIRONMENT, moto_server
from support.servers.throttle import Pace
from support.servers.throttle_process import throttled

if TYPE_CHECKING:
    from types_boto3_s3 import S3Client

LATENCY_SECONDS = 0.02
BUCKET = "bench"
STORE = f"s3://{BUCKET}/store"
RUNS = "store/control/runs/"


@dataclass(frozen=True)
class S3:
    """A running server, and what leads to it."""

    name: str
    url: str
    environment: Mapping[str, str]
    """Credentials; without the address."""
    nice: int = 0
    """Niceness of the server, and of networks before it."""

    @contextmanager
    def at(self, megabytes_per_second: float | None) -> Iterator[dict[str, str]]:
        """Lead this process to the server, through a network that grants so much (None: all there is).

        Gives the variables that lead another process there.
        """
        with contextlib.ExitStack() as stack:
            url = self.url
            if megabytes_per_second is not None:
                rate = megabytes_per_second * 1e6
                url = stack.enter_context(throttled(self.url, Pace(rate, rate, LATENCY_SECONDS), self.nice))
            environment = {**self.environment, "AWS_ENDPOINT_URL_S3": url}
            stack.enter_context(mock.patch.dict(os.environ, environment))
            yield environment

    def empty(self) -> None:
        """Delete every object but the records of runs, past the throttle."""
        with self.at(None):
            client = plain_client()
            for page in client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET):
                keys = [one["Key"] for one in page.get("Contents", [])]
                if found := [{"Key": key} for key in keys if not key.startswith(RUNS)]:
                    client.delete_objects(Bucket=BUCKET, Delete={"Objects": found})


def plain_client() -> "S3Client":
    """boto3 as it comes; its address is that of the environment."""
    return boto3.session.Session().client("s3")  # the shared session remembers the keys of another server


@contextmanager
def s3_server(nice: int = 0) -> Iterator[S3]:
    """Run a server with an empty bucket; it ends with the block, and its objects go."""
    with contextlib.ExitStack() as stack:
        server = _versitygw(stack, nice) or S3("moto", stack.enter_context(moto_server()), ENVIRONMENT)
        with server.at(None):
            plain_client().create_bucket(Bucket=BUCKET)
        say(f"S3 server: {server.name}")
        yield server


def scratch(stack: contextlib.ExitStack) -> Path:
    """A folder in memory where there is room, so that no disk is measured."""
    memory = Path("/dev/shm")
    roomy = memory.is_dir() and shutil.disk_usage(memory).free > 8 << 30
    return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tiphys-bench-", dir=memory if roomy else None)))


def _versitygw(stack: contextlib.ExitStack, nice: int) -> S3 | None:
    try:
        program = build_one(Settings.read(), "versitygw")
    except HarnessError as error:
        say(f"no versitygw: {error}")
        return None
    folder = scratch(stack)
    account = {"ROOT_ACCESS_KEY": "bench", "ROOT_SECRET_KEY": secrets.token_hex(16)}
    [port] = free_ports(1)
    command = ["nice", f"-n{nice}", program, f"--port=127.0.0.1:{port}", "--keep-alive", "--quiet", "posix", folder]
    process = subprocess.Popen(command, env={**os.environ, **account}, stdout=subprocess.DEVNULL)
    stack.callback(partial(_end, process))
    until(partial(_answers, process, port), seconds=300)
    keys = {
        "AWS_ACCESS_KEY_ID": account["ROOT_ACCESS_KEY"],
        "AWS_SECRET_ACCESS_KEY": account["ROOT_SECRET_KEY"],
    }
    where = "memory" if folder.is_relative_to("/dev/shm") else "disk"
    name = f"versitygw {program.parent.name.partition('-')[0]}, posix, folder in {where}"
    return S3(name, f"http://127.0.0.1:{port}", {**ENVIRONMENT, **keys}, nice)


def _answers(process: subprocess.Popen[bytes], port: int) -> bool:
    assert process.poll() is None, f"versitygw ended with {process.returncode}"
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5):
        return True
    return False


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()

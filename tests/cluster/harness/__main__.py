"""The harness at the command line: `make cluster` is `up`, `make cluster-down` is `down`."""

# ruff: noqa: T201  printing is what a command is for

import argparse
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from . import control_plane, fake_nodes, gpus, lifecycle, processes
from .errors import HarnessError
from .identities import s3_account
from .machine import require_root
from .settings import Settings


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        _dispatch(Settings.read(), options)
    except HarnessError as error:
        print(f"cluster: {error}", file=sys.stderr)
        return 1
    return 0


def exports(settings: Settings) -> dict[str, str]:
    """The variables by which tests and people find the cluster."""
    account = s3_account(settings)
    return {
        "KUBECONFIG": str(settings.kubeconfig),
        "TIPHYS_TEST_S3": settings.s3_url,
        "TIPHYS_TEST_AUDIT_LOG": str(settings.audit_log),
        "AWS_ACCESS_KEY_ID": account.access_key,
        "AWS_SECRET_ACCESS_KEY": account.secret_key,
        "AWS_REGION": "us-east-1",
    }


def _dispatch(settings: Settings, options: argparse.Namespace) -> None:
    match options.action:
        case "build":
            lifecycle.build(settings)
        case "up":
            lifecycle.up(settings)
            _print_exports(settings)
        case "env":
            _require_running(settings)
            _print_exports(settings)
        case "down":
            lifecycle.down(settings)
        case _:
            require_root()
            _require_running(settings)
            _act_on_running(settings, options)


def _act_on_running(settings: Settings, options: argparse.Namespace) -> None:
    match options.action:
        case "import":
            lifecycle.import_image(settings, options.archive.absolute())
        case "stop":
            processes.stop(settings, options.daemon, signal.SIGKILL if options.kill else signal.SIGTERM)
        case "start":
            lifecycle.restart(settings, options.daemon)
        case "s3-user":
            print(control_plane.create_s3_user(settings, options.name))
        case _:
            _act_on_nodes(settings, options)


def _act_on_nodes(settings: Settings, options: argparse.Namespace) -> None:
    match options.action:
        case "gpus":
            gpus.advertise(settings, options.node, options.count)
        case "add-node":
            print(lifecycle.add_node(settings).name)
        case "lose-node":
            lifecycle.lose_node(settings, options.index)
        case "remove-node":
            lifecycle.remove_node(settings, options.index)
        case "add-fake-nodes":
            fake_nodes.add(settings, _group(options))
        case "remove-fake-nodes":
            fake_nodes.remove(settings, options.group)


def _group(options: argparse.Namespace) -> fake_nodes.Group:
    labels = dict(label.partition("=")[::2] for label in options.label)
    return fake_nodes.Group(options.group, options.count, options.gpus, options.model, labels, tuple(options.taint))


def _require_running(settings: Settings) -> None:
    if not settings.kubeconfig.exists():
        raise HarnessError(f"no cluster {settings.name} runs: `make cluster` starts one")


def _print_exports(settings: Settings) -> None:
    for name, value in exports(settings).items():
        print(f"export {name}={shlex.quote(value)}")
    print(f"export PATH={shlex.quote(str(settings.bin))}:$PATH")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m cluster.harness", description=__doc__)
    actions = parser.add_subparsers(dest="action", required=True)
    actions.add_parser("build", help="bring Debian packages and build the binaries; minutes the first time")
    actions.add_parser("up", help="start the cluster, or find that it runs; prints lines for the shell to evaluate")
    actions.add_parser("env", help="print these lines again")
    actions.add_parser("down", help="end the cluster and delete its state; binaries stay")
    actions.add_parser("import", help="import an image archive").add_argument("archive", type=Path)
    advertise = actions.add_parser("gpus", help="have a node say that it has so many GPUs")
    advertise.add_argument("node")
    advertise.add_argument("count", type=int)
    actions.add_parser("add-node", help="start one more node; prints its name")
    lose = actions.add_parser("lose-node", help="end a node as a power cut would")
    lose.add_argument("index", type=int)
    actions.add_parser("remove-node", help="the same, and forget it").add_argument("index", type=int)
    fake = actions.add_parser(
        "add-fake-nodes", help="add nodes that exist for the scheduler alone: group-1, group-2, …"
    )
    fake.add_argument("group", help="their common name, such as rack-a")
    fake.add_argument("count", type=int)
    fake.add_argument("--gpus", type=int, default=0, help="of each node")
    fake.add_argument("--model", default="", help="such as NVIDIA-A100-SXM4-80GB: the label nvidia.com/gpu.product")
    fake.add_argument("--label", action="append", default=[], metavar="KEY=VALUE", help="may be repeated")
    fake.add_argument("--taint", action="append", default=[], metavar="KEY=VALUE:EFFECT", help="may be repeated")
    gone = actions.add_parser("remove-fake-nodes", help="delete the nodes of a group and the pods on them")
    gone.add_argument("group")
    stop = actions.add_parser("stop", help="stop a daemon, such as apiserver or s3")
    stop.add_argument("daemon")
    stop.add_argument("--kill", action="store_true", help="by SIGKILL")
    actions.add_parser("start", help="start it again").add_argument("daemon")
    actions.add_parser("s3-user", help="add a user without rights; prints the secret key").add_argument("name")
    return parser


if __name__ == "__main__":
    sys.exit(main())

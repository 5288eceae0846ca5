"""Kubernetes is not packaged by Debian and comes here from its Go modules: checksums are held by go.sum files, or by
Go's checksum database where a module is installed on its own.

Each binary is kept under a key made of version, module files and flags; `bin/<name>` is a link to the current one,
so that a stale one is built again and one in use is never overwritten.
"""

import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from .errors import HarnessError
from .machine import run, say
from .settings import Settings

MODULES = Path(__file__).with_name("modules")
KUBERNETES = "v1.34.4"
_STAMP = "k8s.io/component-base/version"
_KUBERNETES_FLAGS = (
    f"-s -w -X {_STAMP}.gitVersion={KUBERNETES} -X {_STAMP}.gitMajor=1 -X {_STAMP}.gitMinor={KUBERNETES.split('.')[1]}"
)


@dataclass(frozen=True)
class Binary:
    """A command of a module: of one in `modules/` (`folder`), or installed on its own at `version`."""

    name: str
    package: str
    version: str
    folder: str = ""
    flags: str = "-s -w"

    @property
    def key(self) -> str:
        parts = [self.package, self.version, self.flags]
        if self.folder:
            parts += [path.read_text() for path in sorted((MODULES / self.folder).iterdir())]
        return f"{self.version}-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:12]}"

    def build(self, go: str, target: Path) -> None:
        """Compile into the folder `target`."""
        env = {**os.environ, "CGO_ENABLED": "0", "GOFLAGS": "-buildvcs=false", "GOBIN": str(target)}
        flags = ("-ldflags", self.flags)
        if self.folder:
            here = MODULES / self.folder
            run(go, "build", "-trimpath", *flags, "-o", target / self.name, self.package, cwd=here, env=env)
        else:
            run(go, "install", *flags, f"{self.package}@{self.version}", env=env)


def _kubernetes(name: str) -> Binary:
    return Binary(name, f"k8s.io/kubernetes/cmd/{name}", KUBERNETES, "kubernetes", _KUBERNETES_FLAGS)


BINARIES = (
    _kubernetes("kube-apiserver"),
    _kubernetes("kube-controller-manager"),
    _kubernetes("kube-scheduler"),
    _kubernetes("kube-proxy"),
    _kubernetes("kubelet"),
    _kubernetes("kubectl"),
    Binary("etcd", "go.etcd.io/etcd/server/v3", "v3.6.7", "etcd"),
    Binary("versitygw", "github.com/versity/versitygw/cmd/versitygw", "v1.8.0"),
    Binary("helm", "helm.sh/helm/v4/cmd/helm", "v4.3.1"),
    Binary("coredns", ".", "v1.13.1", "coredns"),
    Binary("pause", ".", "1", "pause"),
)
ON_DEMAND = (Binary("kwok", "sigs.k8s.io/kwok/cmd/kwok", "v0.7.0"),)  # newer ones ask for Go 1.26
"""Built when a test wants it first, rather than by everybody."""


def build_missing(settings: Settings) -> None:
    """Build what is not in the cache; waits where another process builds there."""
    with locked(settings.cache / "build.lock"):
        for binary in BINARIES:
            replace_link(settings.bin / binary.name, _built(settings, binary))


def build_one(settings: Settings, name: str) -> Path:
    """Build one of them, unless it is in the cache; where it lies."""
    with locked(settings.cache / "build.lock"):
        return _built(settings, next(each for each in (*BINARIES, *ON_DEMAND) if each.name == name))


def _built(settings: Settings, binary: Binary) -> Path:
    built = settings.cache / "built" / binary.key / binary.name
    if not built.exists():
        _build(binary, built)
    return built


def _build(binary: Binary, built: Path) -> None:
    say(f"building {binary.name} {binary.version} (the first time takes minutes)")
    began = time.monotonic()
    scratch = built.parent.with_name(f".{built.parent.name}-{binary.name}")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    binary.build(_go(), scratch)
    built.parent.mkdir(parents=True, exist_ok=True)
    (scratch / binary.name).rename(built)
    shutil.rmtree(scratch)
    say(f"built {binary.name} in {time.monotonic() - began:.0f} s, {built.stat().st_size / 1e6:.0f} MB")


def _go() -> str:
    found = shutil.which("go") or shutil.which("go", path="/usr/local/go/bin")
    if not found:
        raise HarnessError("there is no `go` in PATH or /usr/local/go/bin: install Go 1.25 or newer")
    return found


def replace_link(name: Path, target: Path) -> None:
    """Have `name` lead to `target`, at no moment to nothing."""
    name.parent.mkdir(parents=True, exist_ok=True)
    new = name.with_name(f".{name.name}.new")
    new.unlink(missing_ok=True)
    new.symlink_to(target)
    new.replace(name)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Wait until no other process holds the lock."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield

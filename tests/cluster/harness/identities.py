"""Who is who in the cluster: a certificate authority, and a token for each of its parts, each with the rights that a
real cluster gives it. RBAC is worth testing only where nobody is an administrator by accident.
"""

import csv
import json
import secrets
from dataclasses import dataclass
from pathlib import Path

from .machine import run
from .settings import NODES, Settings

ADMIN = "admin"


@dataclass(frozen=True)
class S3Account:
    """The administrator of the S3 server."""

    access_key: str
    secret_key: str


def create(settings: Settings) -> None:
    """Keys, certificates, tokens and the kubeconfig files that carry them, in a folder that is root's alone."""
    settings.folder.parent.mkdir(parents=True, exist_ok=True)
    settings.folder.mkdir(mode=0o700)
    pki(settings).mkdir()
    _certificates(settings)
    users = {ADMIN: "system:masters"}
    users |= {f"system:kube-{name}": "" for name in ("controller-manager", "scheduler", "proxy")}
    users |= {"system:coredns": "", "system:kwok": ""}
    users |= {f"system:node:{settings.node(index).name}": "system:nodes" for index in range(1, NODES + 1)}
    tokens = {user: secrets.token_hex(16) for user in users}
    with (pki(settings) / "tokens.csv").open("w") as file:
        csv.writer(file).writerows([tokens[user], user, user, group] for user, group in users.items())
    for user, token in tokens.items():
        kubeconfig(settings, user).write_text(_kubeconfig(settings, user, token))
    account = {"access_key": "tiphys-admin", "secret_key": secrets.token_hex(16)}
    (settings.folder / "s3.json").write_text(json.dumps(account))


def pki(settings: Settings) -> Path:
    return settings.folder / "pki"


def kubeconfig(settings: Settings, user: str) -> Path:
    if user == ADMIN:
        return settings.kubeconfig
    return pki(settings) / f"{user.replace(':', '-')}.kubeconfig"


def s3_account(settings: Settings) -> S3Account:
    return S3Account(**json.loads((settings.folder / "s3.json").read_text()))


def _certificates(settings: Settings) -> None:
    folder = pki(settings)
    files = ("-keyout", folder / "ca.key", "-out", folder / "ca.crt")
    run("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "30", "-subj", "/CN=test-ca", *files)
    names = ["kubernetes", "kubernetes.default", "kubernetes.default.svc", "localhost"]
    addresses = [_first(settings.services), settings.node(1).address, "127.0.0.1"]
    _sign(folder, "api", "/CN=kube-apiserver", [*(f"DNS:{n}" for n in names), *(f"IP:{a}" for a in addresses)])
    _sign(folder, "api-to-kubelet", "/O=system:masters/CN=kube-apiserver-kubelet-client")
    run("openssl", "genrsa", "-out", folder / "service-accounts.key", "2048")


def _sign(folder: Path, name: str, subject: str, alternatives: list[str] | None = None) -> None:
    key, request, extra = folder / f"{name}.key", folder / f"{name}.csr", folder / f"{name}.ext"
    run("openssl", "req", "-newkey", "rsa:2048", "-nodes", "-subj", subject, "-keyout", key, "-out", request)
    extra.write_text(f"subjectAltName={','.join(alternatives)}\n" if alternatives else "")
    authority = ("-CA", folder / "ca.crt", "-CAkey", folder / "ca.key", "-CAcreateserial", "-days", "30")
    run("openssl", "x509", "-req", "-in", request, *authority, "-out", folder / f"{name}.crt", "-extfile", extra)


def _first(subnet: str) -> str:
    return subnet.rpartition(".")[0] + ".1"


def _kubeconfig(settings: Settings, user: str, token: str) -> str:
    cluster = {"server": settings.api_url, "certificate-authority": str(pki(settings) / "ca.crt")}
    context = f"tiphys-{settings.name}"
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": context, "cluster": cluster}],
        "users": [{"name": user, "user": {"token": token}}],
        "contexts": [{"name": context, "context": {"cluster": context, "user": user}}],
        "current-context": context,
    }
    return json.dumps(config, indent=1)

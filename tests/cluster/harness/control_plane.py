"""The control plane and the S3 server: the daemons that a cluster has once, all on the first node."""

import json
import secrets

from . import processes
from .identities import kubeconfig, pki, s3_account
from .kubectl import answers
from .machine import run
from .settings import Settings

_AUDIT = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [{"level": "Metadata"}],
}


def commands(settings: Settings) -> dict[str, list[str]]:
    """The daemons in the order in which they start, with their command lines."""
    return {
        "etcd": _etcd(settings),
        "s3": _s3(settings),
        "apiserver": _apiserver(settings),
        "controller-manager": _controller_manager(settings),
        "scheduler": _scheduler(settings),
    }


def start(settings: Settings) -> None:
    """Start all; returns when the API server is ready."""
    settings.folder.joinpath("audit-policy.json").write_text(json.dumps(_AUDIT))
    for folder in ("s3", "iam"):
        settings.folder.joinpath(folder).mkdir()
    for name in commands(settings):
        start_one(settings, name)


def start_one(settings: Settings, name: str) -> None:
    """Start one daemon, of a new cluster or after a test has ended it; returns when it answers."""
    env = {}
    if name == "s3":
        account = s3_account(settings)
        env = {"ROOT_ACCESS_KEY": account.access_key, "ROOT_SECRET_KEY": account.secret_key}
    processes.start(settings, settings.node(1), name, commands(settings)[name], env)
    if name == "apiserver":
        processes.wait_for(settings, name, "the API server is ready", lambda: answers(settings, "/readyz"))


def create_s3_user(settings: Settings, name: str) -> str:
    """Add a user of the S3 server who may do only what policies of buckets allow; the secret key."""
    admin, secret = s3_account(settings), secrets.token_hex(16)
    env = {"ADMIN_ACCESS_KEY_ID": admin.access_key, "ADMIN_SECRET_ACCESS_KEY": admin.secret_key}
    user = ("create-user", "--access", name, "--secret", secret, "--role", "user")
    run(f"{settings.bin}/versitygw", "admin", f"--endpoint-url={settings.s3_url}", *user, env=env)
    return secret


def _etcd(settings: Settings) -> list[str]:
    return [
        f"{settings.bin}/etcd",
        f"--data-dir={settings.folder}/etcd",
        "--listen-client-urls=http://127.0.0.1:2379",
        "--advertise-client-urls=http://127.0.0.1:2379",
        "--listen-peer-urls=http://127.0.0.1:2380",
        "--unsafe-no-fsync",
    ]


def _s3(settings: Settings) -> list[str]:
    address = settings.s3_url.removeprefix("http://")
    options = [f"--port={address}", f"--iam-dir={settings.folder}/iam", "--keep-alive", "--quiet"]
    return [f"{settings.bin}/versitygw", *options, "posix", f"{settings.folder}/s3"]


def _apiserver(settings: Settings) -> list[str]:
    keys = pki(settings)
    return [
        f"{settings.bin}/kube-apiserver",
        "--etcd-servers=http://127.0.0.1:2379",
        f"--advertise-address={settings.node(1).address}",
        "--secure-port=6443",
        f"--tls-cert-file={keys}/api.crt",
        f"--tls-private-key-file={keys}/api.key",
        f"--client-ca-file={keys}/ca.crt",
        f"--kubelet-client-certificate={keys}/api-to-kubelet.crt",
        f"--kubelet-client-key={keys}/api-to-kubelet.key",
        f"--token-auth-file={keys}/tokens.csv",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        f"--service-cluster-ip-range={settings.services}",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={keys}/service-accounts.key",
        f"--service-account-signing-key-file={keys}/service-accounts.key",
        "--kubelet-preferred-address-types=InternalIP",
        "--allow-privileged=true",
        f"--audit-policy-file={settings.folder}/audit-policy.json",
        f"--audit-log-path={settings.audit_log}",
        "--audit-log-mode=blocking",  # a test that has its answer finds the record of it
        "--audit-log-maxsize=100000",  # MB; by default it begins anew after 100, in the middle of a test
        # Pods leave a lost node after seconds, not after five minutes.
        "--default-not-ready-toleration-seconds=20",
        "--default-unreachable-toleration-seconds=20",
    ]


def _controller_manager(settings: Settings) -> list[str]:
    keys = pki(settings)
    return [
        f"{settings.bin}/kube-controller-manager",
        f"--kubeconfig={kubeconfig(settings, 'system:kube-controller-manager')}",
        "--use-service-account-credentials=true",
        f"--service-account-private-key-file={keys}/service-accounts.key",
        f"--root-ca-file={keys}/ca.crt",
        "--leader-elect=false",
        "--kube-api-qps=200",  # it takes the taint from each of a hundred new nodes
        "--kube-api-burst=400",
    ]


def _scheduler(settings: Settings) -> list[str]:
    config = kubeconfig(settings, "system:kube-scheduler")
    # Asks which requests need no rights; without an answer it would refuse to start.
    access = [f"--authentication-kubeconfig={config}", f"--authorization-kubeconfig={config}"]
    return [f"{settings.bin}/kube-scheduler", f"--kubeconfig={config}", *access, "--leader-elect=false"]

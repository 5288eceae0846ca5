"""Names of services: charts and programs speak of `tiphys.ns.svc`, so a cluster without DNS would test something else.

CoreDNS runs beside the control plane and asks the API server under an account of its own.
"""

import urllib.request

from . import processes
from .identities import kubeconfig
from .kubectl import apply
from .settings import Settings

NAME = "dns"
USER = "system:coredns"
_RBAC = "rbac.authorization.k8s.io"


def start(settings: Settings) -> None:
    """Start it; returns when it has seen the services that exist."""
    apply(settings, _role())
    apply(settings, _binding())
    corefile = settings.folder / "Corefile"
    corefile.write_text(_corefile(settings))
    processes.start(settings, settings.node(1), NAME, [f"{settings.bin}/coredns", f"-conf={corefile}"])
    processes.wait_for(settings, NAME, "DNS is ready", lambda: _ready(settings))


def _ready(settings: Settings) -> bool:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(f"http://{settings.dns_address}:8181/ready", timeout=5) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def _corefile(settings: Settings) -> str:
    return f"""\
.:53 {{
    bind {settings.dns_address}
    errors
    ready {settings.dns_address}:8181
    kubernetes cluster.local in-addr.arpa {{
        kubeconfig {kubeconfig(settings, USER)}
        ttl 1
    }}
}}
"""


def _role() -> dict[str, object]:
    read = ["list", "watch"]
    rules = [
        {"apiGroups": [""], "resources": ["services", "namespaces"], "verbs": read},
        {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": read},
    ]
    return {"apiVersion": f"{_RBAC}/v1", "kind": "ClusterRole", "metadata": {"name": USER}, "rules": rules}


def _binding() -> dict[str, object]:
    return {
        "apiVersion": f"{_RBAC}/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": USER},
        "roleRef": {"apiGroup": _RBAC, "kind": "ClusterRole", "name": USER},
        "subjects": [{"apiGroup": _RBAC, "kind": "User", "name": USER}],
    }

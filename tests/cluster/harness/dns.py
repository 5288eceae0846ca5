"""Names of services: charts and programs speak of `tiphys.ns.svc`, so a cluster without DNS would test something else.

CoreDNS runs beside the control plane and asks the API server under an account of its own.
"""

import urllib.request

from . import processes
from .identities import kubeconfig
from .rbac import grant
from .settings import Settings

NAME = "dns"
USER = "system:coredns"
_READ = ["list", "watch"]
_RULES = [
    {"apiGroups": [""], "resources": ["services", "namespaces"], "verbs": _READ},
    {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": _READ},
]


def start(settings: Settings) -> None:
    """Start it; returns when it has seen the services that exist."""
    grant(settings, USER, _RULES)
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

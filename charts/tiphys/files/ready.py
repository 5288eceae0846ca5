"""Ask every pod behind a headless Service whether it is ready, and say why if it is not: `helm test`."""

import json
import socket
import ssl
import sys
import time
import urllib.error
import urllib.request

PATIENCE_SECONDS = 180


def unready(service: str, port: int, scheme: str) -> list[str]:
    """One sentence for each pod that is not ready."""
    try:
        found = socket.getaddrinfo(service, port, type=socket.SOCK_STREAM)
    except OSError as error:
        return [f"{service} has no address: {error}"]
    return [problem for address in sorted({each[4][0] for each in found}) if (problem := ask(address, port, scheme))]


def ask(address: str, port: int, scheme: str) -> str:
    """Why the pod is not ready; empty if it is. No secret is sent, and no certificate names an address."""
    host = f"[{address}]" if ":" in address else address
    url = f"{scheme}://{host}:{port}/readyz"
    unverified = ssl._create_unverified_context() if scheme == "https" else None  # noqa: S323
    try:
        with urllib.request.urlopen(url, timeout=10, context=unverified) as answer:  # noqa: S310
            return degraded(address, answer.read())
    except urllib.error.HTTPError as error:
        return f"{address} answers {error.code}: {error.read().decode(errors='replace').strip()}"
    except OSError as error:
        return f"{address} does not answer: {error}"


def degraded(address: str, body: bytes) -> str:
    """Tenants that a ready pod cannot serve, as it reports them; empty if there are none."""
    try:
        state = json.loads(body)
    except ValueError:
        return ""
    if not isinstance(state, dict) or state.get("status", "ok") == "ok":
        return ""
    return f"{address} is {state['status']}: {json.dumps(state)}"


def main() -> int:
    """Poll until all are ready; pods of before an upgrade may just be ending."""
    service, port, scheme = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    deadline = time.monotonic() + PATIENCE_SECONDS
    while problems := unready(service, port, scheme):
        if time.monotonic() > deadline:
            print("\n".join(problems))  # noqa: T201  the log of the pod is where a person looks
            return 1
        time.sleep(1)
    print(f"every pod of {service} is ready")  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())

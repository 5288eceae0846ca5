"""Counters of a process, read from its ``/metrics``."""

import httpx


def counted(url: str) -> dict[str, float]:
    """Every sample by its name and labels."""
    text = httpx.get(f"{url}/metrics", trust_env=False, timeout=60).text
    lines = (line.rpartition(" ") for line in text.splitlines() if line and not line.startswith("#"))
    return {name: float(value) for name, _, value in lines}

"""Who may do what, read from the rendered roles: for the table of the installation guide."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from support.chart import MINIMAL, ROOT, Object, key, named, of_kind, render

GUIDE = ROOT / "docs" / "install.md"
_BEGIN, _END = "<!-- rights: begin -->\n", "<!-- rights: end -->\n"
_MODES = ("sidecar", "agent")


class Right(NamedTuple):
    """One resource that an account may use; ``where`` is home, workflows or cluster."""

    account: str
    where: str
    resource: str
    verbs: str


def rights(objects: Sequence[Object]) -> Iterator[Right]:
    """All rights that the bindings among ``objects`` give; for a release ``ours`` in the namespace ``system``."""
    for binding in of_kind(objects, "RoleBinding", "ClusterRoleBinding"):
        reference = binding["roleRef"]
        role = named(objects, reference["kind"], reference["name"], key(binding)[1])
        [subject] = binding["subjects"]
        account = subject["name"].replace("ours-", "")
        for rule in role["rules"]:
            for group in rule["apiGroups"]:
                for resource in rule["resources"]:
                    name = f" {rule['resourceNames'][0]}" if "resourceNames" in rule else ""
                    yield Right(account, _where(role), _full(resource, group) + name, ", ".join(rule["verbs"]))


def _full(resource: str, group: str) -> str:
    """As kubectl writes it: `workflowtasksets.argoproj.io/status`."""
    plural, slash, subresource = resource.partition("/")
    return f"{plural}.{group}{slash}{subresource}" if group else resource


def _where(role: Object) -> str:
    if role["kind"] == "ClusterRole":
        return "cluster"
    return "workflows" if "workflow" in role["metadata"]["name"] else "home"


def table() -> str:
    """The table of the guide."""
    by_mode = {mode: list(rights(render(*MINIMAL, f"mode={mode}"))) for mode in _MODES}
    rows = ["| account | where | what | verbs | mode |", "|---|---|---|---|---|"]
    for right in sorted({*by_mode["sidecar"], *by_mode["agent"]}):
        modes = [mode for mode in _MODES if right in by_mode[mode]]
        cells = (
            f"`{right.account}`",
            right.where,
            f"`{right.resource}`",
            right.verbs,
            "both" if modes[1:] else modes[0],
        )
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join([*rows, ""])


def with_table(guide: str) -> str:
    """The guide with the table as it should be."""
    before, _, rest = guide.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    return f"{before}{_BEGIN}\n{table()}\n{_END}{after}"

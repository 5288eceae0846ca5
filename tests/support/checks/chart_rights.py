"""Who may do what, read from the rendered roles, with what each right depends on."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from support.checks.chart import MINIMAL, ROOT, Object, key, named, of_kind, render

GUIDE = ROOT / "docs" / "install.md"
_BEGIN, _END = "<!-- rights: begin -->\n", "<!-- rights: end -->\n"
_MODES = ("sidecar", "agent")
_GANGS = "gangs.job"


class Right(NamedTuple):
    """One resource that an account may use; ``where`` is home, workflows, cluster, or a namespace of Kubernetes."""

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
    if role["metadata"]["namespace"].startswith("kube-"):
        return str(role["metadata"]["namespace"])
    return "home" if role["metadata"]["name"] in ("ours-plugin", "ours-controller", "ours-ui") else "workflows"


def table() -> str:
    """The table of the guide."""
    found = {
        (mode, gangs): set(rights(render(*MINIMAL, f"mode={mode}", f"{_GANGS}={str(gangs).lower()}")))
        for mode in _MODES
        for gangs in (False, True)
    }
    pages = set(rights(render(*MINIMAL, "ui.enabled=true"))) - set().union(*found.values())
    rows = ["| account | where | what | verbs | only with |", "|---|---|---|---|---|"]
    for right in sorted(set().union(*found.values())):
        given = {form for form, every in found.items() if right in every}
        cells = (f"`{right.account}`", right.where, f"`{right.resource}`", right.verbs, _condition(given))
        rows.append(f"| {' | '.join(cells).rstrip()} |")
    for right in sorted(pages):
        cells = (f"`{right.account}`", right.where, f"`{right.resource}`", right.verbs, "`ui.enabled`")
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join([*rows, ""])


def _condition(given: set[tuple[str, bool]]) -> str:
    """In which mode, and whether with gangs, a right is given; empty for a right that is always given."""
    modes = sorted({mode for mode, _ in given})
    conditions = [f"mode `{modes[0]}`"] * (len(modes) == 1) + [f"`{_GANGS}`"] * all(gangs for _, gangs in given)
    return ", ".join(conditions)


def with_table(guide: str) -> str:
    """The guide with the table as it should be."""
    before, _, rest = guide.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    return f"{before}{_BEGIN}\n{table()}\n{_END}{after}"

"""Checks of a namespace in which workflows run: what Argo and Tiphys look for there. Each is pure."""

from collections.abc import Iterator

from tiphys_controller.doctor.finding import Finding, failed, ok, unknown, warning
from tiphys_controller.doctor.observed import Mode, Right, Unknown, WorkflowNamespace

WORKFLOW_ACCOUNT = "tiphys-workflow"
PLUGIN_ACCOUNT = "tiphys-executor-plugin"
PLUGIN_CONFIG = "tiphys-executor-plugin"
STORE_SECRET = "tiphys-store"  # noqa: S105  the name of a Secret
TOKEN_SUFFIX = ".service-account-token"  # noqa: S105  Argo looks for a token under this name

EXECUTOR_RIGHTS = (Right("create", "workflowtaskresults"), Right("patch", "workflowtaskresults"))
"""What Argo's executor does in each pod."""
AGENT_RIGHTS = (
    Right("list", "workflowtasksets"),
    Right("watch", "workflowtasksets"),
    Right("patch", "workflowtasksets/status"),
)
"""What Argo's agent pod does."""
GANG_RIGHTS = (Right("create", "jobs", "batch"), Right("get", "jobs", "batch"))
"""What Argo's executor does for a training on several nodes."""


def check_namespace(namespace: WorkflowNamespace, mode: Mode | None) -> list[Finding]:
    """Everything about one namespace. ``mode`` None: no plugin was found, so that sidecar mode is assumed."""
    if namespace.exists is False:
        return [
            failed(
                _named(namespace, "exists"),
                f"there is no namespace {namespace.name}",
                f"kubectl create namespace {namespace.name}",
            )
        ]
    sidecar = mode is not Mode.AGENT
    findings = [*_accounts(namespace, sidecar), *_tokens(namespace, sidecar), _rights(namespace, sidecar)]
    findings += _gang_rights(namespace)
    findings += [_plugin_config(namespace)] if sidecar else []
    return [*findings, _store_secret(namespace)]


def _accounts(namespace: WorkflowNamespace, sidecar: bool) -> Iterator[Finding]:
    wanted = {WORKFLOW_ACCOUNT: "no pod of a workflow is made"}
    if sidecar:
        wanted[PLUGIN_ACCOUNT] = "every plugin step ends in Error"
    name = _named(namespace, "accounts")
    if isinstance(namespace.accounts, Unknown):
        yield unknown(name, namespace.accounts.reason)
        return
    missing = [account for account in wanted if account not in namespace.accounts]
    for account in missing:
        yield failed(name, f"there is no service account {account}: {wanted[account]}", _upgrade(namespace))
    if not missing:
        yield ok(name, f"service accounts are there: {', '.join(wanted)}")


def _tokens(namespace: WorkflowNamespace, sidecar: bool) -> Iterator[Finding]:
    if not sidecar:
        return
    for account in (WORKFLOW_ACCOUNT, PLUGIN_ACCOUNT):
        name, secret = _named(namespace, "tokens"), f"{account}{TOKEN_SUFFIX}"
        keys = namespace.secrets.get(secret, frozenset())
        if isinstance(keys, Unknown):
            yield unknown(name, keys.reason)
        elif not keys:
            yield failed(
                name,
                f"there is no Secret {secret}, from which Argo mounts the account's token: the agent pod never starts, "
                "and plugin steps stay Pending for ever",
                _upgrade(namespace),
            )
        elif "token" not in keys:
            yield failed(
                name,
                f"Secret {secret} holds no token: its annotation kubernetes.io/service-account.name must be {account}, "
                "and its type kubernetes.io/service-account-token",
                f"kubectl delete secret -n {namespace.name} {secret}, then {_upgrade(namespace)}",
            )
        else:
            yield ok(name, f"Secret {secret} holds a token")


def _rights(namespace: WorkflowNamespace, sidecar: bool) -> Finding:
    name = _named(namespace, "rights")
    if isinstance(namespace.rights, Unknown):
        return unknown(name, namespace.rights.reason)
    wanted = EXECUTOR_RIGHTS + (AGENT_RIGHTS if sidecar else ())
    if lacking := [str(right) for right in wanted if not namespace.rights.get(right, False)]:
        return failed(
            name,
            f"account {WORKFLOW_ACCOUNT} may not {', '.join(lacking)}: the agent pod crashes again and again, and "
            "plugin steps stay Pending for ever"
            if sidecar
            else f"account {WORKFLOW_ACCOUNT} may not {', '.join(lacking)}: steps end in Error",
            _upgrade(namespace),
        )
    return ok(name, f"account {WORKFLOW_ACCOUNT} may do what Argo's pods do")


def _gang_rights(namespace: WorkflowNamespace) -> Iterator[Finding]:
    """A warning only: who trains on one node has no use for these."""
    if isinstance(namespace.rights, Unknown):
        return
    if lacking := [str(right) for right in GANG_RIGHTS if not namespace.rights.get(right, False)]:
        yield warning(
            _named(namespace, "jobs"),
            f"account {WORKFLOW_ACCOUNT} may not {', '.join(lacking)}: a training on several nodes ends in Error",
            _upgrade(namespace),
        )


def _plugin_config(namespace: WorkflowNamespace) -> Finding:
    name = _named(namespace, "plugin")
    if isinstance(namespace.config_maps, Unknown):
        return unknown(name, namespace.config_maps.reason)
    if PLUGIN_CONFIG not in namespace.config_maps:
        return failed(
            name,
            f"there is no ConfigMap {PLUGIN_CONFIG}: plugin steps fail with 'no plugin executed the template', unless "
            "the Workflow brings the plugin along",
            _upgrade(namespace),
        )
    return ok(name, f"the executor plugin is there ({PLUGIN_CONFIG})")


def _store_secret(namespace: WorkflowNamespace) -> Finding:
    name = _named(namespace, "store")
    keys = namespace.secrets.get(STORE_SECRET, frozenset())
    if isinstance(keys, Unknown):
        return unknown(name, keys.reason)
    if not keys:
        return warning(
            name,
            f"there is no Secret {STORE_SECRET}: training pods cannot save, unless they get credentials of the store "
            "from their node or by workload identity",
            f"kubectl create secret generic {STORE_SECRET} -n {namespace.name} --from-literal=AWS_ACCESS_KEY_ID=… "
            "--from-literal=AWS_SECRET_ACCESS_KEY=…",
        )
    return ok(name, f"Secret {STORE_SECRET} sets {', '.join(sorted(keys))}")


def _named(namespace: WorkflowNamespace, what: str) -> str:
    return f"{namespace.name}/{what}"


def _upgrade(namespace: WorkflowNamespace) -> str:
    return f"helm upgrade tiphys charts/tiphys --reuse-values, with {namespace.name} among its namespaces"

"""Checks of a namespace in which workflows run: accounts, tokens, rights and credentials. Each is pure."""

from collections.abc import Iterator

from tiphys_controller.doctor.finding import DoctorFinding, failed_finding, ok_finding, unknown_finding, warning_finding
from tiphys_controller.doctor.observed import Permission, PluginMode, UnknownValue, WorkflowNamespace

WORKFLOW_ACCOUNT = "tiphys-workflow"
PLUGIN_ACCOUNT = "tiphys-executor-plugin"
PLUGIN_CONFIG = "tiphys-executor-plugin"
STORE_SECRET = "tiphys-store"  # noqa: S105  the name of a Secret
TOKEN_SUFFIX = ".service-account-token"  # noqa: S105  Argo looks for a token under this name

EXECUTOR_PERMISSIONS = (Permission("create", "workflowtaskresults"), Permission("patch", "workflowtaskresults"))
"""Needed by Argo's executor in each pod."""
AGENT_PERMISSIONS = (
    Permission("list", "workflowtasksets"),
    Permission("watch", "workflowtasksets"),
    Permission("patch", "workflowtasksets/status"),
)
"""Needed by Argo's agent pod."""
GANG_PERMISSIONS = (Permission("create", "jobs", "batch"), Permission("get", "jobs", "batch"))
"""Needed by Argo's executor for a training on several nodes."""


def check_namespace(namespace: WorkflowNamespace, mode: PluginMode | None) -> list[DoctorFinding]:
    """All findings about one namespace. ``mode`` None: no plugin was found, so sidecar mode is assumed."""
    if namespace.exists is False:
        return [
            failed_finding(
                _finding_name(namespace, "exists"),
                f"there is no namespace {namespace.name}",
                f"kubectl create namespace {namespace.name}",
            )
        ]
    sidecar = mode is not PluginMode.AGENT
    findings = [
        *_check_accounts(namespace, sidecar),
        *_check_tokens(namespace, sidecar),
        _check_permissions(namespace, sidecar),
    ]
    findings += _check_gang_permissions(namespace)
    findings += [_check_plugin_config(namespace)] if sidecar else []
    return [*findings, _check_store_secret(namespace)]


def _check_accounts(namespace: WorkflowNamespace, sidecar: bool) -> Iterator[DoctorFinding]:
    consequences = {WORKFLOW_ACCOUNT: "no pod of a workflow is made"}
    if sidecar:
        consequences[PLUGIN_ACCOUNT] = "every plugin step ends in Error"
    name = _finding_name(namespace, "accounts")
    if isinstance(namespace.accounts, UnknownValue):
        yield unknown_finding(name, namespace.accounts.reason)
        return
    missing = [account for account in consequences if account not in namespace.accounts]
    for account in missing:
        yield failed_finding(
            name, f"there is no service account {account}: {consequences[account]}", _upgrade_command(namespace)
        )
    if not missing:
        yield ok_finding(name, f"service accounts are there: {', '.join(consequences)}")


def _check_tokens(namespace: WorkflowNamespace, sidecar: bool) -> Iterator[DoctorFinding]:
    if not sidecar:
        return
    for account in (WORKFLOW_ACCOUNT, PLUGIN_ACCOUNT):
        name, secret = _finding_name(namespace, "tokens"), f"{account}{TOKEN_SUFFIX}"
        keys = namespace.secrets.get(secret, frozenset())
        if isinstance(keys, UnknownValue):
            yield unknown_finding(name, keys.reason)
        elif not keys:
            yield failed_finding(
                name,
                f"there is no Secret {secret}, from which Argo mounts the account's token: the agent pod never starts, "
                "and plugin steps stay Pending for ever",
                _upgrade_command(namespace),
            )
        elif "token" not in keys:
            yield failed_finding(
                name,
                f"Secret {secret} holds no token: its annotation kubernetes.io/service-account.name must be {account}, "
                "and its type kubernetes.io/service-account-token",
                f"kubectl delete secret -n {namespace.name} {secret}, then {_upgrade_command(namespace)}",
            )
        else:
            yield ok_finding(name, f"Secret {secret} holds a token")


def _check_permissions(namespace: WorkflowNamespace, sidecar: bool) -> DoctorFinding:
    name = _finding_name(namespace, "rights")
    if isinstance(namespace.permissions, UnknownValue):
        return unknown_finding(name, namespace.permissions.reason)
    needed = EXECUTOR_PERMISSIONS + (AGENT_PERMISSIONS if sidecar else ())
    if lacking := [str(right) for right in needed if not namespace.permissions.get(right, False)]:
        return failed_finding(
            name,
            f"account {WORKFLOW_ACCOUNT} may not {', '.join(lacking)}: the agent pod crashes again and again, and "
            "plugin steps stay Pending for ever"
            if sidecar
            else f"account {WORKFLOW_ACCOUNT} may not {', '.join(lacking)}: steps end in Error",
            _upgrade_command(namespace),
        )
    return ok_finding(name, f"account {WORKFLOW_ACCOUNT} may do what Argo's pods do")


def _check_gang_permissions(namespace: WorkflowNamespace) -> Iterator[DoctorFinding]:
    """Only a warning: trainings on one node do not need these permissions."""
    if isinstance(namespace.permissions, UnknownValue):
        return
    if lacking := [str(right) for right in GANG_PERMISSIONS if not namespace.permissions.get(right, False)]:
        yield warning_finding(
            _finding_name(namespace, "jobs"),
            f"account {WORKFLOW_ACCOUNT} may not {', '.join(lacking)}: a training on several nodes ends in Error",
            _upgrade_command(namespace),
        )


def _check_plugin_config(namespace: WorkflowNamespace) -> DoctorFinding:
    name = _finding_name(namespace, "plugin")
    if isinstance(namespace.config_maps, UnknownValue):
        return unknown_finding(name, namespace.config_maps.reason)
    if PLUGIN_CONFIG not in namespace.config_maps:
        return failed_finding(
            name,
            f"there is no ConfigMap {PLUGIN_CONFIG}: plugin steps fail with 'no plugin executed the template', unless "
            "the Workflow brings the plugin along",
            _upgrade_command(namespace),
        )
    return ok_finding(name, f"the executor plugin is there ({PLUGIN_CONFIG})")


def _check_store_secret(namespace: WorkflowNamespace) -> DoctorFinding:
    name = _finding_name(namespace, "store")
    keys = namespace.secrets.get(STORE_SECRET, frozenset())
    if isinstance(keys, UnknownValue):
        return unknown_finding(name, keys.reason)
    if not keys:
        return warning_finding(
            name,
            f"there is no Secret {STORE_SECRET}: training pods cannot save, unless they get credentials of the store "
            "from their node or by workload identity",
            f"kubectl create secret generic {STORE_SECRET} -n {namespace.name} --from-literal=AWS_ACCESS_KEY_ID=… "
            "--from-literal=AWS_SECRET_ACCESS_KEY=…",
        )
    return ok_finding(name, f"Secret {STORE_SECRET} sets {', '.join(sorted(keys))}")


def _finding_name(namespace: WorkflowNamespace, what: str) -> str:
    return f"{namespace.name}/{what}"


def _upgrade_command(namespace: WorkflowNamespace) -> str:
    return f"helm upgrade tiphys charts/tiphys --reuse-values, with {namespace.name} among its namespaces"

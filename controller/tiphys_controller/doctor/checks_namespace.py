"""Checks of a namespace in which workflows run: accounts, tokens, rights and credentials. Each is pure."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from tiphys.protocol.gang import GANG_ACCOUNT
from tiphys.protocol.step_spec import EXECUTOR_ACCOUNT, STORE_SECRET
from tiphys_controller.doctor.check import (
    CheckStatus,
    Finding,
    UnknownValue,
    check,
    failed,
    known,
    not_checked,
    passed,
    warning,
)
from tiphys_controller.doctor.observed import (
    Permission,
    PluginMode,
    UnreadSecret,
    WorkflowNamespace,
)

WORKFLOW_ACCOUNT = "tiphys-workflow"
PLUGIN_ACCOUNT = "tiphys-executor-plugin"
PLUGIN_CONFIG = "tiphys-executor-plugin"
TOKEN_SUFFIX = ".service-account-token"  # noqa: S105  Argo looks for a token under this name

EXECUTOR_PERMISSIONS = (Permission("create", "workflowtaskresults"), Permission("patch", "workflowtaskresults"))
PERMISSIONS: Mapping[str, tuple[Permission, ...]] = {
    WORKFLOW_ACCOUNT: (Permission("watch", "workflowtasksets"), Permission("patch", "workflowtasksets/status")),
    EXECUTOR_ACCOUNT: EXECUTOR_PERMISSIONS,
    GANG_ACCOUNT: (*EXECUTOR_PERMISSIONS, Permission("create", "jobs", "batch"), Permission("get", "jobs", "batch")),
}
"""Permissions by account: of Argo's agent pod, of its executor in each pod, and of the pod that creates a gang."""


class _NeededAccount(NamedTuple):
    """An account that Argo uses in a namespace, and what happens without it, its token or one of its permissions."""

    name: str
    without_account: str
    without_mount: str
    without_permission: str = ""


_AGENT_POD = "the agent pod never starts, and plugin steps stay Pending for ever"
_EXECUTOR = _NeededAccount(
    EXECUTOR_ACCOUNT,
    without_account="every step ends in Error",
    without_mount="no pod of a step starts",
    without_permission="steps end in Error",
)
_AGENT = _NeededAccount(
    WORKFLOW_ACCOUNT,
    without_account="no pod of a workflow is made",
    without_mount=_AGENT_POD,
    without_permission="the agent pod crashes again and again, and plugin steps stay Pending for ever",
)
_PLUGIN = _NeededAccount(PLUGIN_ACCOUNT, without_account="every plugin step ends in Error", without_mount=_AGENT_POD)
_GANG_REMEDY = "helm upgrade tiphys charts/tiphys --reuse-values --set gangs.job=true"


def check_namespace(namespace: WorkflowNamespace, mode: PluginMode | None) -> list[Finding]:
    """All findings about one namespace. ``mode`` None: no plugin was found, so sidecar mode is assumed."""
    if namespace.exists is False:
        return _check_exists(namespace)
    sidecar = mode is not PluginMode.AGENT
    with_token = (_EXECUTOR, _AGENT, _PLUGIN) if sidecar else (_EXECUTOR,)
    return [
        *_check_accounts(namespace, with_token if sidecar else (*with_token, _AGENT)),
        *_check_tokens(namespace, with_token),
        *_check_permissions(namespace, [account for account in with_token if account.without_permission]),
        *_check_gangs(namespace),
        *(_check_plugin_config(namespace) if sidecar else ()),
        *_check_store_secret(namespace),
        *_check_store_access(namespace),
    ]


@check("exists")
def _check_exists(namespace: WorkflowNamespace) -> Iterator[Finding]:
    yield failed(f"there is no namespace {namespace.name}", f"kubectl create namespace {namespace.name}")


@check("accounts")
def _check_accounts(namespace: WorkflowNamespace, needed: Sequence[_NeededAccount]) -> Iterator[Finding]:
    accounts = known(namespace.accounts)
    missing = [account for account in needed if account.name not in accounts]
    for account in missing:
        yield failed(
            f"there is no service account {account.name}: {account.without_account}", _upgrade_command(namespace)
        )
    if not missing:
        yield passed(f"service accounts are there: {', '.join(account.name for account in needed)}")


@check("tokens")
def _check_tokens(namespace: WorkflowNamespace, needed: Sequence[_NeededAccount]) -> Iterator[Finding]:
    for account in needed:
        secret = f"{account.name}{TOKEN_SUFFIX}"
        keys = namespace.secrets.get(secret, frozenset())
        if isinstance(keys, UnknownValue):
            yield not_checked(keys.reason)
        elif isinstance(keys, UnreadSecret):
            yield passed(f"Secret {secret} exists")
        elif not keys:
            yield failed(
                f"there is no Secret {secret}, from which Argo mounts the account's token: {account.without_mount}",
                _upgrade_command(namespace),
            )
        elif "token" not in keys:
            yield failed(
                f"Secret {secret} holds no token: its annotation kubernetes.io/service-account.name must be "
                f"{account.name}, and its type kubernetes.io/service-account-token",
                f"kubectl delete secret -n {namespace.name} {secret}, then {_upgrade_command(namespace)}",
            )
        else:
            yield passed(f"Secret {secret} holds a token")


@check("rights")
def _check_permissions(namespace: WorkflowNamespace, needed: Sequence[_NeededAccount]) -> Iterator[Finding]:
    permissions = known(namespace.permissions)
    for account in needed:
        if lacking := _lacking(permissions, account.name):
            yield failed(
                f"account {account.name} may not {', '.join(lacking)}: {account.without_permission}",
                _upgrade_command(namespace),
            )
        else:
            yield passed(f"account {account.name} may do what Argo's pods do")


@check("gangs")
def _check_gangs(namespace: WorkflowNamespace) -> Iterator[Finding]:
    """Gangs with backend ``job`` need an account with its permissions and token; without the account, gangs are off."""
    secret = f"{GANG_ACCOUNT}{TOKEN_SUFFIX}"
    if isinstance(namespace.accounts, UnknownValue) or isinstance(namespace.permissions, UnknownValue):
        return
    if GANG_ACCOUNT not in namespace.accounts:
        yield passed("trainings on several nodes are off (gangs.job of the chart)")
    elif lacking := _lacking(namespace.permissions, GANG_ACCOUNT):
        yield warning(
            f"account {GANG_ACCOUNT} may not {', '.join(lacking)}: a training on several nodes with backend=job ends "
            "in Error",
            _GANG_REMEDY,
        )
    elif not namespace.secrets.get(secret):
        yield warning(
            f"there is no Secret {secret}: the pod of Argo that creates a training on several nodes never starts",
            _GANG_REMEDY,
        )


def _lacking(permissions: Mapping[tuple[str, Permission], bool], account: str) -> list[str]:
    return [str(right) for right in PERMISSIONS[account] if not permissions.get((account, right), False)]


@check("plugin")
def _check_plugin_config(namespace: WorkflowNamespace) -> Iterator[Finding]:
    if PLUGIN_CONFIG in known(namespace.config_maps):
        yield passed(f"the executor plugin is there ({PLUGIN_CONFIG})")
    else:
        yield failed(
            f"there is no ConfigMap {PLUGIN_CONFIG}: plugin steps fail with 'no plugin executed the template', unless "
            "the Workflow brings the plugin along",
            _upgrade_command(namespace),
        )


@check("store")
def _check_store_secret(namespace: WorkflowNamespace) -> Iterator[Finding]:
    keys = namespace.secrets.get(STORE_SECRET, frozenset())
    if isinstance(keys, UnknownValue):
        yield not_checked(keys.reason)
    elif isinstance(keys, UnreadSecret):
        yield passed(f"Secret {STORE_SECRET} exists")
    elif not keys:
        yield warning(
            f"there is no Secret {STORE_SECRET}: training pods cannot save, unless they get credentials of the store "
            "from their node or by workload identity",
            f"kubectl create secret generic {STORE_SECRET} -n {namespace.name} --from-literal=AWS_ACCESS_KEY_ID=… "
            "--from-literal=AWS_SECRET_ACCESS_KEY=…; or see 'Google Cloud Storage and Azure' in docs/install.md",
        )
    else:
        yield passed(f"Secret {STORE_SECRET} sets {', '.join(sorted(keys))}")


@check("store-access")
def _check_store_access(namespace: WorkflowNamespace) -> Iterator[Finding]:
    access = namespace.store_access
    if access is None:
        return
    if isinstance(access, UnknownValue):
        yield not_checked(access.reason, "try them out where the store is in reach: tiphys doctor URL --as-program")
        return
    holder = f"the credentials in Secret {STORE_SECRET}"
    troubled = [finding for finding in access if finding.state is not CheckStatus.OK]
    for finding in troubled:
        yield finding._replace(sentence=f"{holder} {finding.sentence}")
    if not troubled:
        yield passed(f"{holder} suffice, and reach no further")


def _upgrade_command(namespace: WorkflowNamespace) -> str:
    return f"helm upgrade tiphys charts/tiphys --reuse-values, with {namespace.name} among its namespaces"

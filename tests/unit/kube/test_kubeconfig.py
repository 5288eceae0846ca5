"""Which cluster is meant, and how one says who one is."""

import base64
import itertools
import json
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from support.servers import kube_server
from support.servers.certificates import authority
from support.servers.kube_server import KubeServer

from tiphys.errors import ForbiddenError, NotFoundError, StoreError, UsageError
from tiphys.kube import KubeApi, connect_to_cluster, identify_cluster
from tiphys.kube.kubeconfig import connect_in_cluster
from tiphys.kube.resources import CONFIG_MAPS, PODS


@pytest.fixture(autouse=True)
def nothing_said_by_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.lower().endswith("_proxy") or name.startswith(("KUBE", "SSL_CERT")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    return authority(tmp_path_factory.mktemp("pki"))


@pytest.fixture
def secure(certificates: tuple[Path, Any]) -> Iterator[KubeServer]:
    with kube_server.serving(tls=certificates[1]) as running:
        yield running


def kubeconfig(folder: Path, server: KubeServer, user: dict[str, Any], **cluster: Any) -> Path:
    contexts = [
        {"name": "desk", "context": {"cluster": "one", "user": "me", "namespace": "research"}},
        {"name": "bare", "context": {"cluster": "one", "user": "me"}},
        {"name": "empty", "context": {"cluster": "one", "user": "me", "namespace": ""}},
    ]
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "desk",
        "clusters": [{"name": "one", "cluster": {"server": server.url, **cluster}}],
        "users": [{"name": "me", "user": user}],
        "contexts": contexts,
    }
    file = folder / "kubeconfig"
    file.write_text(yaml.safe_dump(document))
    return file


def whoever_asks(api: KubeApi, server: KubeServer) -> str:
    api.list(PODS, "ml")
    api.close()
    return server.requests[-1].user


def test_a_kubeconfig_names_server_namespace_and_user(server: KubeServer, tmp_path: Path) -> None:
    server.tokens["secret"] = "alice"
    api = connect_to_cluster(kubeconfig(tmp_path, server, {"token": "secret"}))
    assert (api.namespace, api.server) == ("research", server.url)
    assert whoever_asks(api, server) == "alice"


@pytest.mark.parametrize(("context", "namespace"), [("desk", "research"), ("bare", "default"), ("empty", "default")])
def test_the_namespace_is_that_of_the_context(server: KubeServer, tmp_path: Path, context: str, namespace: str) -> None:
    assert connect_to_cluster(kubeconfig(tmp_path, server, {}), context).namespace == namespace


def test_the_variable_counts_that_is_set_now(
    server: KubeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = kubeconfig(tmp_path, server, {})
    monkeypatch.setenv("KUBECONFIG", str(file))
    assert connect_to_cluster().server == server.url
    monkeypatch.setenv("KUBECONFIG", f"{tmp_path / 'missing'}{os.pathsep}{file}")
    assert connect_to_cluster().server == server.url
    (tmp_path / ".kube").mkdir()
    file.rename(tmp_path / ".kube" / "config")
    monkeypatch.setenv("KUBECONFIG", "")  # kubectl takes that as not set
    assert connect_to_cluster().namespace == "research"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "Invalid kube-config"),
        ("a: [", "while parsing"),
        ("[]", "kubeconfig"),
        ("just words", "kubeconfig"),
        ("current-context: desk", "contexts"),
        ("current-context: other\ncontexts: []\nclusters: []\nusers: []", "other"),
        ("current-context: a\ncontexts: [{name: a}]\nclusters: []\nusers: []", "context"),
        ("current-context: a\ncontexts: [{name: a, context: {cluster: b}}]\nclusters: []\nusers: []", "b in"),
    ],
)
def test_a_wrong_kubeconfig_is_named_with_what_is_wrong(tmp_path: Path, text: str, named: str) -> None:
    file = tmp_path / "kubeconfig"
    file.write_text(text)
    with pytest.raises(
        UsageError, match=r"cannot connect to a Kubernetes cluster with .*kubectl get namespaces"
    ) as caught:
        connect_to_cluster(file)
    assert str(file) in str(caught.value)
    assert ".;" not in str(caught.value)
    assert named in str(caught.value)


def test_no_kubeconfig_at_all_is_said_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"with ~/.kube/config.*set KUBECONFIG or give --context"):
        connect_to_cluster()
    with pytest.raises(UsageError, match="missing"):
        connect_to_cluster(tmp_path / "missing")


@pytest.fixture
def no_client_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """An installation without the extra ``kubernetes``, as the image for pods is."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "kubernetes"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "kubernetes", None)


@pytest.mark.usefixtures("no_client_library")
def test_a_desk_without_the_client_library_is_given_the_package_to_install(server: KubeServer, tmp_path: Path) -> None:
    advice = r"kubernetes is not installed; install it with `pip install 'tiphys-VERSION-py3-none-any.whl\[kubernetes"
    with pytest.raises(UsageError, match=advice):
        connect_to_cluster(kubeconfig(tmp_path, server, {}))


@pytest.mark.usefixtures("no_client_library")
def test_a_pod_needs_no_client_library(secure: KubeServer, account: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secure.tokens["first"] = "system:serviceaccount:tiphys:plugin"
    monkeypatch.setattr(sys.modules["tiphys.kube.kubeconfig"], "_SERVICE_ACCOUNT", account)
    assert whoever_asks(connect_to_cluster(), secure) == "system:serviceaccount:tiphys:plugin"


def test_a_context_that_is_not_there_is_named(server: KubeServer, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="elsewhere"):
        connect_to_cluster(kubeconfig(tmp_path, server, {}), "elsewhere")


@pytest.mark.parametrize("cluster", [{"certificate-authority": "missing.crt"}, {"certificate-authority-data": "?"}])
def test_a_root_certificate_that_is_none_is_a_wrong_kubeconfig(
    secure: KubeServer, tmp_path: Path, cluster: dict[str, str]
) -> None:
    with pytest.raises((UsageError, StoreError)) as caught:
        connect_to_cluster(kubeconfig(tmp_path, secure, {}, **cluster)).get_path("/version")
    assert secure.requests == []
    assert caught.value.args[0]


def test_the_server_is_trusted_by_the_root_certificate_of_the_kubeconfig_alone(
    secure: KubeServer, certificates: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = base64.b64encode(certificates[0].read_bytes()).decode()
    other, _ = authority(tmp_path / "other")
    for variable in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
        monkeypatch.setenv(variable, str(other))
    api = connect_to_cluster(kubeconfig(tmp_path, secure, {}, **{"certificate-authority-data": own}))
    assert api.get_path("/version")["major"] == "1"
    api.close()
    monkeypatch.setenv("SSL_CERT_FILE", str(certificates[0]))
    stranger = connect_to_cluster(kubeconfig(tmp_path, secure, {}, **{"certificate-authority": str(other)}))
    with pytest.raises(StoreError, match=r"(?i)certificate verify failed"):
        stranger.get_path("/version")


def test_credentials_made_by_a_program_are_renewed_when_they_expire(server: KubeServer, tmp_path: Path) -> None:
    server.tokens = {"token-1": "alice", "token-2": "alice again"}
    expired = {"token": "token-COUNT", "expirationTimestamp": "2020-01-01T00:00:00Z"}
    answer = {"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status": expired}
    program = executable(
        tmp_path,
        "count=$(($(cat count 2>/dev/null || echo 0) + 1)); echo $count > count",
        f"echo '{json.dumps(answer)}' | sed s/COUNT/$count/",
    )
    api = connect_to_cluster(kubeconfig(tmp_path, server, by_program(program)))
    assert whoever_asks(api, server) == "alice again"  # the first one had expired at once


def test_a_program_that_gives_no_credentials_leads_to_words(server: KubeServer, tmp_path: Path) -> None:
    server.authenticate = True
    api = connect_to_cluster(kubeconfig(tmp_path, server, by_program(executable(tmp_path, "exit 1"))))
    with pytest.raises(ForbiddenError, match="kubectl auth whoami"):
        api.list(PODS, "ml")
    api.close()


def by_program(program: Path) -> dict[str, Any]:
    version = "client.authentication.k8s.io/v1"
    return {"exec": {"apiVersion": version, "command": str(program), "args": [], "interactiveMode": "Never"}}


def executable(folder: Path, *lines: str) -> Path:
    program = folder / "credentials"
    program.write_text("\n".join(["#!/bin/sh", 'cd "$(dirname "$0")"', *lines]) + "\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return program


def test_a_proxy_of_the_environment_stands_between_desk_and_cluster(
    server: KubeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = kubeconfig(tmp_path, server, {})
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # where nobody listens
    with pytest.raises(StoreError, match=r"(?i)proxy"):
        connect_to_cluster(file).get_path("/version")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    api = connect_to_cluster(file)
    assert api.get_path("/version")
    api.close()


@pytest.fixture
def account(
    secure: KubeServer, certificates: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """What the kubelet mounts into a pod."""
    folder = tmp_path / "serviceaccount"
    folder.mkdir()
    (folder / "ca.crt").write_bytes(certificates[0].read_bytes())
    (folder / "namespace").write_text("tiphys\n")
    (folder / "token").write_text("first\n")
    address = urlsplit(secure.url)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", str(address.hostname))
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(address.port))
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")  # a pod reaches its API server without
    return folder


def test_a_pod_finds_its_cluster_by_what_is_mounted(
    secure: KubeServer, account: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secure.tokens["first"] = "system:serviceaccount:tiphys:plugin"
    monkeypatch.setattr(sys.modules["tiphys.kube.kubeconfig"], "_SERVICE_ACCOUNT", account)
    api = connect_to_cluster()
    assert (api.namespace, api.server) == ("tiphys", secure.url)
    assert whoever_asks(api, secure) == "system:serviceaccount:tiphys:plugin"


def test_a_kubeconfig_counts_more_than_the_cluster_around_the_pod(
    server: KubeServer, account: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["tiphys.kube.kubeconfig"], "_SERVICE_ACCOUNT", account)
    file = kubeconfig(tmp_path, server, {})
    assert connect_to_cluster(file).server == server.url
    monkeypatch.setenv("KUBECONFIG", str(file))
    assert connect_to_cluster().server == server.url


def test_a_token_that_the_kubelet_has_replaced_is_read_again(secure: KubeServer, account: Path) -> None:
    secure.tokens = {"first": "before", "second": "after"}
    seconds = itertools.chain([0.0, 59.0], itertools.repeat(60.0))
    api = connect_in_cluster(account, lambda: next(seconds))
    users = [whoever_asks(api, secure)]
    (account / "token").write_text("second\n")
    users += [whoever_asks(api, secure), whoever_asks(api, secure)]
    assert users == ["before", "before", "after"]


def test_an_account_that_is_not_mounted_whole_is_named(account: Path) -> None:
    (account / "token").unlink()
    with pytest.raises(StoreError, match="token of the service account"):
        connect_in_cluster(account).list(PODS, "ml")
    (account / "namespace").unlink()
    with pytest.raises(UsageError, match="namespace"):
        connect_in_cluster(account)


def test_an_address_of_version_six_is_put_in_brackets(account: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    assert connect_in_cluster(account).server == "https://[fd00::1]:443"


def test_pod_and_desk_call_their_cluster_by_the_same_name(server: KubeServer) -> None:
    name = identify_cluster(server.api("ml"))
    assert name.startswith("kubernetes:")
    assert identify_cluster(server.api("research")) == name
    with kube_server.serving() as other:
        mine = other.api("ml")
        mine.patch(CONFIG_MAPS, "ml", "kube-root-ca.crt", {"data": {"ca.crt": "of another cluster"}})
        assert identify_cluster(mine) != name


def test_a_namespace_without_root_certificate_is_named(api: KubeApi) -> None:
    api.delete(CONFIG_MAPS, "ml", "kube-root-ca.crt")
    with pytest.raises(NotFoundError, match=r"namespace ml .* choose an existing namespace with -n"):
        identify_cluster(api)

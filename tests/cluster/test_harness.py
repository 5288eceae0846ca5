"""The ground that the other tests stand on: pods run, GPUs count, S3 answers, and nobody has rights by accident."""

import json
from collections.abc import Callable

import pytest
from cluster.client import AuditLog, Cluster, Json, Store

_CREATE_TWICE = """
import boto3, sys
from botocore.config import Config
from botocore.exceptions import ClientError
client = boto3.client("s3", config=Config(s3={"addressing_style": "path"}))
client.put_object(Bucket=sys.argv[1], Key="a", Body=b"first", IfNoneMatch="*")
try:
    client.put_object(Bucket=sys.argv[1], Key="a", Body=b"second", IfNoneMatch="*")
except ClientError as error:
    print(error.response["Error"]["Code"])
"""
_ASK_API = """
import ssl, sys, urllib.request
folder = "/var/run/secrets/kubernetes.io/serviceaccount"
token = open(f"{folder}/token").read()
url = f"https://kubernetes.default.svc/api/v1/namespaces/{open(f'{folder}/namespace').read()}/{sys.argv[1]}"
request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
try:
    print(urllib.request.urlopen(request, context=ssl.create_default_context(cafile=f"{folder}/ca.crt")).status)
except urllib.error.HTTPError as error:
    print(error.code)
"""
_RESTRICTED = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "runAsNonRoot": True,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}


def pod(name: str, image: str, *command: str, gpus: int = 0, **spec: object) -> Json:
    container: Json = {"name": "main", "image": image, "command": list(command), "securityContext": _RESTRICTED}
    if gpus:
        container["resources"] = {"limits": {"nvidia.com/gpu": str(gpus)}}
    body = {"restartPolicy": "Never", "terminationGracePeriodSeconds": 1, "containers": [container], **spec}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": body}


def output(cluster: Cluster, name: str, namespace: str) -> str:
    ended = cluster.finished_pod(name, namespace)
    log = cluster.kubectl("logs", name, "--namespace", namespace)
    assert ended["status"]["phase"] == "Succeeded", log
    return log.strip()


def first_node(cluster: Cluster) -> str:
    name: str = cluster.get("nodes")["items"][0]["metadata"]["name"]
    return name


@pytest.mark.parametrize("image", ["tiphys", "tiphys-trainer"])
@pytest.mark.parametrize("user", [8737, 65532, 1234567])
def test_an_image_runs_as_any_user_on_a_read_only_root(
    cluster: Cluster, namespace: str, images: dict[str, str], image: str, user: int
) -> None:
    cluster.kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")
    program = "import os, tiphys.checkpoint, tiphys.store; print(os.getuid())"
    cluster.apply(
        pod("who", images[image], "python", "-c", program, securityContext={"runAsUser": user}), namespace=namespace
    )
    assert output(cluster, "who", namespace) == str(user)


def test_a_namespace_of_the_restricted_kind_refuses_root(
    cluster: Cluster, namespace: str, images: dict[str, str]
) -> None:
    cluster.kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")
    with pytest.raises(AssertionError, match="violates PodSecurity"):
        cluster.apply(
            pod("root", images["tiphys"], "python", securityContext={"runAsUser": 0, "runAsNonRoot": False}),
            namespace=namespace,
        )
    assert not cluster.get("pods", namespace=namespace)["items"]


def test_the_ninth_gpu_waits(
    cluster: Cluster, namespace: str, images: dict[str, str], gpus: Callable[[str, int], None]
) -> None:
    gpus(first_node(cluster), 8)
    wait = ("python", "-c", "import signal; signal.sigwait([signal.SIGTERM])")
    cluster.apply(
        pod("four", images["tiphys"], *wait, gpus=4),
        pod("others", images["tiphys"], *wait, gpus=4),
        namespace=namespace,
    )
    _wait_running(cluster, "four", namespace)
    _wait_running(cluster, "others", namespace)
    cluster.apply(pod("ninth", images["tiphys"], *wait, gpus=1), namespace=namespace)

    def refused() -> bool:
        conditions = cluster.get("pod", "ninth", namespace=namespace)["status"].get("conditions", [])
        return any("Insufficient nvidia.com/gpu" in condition.get("message", "") for condition in conditions)

    cluster.wait("the ninth is told why it waits", refused)
    cluster.kubectl("delete", "pod", "four", "--namespace", namespace)
    _wait_running(cluster, "ninth", namespace)


def test_storage_answers_a_pod_and_creates_only_once(
    cluster: Cluster, namespace: str, images: dict[str, str], cluster_store: Store
) -> None:
    manifest = pod("writer", images["tiphys"], "python", "-c", _CREATE_TWICE, cluster_store.bucket)
    variables = [{"name": name, "value": value} for name, value in cluster_store.environment.items()]
    manifest["spec"]["containers"][0]["env"] = variables
    cluster.apply(manifest, namespace=namespace)
    assert output(cluster, "writer", namespace) == "PreconditionFailed"
    found = cluster_store.client().get_object(Bucket=cluster_store.bucket, Key="a")
    assert found["Body"].read() == b"first"


def test_the_audit_log_knows_what_a_service_account_asked_for(
    cluster: Cluster, namespace: str, images: dict[str, str], audit: AuditLog
) -> None:
    cluster.apply(pod("asks", images["tiphys"], "python", "-c", _ASK_API, "secrets"), namespace=namespace)
    assert output(cluster, "asks", namespace) == "403"
    (record,) = audit.of(f"system:serviceaccount:{namespace}:default")
    assert (record["verb"], record["objectRef"]["resource"]) == ("list", "secrets")
    assert record["annotations"]["authorization.k8s.io/decision"] == "forbid"


def test_a_token_is_reviewed(cluster: Cluster, namespace: str) -> None:
    token = cluster.kubectl("create", "token", "default", "--namespace", namespace).strip()
    kinds = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview"}
    for given, authenticated in ((token, True), (token[:-8] + "AAAAAAAA", False)):
        review = json.dumps({**kinds, "spec": {"token": given}})
        status = json.loads(cluster.kubectl("create", "--validate=false", "-f", "-", "-o", "json", text=review))[
            "status"
        ]
        assert status.get("authenticated", False) is authenticated


def test_a_user_may_do_what_a_policy_of_the_bucket_says(
    cluster: Cluster, cluster_store: Store, program_store: Store
) -> None:
    from botocore.exceptions import ClientError

    if not cluster.own:
        pytest.skip("only the S3 server of `make cluster` can be given users")
    bucket, prefix = cluster_store.bucket, cluster_store.prefix
    cluster_store.client().put_object(Bucket=bucket, Key="other/data/a", Body=b"")
    client = program_store.client()
    client.put_object(Bucket=bucket, Key=f"{prefix}/data/a", Body=b"")
    assert client.list_objects_v2(Bucket=bucket, Prefix=f"{prefix}/")["KeyCount"] == 1
    for call, arguments in (
        (client.get_object, {"Key": "other/data/a"}),
        (client.put_object, {"Key": "other/data/b", "Body": b""}),
        (client.list_objects_v2, {"Prefix": "other/"}),
        (client.list_objects_v2, {}),
    ):
        with pytest.raises(ClientError, match="AccessDenied"):
            call(Bucket=bucket, **arguments)


def test_a_second_node_runs_pods_and_its_loss_is_noticed(
    cluster: Cluster, namespace: str, images: dict[str, str], second_node: str
) -> None:
    service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "named"}, "spec": {"ports": [{"port": 80}]}}
    program = f"import socket; print(socket.gethostbyname('named.{namespace}.svc.cluster.local'))"
    far = pod("far", images["tiphys"], "python", "-c", program, nodeName=second_node)
    cluster.apply(service, far, namespace=namespace)
    address = cluster.get("service", "named", namespace=namespace)["spec"]["clusterIP"]
    assert output(cluster, "far", namespace) == address
    cluster.harness("lose-node", second_node.removeprefix("node-"))
    lost = ("wait", f"node/{second_node}", "--for=condition=Ready=Unknown", "--timeout=300s")
    cluster.kubectl(*lost)


def test_a_stored_object_survives_a_kill_of_the_api_server(cluster: Cluster, namespace: str) -> None:
    if not cluster.own:
        pytest.skip("only the API server of `make cluster` can be killed")
    cluster.kubectl("create", "configmap", "kept", "--namespace", namespace)
    cluster.harness("stop", "apiserver", "--kill")
    try:
        assert not cluster.kubectl("get", "--raw", "/readyz", "--request-timeout=5s", check=False)
    finally:  # all other tests need it
        cluster.harness("start", "apiserver")
    assert cluster.get("configmap", "kept", namespace=namespace)["metadata"]["name"] == "kept"


def _wait_running(cluster: Cluster, name: str, namespace: str) -> None:
    def running() -> bool:
        return bool(cluster.get("pod", name, namespace=namespace)["status"].get("phase") == "Running")

    cluster.wait(f"{name} runs", running)

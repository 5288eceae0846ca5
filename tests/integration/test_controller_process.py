"""The controller as a process: it starts, says that it is ready, and ends when it is told to."""

import signal
from pathlib import Path

import httpx
import pytest
from support.builders.argo_objects import put, put_agent, workflow
from support.processes.controller import ControllerProcess, kubeconfig
from support.processes.polling import until
from support.servers import http
from support.servers.kube_server import serving

from tiphys.kube.resources import LEASES


def test_the_controller_leads_works_and_ends_at_sigterm(tmp_path: Path) -> None:
    with serving() as server:
        api = server.api("ml")
        server.add_namespace("tiphys")
        environment = {"KUBECONFIG": str(kubeconfig(server, tmp_path)), "POD_NAME": "controller-1"}
        (tmp_path / "token").write_text("a-secret-token")
        (tmp_path / "rules.json").write_text('{"RunFailed": "resume"}')
        given = [f"--store={tmp_path / 'store'}", "--namespace=ml", "--auto-resume=on", "--janitor=on"]
        given += [f"--token-file={tmp_path / 'token'}", f"--alert-rules={tmp_path / 'rules.json'}"]
        with ControllerProcess(given, environment) as process:
            until(lambda: process.get("/readyz") == (200, "ok\n") and server.objects("leases"))
            assert http.post(f"{process.url}/v1/alerts").status_code == 401
            put_agent(api, put(api, workflow()))
            until(lambda: server.objects("events"))
            lease = api.get(LEASES, "tiphys", "tiphys-controller")
            assert lease is not None
            assert lease["spec"]["holderIdentity"] == "controller-1"
            process.send(signal.SIGTERM)
            assert process.ended() == 0
        assert server.objects("pods") == []
        assert server.objects("leases")[0]["spec"]["holderIdentity"] == "", "the next one need not wait"
        assert process.noise == []


@pytest.mark.parametrize("has_api", [True, False])
def test_senders_of_storage_events_have_a_token_of_their_own(tmp_path: Path, has_api: bool) -> None:
    for name in ("api", "events"):
        (tmp_path / name).write_text(f"token-of-{name}")
    given = [f"--store={tmp_path / 'store'}", "--namespace=ml", f"--storage-events-token-file={tmp_path / 'events'}"]
    given += [f"--token-file={tmp_path / 'api'}"] if has_api else []
    with serving() as server:
        server.add_namespace("tiphys")
        environment = {"KUBECONFIG": str(kubeconfig(server, tmp_path)), "POD_NAME": "controller-1"}
        with ControllerProcess(given, environment) as process:

            def call(token: str, path: str) -> httpx.Response:
                headers = {"Authorization": f"Bearer token-of-{token}"}
                return http.post(f"{process.url}{path}", json={}, headers=headers, timeout=600)

            until(lambda: process.get("/healthz") == (200, "ok\n"))
            assert call("api", "/v1/storage-events").status_code == 401
            known = call("events", "/v1/storage-events")
            assert (known.status_code, "triggers are off" in known.text) == (404, True)
            refused = call("events", "/v1/alerts")
            assert refused.status_code == (401 if has_api else 404)
            assert has_api or refused.text == "there are /healthz, /readyz and /metrics /v1/storage-events\n"

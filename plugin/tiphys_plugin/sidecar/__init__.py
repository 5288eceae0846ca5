"""The sidecar container in Argo's agent pod: checks Argo's token, and forwards each call to the plugin's service.

There is one for each workflow with open plugin steps, so it is small: it uses
only the standard library and the error tree, decides nothing, and has no
credentials but the token of its service account, by which the service knows the
namespace. Run it with ``python -m tiphys_plugin.sidecar``.

Requirements of its container:

| what | value |
|---|---|
| name | ``tiphys``, any; Argo puts its token into ``/var/run/argo/token`` |
| port | one, 7243; Argo calls ``localhost`` at the first port |
| resources | requests ``cpu: 10m``, ``memory: 32Mi``; limits ``memory: 64Mi`` |
| securityContext | read-only root, no capabilities, non-root; **no** ``runAsUser``: Argo's 8737 may read its token |
| ``sidecar.automountServiceAccountToken`` | true: the account ``tiphys-executor-plugin`` and its token Secret |
| ``TIPHYS_SERVICE_URL`` | ``http://<release>-plugin.<namespace>.svc:7243``; ``https`` works, too |
| ``TIPHYS_SERVICE_CA`` | optional: certificate authority of an ``https`` service, as PEM text |
| ``TIPHYS_SERVICE_CA_FILE`` | the same, as a file |
| ``TIPHYS_TOKEN_AUDIENCE`` | optional: audience of a token that is requested for ten minutes, and sent to the service |
| ``TIPHYS_TOKEN_FILE`` | optional: where Argo's token is |
| ``TIPHYS_ACCOUNT_TOKEN_FILE`` | optional: where the account's token is |
| ``TIPHYS_OUTAGE_LIMIT_SECONDS`` | optional: how long a step waits for an answer; 1800 by default |
| ``TIPHYS_SIDECAR_HOST``, ``TIPHYS_SIDECAR_PORT`` | optional: where to listen; by default port 7243 of 127.0.0.1 |
"""

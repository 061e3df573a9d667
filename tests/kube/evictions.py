"""What the API server answers to somebody who empties a node: the Eviction of one pod."""

import json
import urllib.error
import urllib.request

from kube.control_plane import ControlPlane
from kube.fake_api import Object

GRANTED, REFUSED = 201, 429


def evict(plane: ControlPlane, pod: Object, *, dry_run: bool = False) -> tuple[int, str]:
    """The status of HTTP, and why it was refused; `dry_run` asks and leaves the pod."""
    metadata = pod["metadata"]
    where = {"name": metadata["name"], "namespace": metadata["namespace"]}
    options: Object = {"preconditions": {"uid": metadata["uid"]}}
    if dry_run:
        options["dryRun"] = ["All"]
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": where}
    request = urllib.request.Request(
        f"{plane.url}/api/v1/namespaces/{where['namespace']}/pods/{where['name']}/eviction",
        method="POST",
        data=json.dumps({**body, "deleteOptions": options}).encode(),
        headers={
            "Authorization": f"Bearer {plane.tokens['admin']}",
            "Content-Type": "application/json",
        },
    )
    try:
        with urllib.request.urlopen(request, timeout=60, context=plane.tls) as answer:
            return int(answer.status), ""
    except urllib.error.HTTPError as error:
        status = json.loads(error.read())
        causes = (status.get("details") or {}).get("causes") or []
        return error.code, " ".join(cause["message"] for cause in causes) or str(status["message"])

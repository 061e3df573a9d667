"""The records in Kubernetes: one Lease per broker group, compare-and-set by resourceVersion.

The record is an annotation; holder and transitions of the Lease repeat leader and epoch for
people.  A Lease is used as a small object that every cluster has and cheap to watch; nobody renews
it, and its times mean nothing here (docs/concepts/controller.md).
"""

import hashlib
import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import kubernetes.client as kubernetes

from popmq.common.address import format_address
from popmq.common.errors import ConfigError
from popmq.common.protocol.group_record import GroupRecord
from popmq.controller.file_store import record_from_json, record_to_json
from popmq.controller.metadata_store import (
    MetadataStoreUnavailable,
    WriteOutcome,
    WriteResult,
    judge,
)

ANNOTATION = "popmq.io/record"
SERVICE_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
TIMEOUT_S = 3.0

_NOT_FOUND = 404
_SUBDOMAIN = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*")


@dataclass(frozen=True, slots=True)
class ApiServer:
    """Where the API server is. `token` is asked for with each request: kubelets rotate it."""

    url: str
    namespace: str
    token: Callable[[], str] = lambda: ""
    ca_file: str = ""
    timeout_s: float = TIMEOUT_S

    @classmethod
    def of_pod(cls, environ: "os._Environ[str] | dict[str, str]", namespace: str) -> "ApiServer":
        """As every pod is told it. Raises ConfigError elsewhere."""
        host = environ.get("KUBERNETES_SERVICE_HOST", "")
        port = environ.get("KUBERNETES_SERVICE_PORT", "443")
        if not host:
            raise ConfigError(
                "controller.store = kubernetes: this is no pod of a Kubernetes cluster "
                "(KUBERNETES_SERVICE_HOST is not set)"
            )
        if not namespace:
            namespace = _read_text(f"{SERVICE_ACCOUNT}/namespace")
        return cls(
            f"https://{format_address(host, int(port))}",
            namespace,
            lambda: _read_text(f"{SERVICE_ACCOUNT}/token"),
            f"{SERVICE_ACCOUNT}/ca.crt",
        )


class LeaseStore:
    """`cluster` keeps the Leases of two popmq clusters in one namespace apart."""

    def __init__(self, server: ApiServer, cluster: str) -> None:
        self._server = server
        self._cluster = cluster
        configuration = kubernetes.Configuration(
            host=server.url, ssl_ca_cert=server.ca_file or None
        )
        # A write that is repeated below us could win twice.
        configuration.retries = False
        self._client = kubernetes.ApiClient(configuration)

    def read(self, key: str) -> GroupRecord | None:
        return self._get(key)[0]

    def swap(self, key: str, expected_version: int, record: GroupRecord) -> WriteResult:
        assert record.version == expected_version + 1, "each write moves the version by one"
        try:
            found_record, version = self._get(key)
        except MetadataStoreUnavailable as error:  # nothing was tried
            return WriteResult(WriteOutcome.UNKNOWN, None, str(error))
        if (found_record.version if found_record else 0) != expected_version:
            return self._behind(expected_version, found_record)
        try:
            status, text = self._write(key, record, version)
        except MetadataStoreUnavailable as error:
            return self._look_again(key, expected_version, record, str(error))
        if status in (200, 201):
            return WriteResult(WriteOutcome.WRITTEN, record)
        return self._look_again(key, expected_version, record, f"{status}: {text}")

    def _behind(self, expected_version: int, record: GroupRecord | None) -> WriteResult:
        """The record is not the expected one.  An older one than somebody read before is a stale
        read: it decides nothing."""
        if record is None or record.version < expected_version:
            return WriteResult(
                WriteOutcome.UNKNOWN, record, "the API server answers with an old Lease"
            )
        return WriteResult(WriteOutcome.CONFLICT, record)

    def _look_again(
        self, key: str, expected_version: int, record: GroupRecord, reason: str
    ) -> WriteResult:
        """A refusal or a silence is no answer: an attempt of ours may have won before."""
        try:
            found_record, _ = self._get(key)
        except MetadataStoreUnavailable as error:
            return WriteResult(WriteOutcome.UNKNOWN, None, f"{reason}; then {error}")
        return judge(record, expected_version, found_record, reason)

    def _get(self, key: str) -> tuple[GroupRecord | None, str]:
        """The record and the Lease's resourceVersion; ("" without a Lease)."""
        status, text = self._ask("GET", self._path(self._name(key)), None)
        if status == _NOT_FOUND:
            return None, ""
        if status != 200:
            raise MetadataStoreUnavailable(
                f"the API server answers {status} for a Lease: {text[:200]}"
            )
        try:
            metadata = json.loads(text)["metadata"]
            version = str(metadata["resourceVersion"])
            stored = (metadata.get("annotations") or {}).get(ANNOTATION, "")
            return (record_from_json(stored) if stored else None), version
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise MetadataStoreUnavailable(
                f"Lease {self._name(key)} cannot be read: {error}"
            ) from error

    def _write(self, key: str, record: GroupRecord, version: str) -> tuple[int, str]:
        name = self._name(key)
        metadata: dict[str, Any] = {
            "name": name,
            "namespace": self._server.namespace,
            "labels": {"app.kubernetes.io/part-of": "popmq"},
            "annotations": {ANNOTATION: record_to_json(record)},
        }
        if version:
            metadata["resourceVersion"] = version
        lease = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": metadata,
            "spec": {"holderIdentity": record.leader, "leaseTransitions": record.epoch},
        }
        if version:
            return self._ask("PUT", self._path(name), lease)
        return self._ask("POST", self._path(""), lease)

    def _ask(self, method: str, path: str, body: object) -> tuple[int, str]:
        """One request; MetadataStoreUnavailable when no whole answer came."""
        headers = {"Accept": "application/json", "Content-Type": "application/json"}
        if token := self._server.token():
            headers["Authorization"] = f"Bearer {token}"
        url, timeout_s = self._server.url + path, self._server.timeout_s
        try:
            answer = self._client.call_api(method, url, headers, body, _request_timeout=timeout_s)
            return answer.status, answer.read().decode(errors="replace")
        except Exception as error:
            # Whatever broke below, in the client or the network, there is no whole answer.
            raise MetadataStoreUnavailable(
                f"the API server at {self._server.url}: {error or type(error).__name__}"
            ) from error

    def _path(self, name: str) -> str:
        namespace = self._server.namespace
        path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        return f"{path}/{name}" if name else path

    def _name(self, key: str) -> str:
        """A name that Kubernetes takes; where the spelling would not do, a hash keeps it apart."""
        plain = f"popmq.{self._cluster}.{key}"
        if len(plain) <= 200 and _SUBDOMAIN.fullmatch(plain):
            return plain
        readable = re.sub(r"[^a-z0-9]", "-", plain.lower())[:200]
        return f"{readable}-{hashlib.sha256(plain.encode()).hexdigest()[:10]}"


def _read_text(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read().strip()
    except OSError as error:
        raise MetadataStoreUnavailable(f"{path} cannot be read: {error.strerror}") from error

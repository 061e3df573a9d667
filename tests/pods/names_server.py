"""Cluster DNS for a test: Services and the pods of headless ones, from the API server's objects."""

import socket
import struct
import threading

from kube.control_plane import ControlPlane

DOMAIN = ".svc.cluster.local"
A_RECORD, NOT_THERE, TTL_S = 1, 3, 1


class NamesServer:
    """UDP on port 53 of one address; asks the API server at each question."""

    def __init__(self, plane: ControlPlane, address: str) -> None:
        self._plane = plane
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind((address, 53))
        self._thread = threading.Thread(target=self._serve, name="names", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._socket.close()

    def _serve(self) -> None:
        while True:
            try:
                question, asker = self._socket.recvfrom(4096)
                self._socket.sendto(self._answer(question), asker)
            except OSError:  # closed
                return

    def _answer(self, question: bytes) -> bytes:
        number, flags = struct.unpack_from(">HH", question)
        labels, at = [], 12
        while question[at]:
            labels.append(question[at + 1 : at + 1 + question[at]].decode())
            at += 1 + question[at]
        (kind,) = struct.unpack_from(">H", question, at + 1)
        asked = question[12 : at + 5]
        name = ".".join(labels).lower()
        addresses = self.look_up(name)
        known = bool(addresses)
        texts = addresses if kind == A_RECORD else []
        status = 0x8400 | (flags & 0x0100) | (0 if known else NOT_THERE)
        header = struct.pack(">HHHHHH", number, status, 1, len(texts), 0, 0)
        records = b"".join(
            struct.pack(">HHHIH", 0xC00C, A_RECORD, 1, TTL_S, 4) + socket.inet_aton(text)
            for text in texts
        )
        return header + asked + records

    def look_up(self, name: str) -> list[str]:
        if not name.endswith(DOMAIN):
            return []
        parts = name.removesuffix(DOMAIN).split(".")
        if len(parts) not in (2, 3):
            return []
        service, namespace = parts[-2:]
        base = f"/api/v1/namespaces/{namespace}"
        plane = self._plane.get(f"{base}/services/{service}")
        if plane is None:
            return []
        address = plane["spec"].get("clusterIP", "")
        if address not in ("", "None"):
            return [address] if len(parts) == 2 else []
        endpoints = self._plane.get(f"{base}/endpoints/{service}") or {}
        return [
            address["ip"]
            for subset in endpoints.get("subsets") or []
            for address in [
                *(subset.get("addresses") or []),
                *(subset.get("notReadyAddresses") or []),
            ]
            if len(parts) == 2 or address.get("hostname") == parts[0]
        ]

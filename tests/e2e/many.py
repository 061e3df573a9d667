"""`popmq up`: one process for everything, or a supervisor and its children."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from e2e.processes import LOCAL, Role, free_port, run_command


class Many(Role):
    """The supervisor, and what its state file says."""

    def __init__(
        self, folder: Path, *arguments: str, settings: Mapping[str, str] | None = None
    ) -> None:
        self.data = folder / "data"
        super().__init__(
            "up",
            ["up", "--data", str(self.data), "--port", "0", "--http-port", "0", *arguments],
            folder=folder,
            settings=settings or {},
        )

    @property
    def state(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads((self.data / "cluster.json").read_text())
        return document

    def process(self, name: str) -> dict[str, Any]:
        (processes,) = [process for process in self.state["processes"] if process["name"] == name]
        assert isinstance(processes, dict)
        return processes

    @property
    def endpoints(self) -> list[str]:
        return [self.ready.endpoint]

    def popmq(self, *arguments: str) -> str:
        return run_command(self.ready.endpoint, self.folder, *arguments)

    def create(self, *, topic: str, groups: list[str]) -> None:
        self.popmq("topic", "create", topic)
        for group in groups:
            self.popmq("group", "create", group)

    def pids(self) -> list[int]:
        return [process["pid"] for process in self.state["processes"]]


class Up(Role):
    """Everything in one process, at an address that it keeps."""

    def __init__(self, folder: Path, settings: Mapping[str, str]) -> None:
        self.endpoints = [f"{LOCAL}:{free_port()}"]
        ports = ["--port", self.endpoints[0].rpartition(":")[2], "--http-port", "0"]
        super().__init__(
            "up",
            ["up", "--data", "data", *ports],
            folder=folder,
            settings=settings,
        )

    def popmq(self, *arguments: str) -> str:
        return run_command(self.endpoints[0], self.folder, *arguments)

    def create(self, *, topic: str, groups: list[str]) -> None:
        self.popmq("topic", "create", topic)
        for group in groups:
            self.popmq("group", "create", group, "--max-attempts", "100")

"""The steps that a plan consists of, each with the sentence that status and events show."""

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class DeletePod:
    """Only if it is still the pod with this uid: a plan may be old."""

    name: str
    uid: str
    reason: str

    def __str__(self) -> str:
        return f"restart {self.name}: {self.reason}"


@dataclass(frozen=True, slots=True)
class HandOver:
    """A planned one: the master gives way and nothing is lost."""

    group: str
    from_pod: str
    to_pod: str
    reason: str

    def __str__(self) -> str:
        return f"hand {self.group} over from {self.from_pod} to {self.to_pod}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Drain:
    """Let a broker group take nothing new; `undo`: let it take messages again."""

    group: str
    undo: bool = False

    def __str__(self) -> str:
        return f"let {self.group} take messages again" if self.undo else f"drain {self.group}"


@dataclass(frozen=True, slots=True)
class DeleteGroup:
    """With its StatefulSet, Service and budget; claims follow their retention policy."""

    group: str
    set_name: str

    def __str__(self) -> str:
        return f"remove {self.group}, which is drained"


@dataclass(frozen=True, slots=True)
class GrowClaim:
    name: str
    size: str

    def __str__(self) -> str:
        return f"grow {self.name} to {self.size}"


@dataclass(frozen=True, slots=True)
class RemakeSet:
    """Delete the StatefulSet but not its pods: its claim template cannot be changed."""

    set_name: str
    size: str

    def __str__(self) -> str:
        return f"make {self.set_name} again, for volumes of {self.size}; its pods stay"


@dataclass(frozen=True, slots=True)
class Fence:
    pod: str
    lift: bool = False

    def __str__(self) -> str:
        return f"lift the fence of {self.pod}" if self.lift else f"fence {self.pod}"


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing may be done now about something that has to be done."""

    what: str

    def __str__(self) -> str:
        return f"wait: {self.what}"


Action: TypeAlias = (
    DeletePod | HandOver | Drain | DeleteGroup | GrowClaim | RemakeSet | Fence | Wait
)

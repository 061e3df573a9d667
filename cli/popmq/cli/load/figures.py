"""What a run counted, and what is said of it: rates, and how long things took."""

import platform
import sysconfig
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field


def interpreter() -> str:
    """Version and build of this process's Python: one without profile-guided optimisation takes
    up to twice the CPU.  Debian's has it, and does not name it among its arguments."""
    arguments = sysconfig.get_config_var("CONFIG_ARGS") or ""
    optimized = ", --enable-optimizations" if "--enable-optimizations" in arguments else ""
    number, day = platform.python_build()
    name, version = platform.python_implementation(), platform.python_version()
    return f"{name} {version} ({number}, {day}, {platform.python_compiler()}{optimized})"


@dataclass(frozen=True, slots=True)
class LatencySummary:
    """Of how long things took, in milliseconds. `count` is how many were looked at."""

    count: int = 0
    p50: float = 0.0
    p99: float = 0.0
    p999: float = 0.0
    max: float = 0.0

    @classmethod
    def of_seconds(cls, seconds: Sequence[float]) -> "LatencySummary":
        if not seconds:
            return cls()
        ordered = sorted(seconds)

        def rank(share: float) -> float:
            return round(ordered[min(len(ordered) - 1, int(len(ordered) * share))] * 1000, 3)

        return cls(len(ordered), rank(0.5), rank(0.99), rank(0.999), rank(1.0))


@dataclass(slots=True)
class LoadStats:
    """Counted while a load runs. `began` and `ended` are seconds of `time.perf_counter`."""

    began: float = 0.0
    ended: float = 0.0
    asked: int = 0
    done: int = 0
    seconds: list[float] = field(default_factory=list)
    refusals: Counter[str] = field(default_factory=Counter)

    def begin(self) -> None:
        self.began = time.perf_counter()

    def ok(self, asked_s: float) -> None:
        self.done += 1
        self.ended = time.perf_counter()
        self.seconds.append(self.ended - asked_s)

    def refused(self, why: str) -> None:
        self.ended = time.perf_counter()
        self.refusals[why] += 1

    @property
    def refused_count(self) -> int:
        return sum(self.refusals.values())

    @property
    def answered(self) -> int:
        return self.done + self.refused_count

    @property
    def wall_s(self) -> float:
        return max(self.ended - self.began, 1e-9)

    @property
    def per_second(self) -> float:
        return self.done / self.wall_s

    def spread(self) -> LatencySummary:
        return LatencySummary.of_seconds(self.seconds)

    def as_json(self) -> dict[str, object]:
        return {
            "done": self.done,
            "refused": dict(self.refusals),
            "wall_s": round(self.wall_s, 3),
            "per_second": round(self.per_second, 1),
            "ms": asdict(self.spread()),
        }

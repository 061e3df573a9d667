"""A clock that the test turns."""


class ManualClock:
    """`advance` is time passing; `step_wall` is somebody setting the wall clock."""

    def __init__(self, wall_ms: int = 1_700_000_000_000, boot_ms: int = 1_000_000) -> None:
        self._wall_ms = wall_ms
        self._boot_ms = boot_ms

    def wall_ms(self) -> int:
        return self._wall_ms

    def boot_ms(self) -> int:
        return self._boot_ms

    def advance(self, ms: int) -> None:
        self._wall_ms += ms
        self._boot_ms += ms

    def step_wall(self, ms: int) -> None:
        self._wall_ms += ms

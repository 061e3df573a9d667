"""The controller as a process: frames around `ControllerServer`."""

import secrets

from popmq.common.clock import SystemClock
from popmq.common.config import Settings
from popmq.common.frame_server import FrameServer
from popmq.common.frames import FrameSettings, Hello, Role
from popmq.common.observe import Metric
from popmq.controller.routes import Routes
from popmq.controller.server import ControllerServer


class ControllerProcess:
    """`port` is what a broker or a proxy in this process calls."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.port = ControllerServer(
            Routes(
                settings.cluster.name,
                dead_after_ms=settings.controller.dead_after_ms,
                first_version=1 + secrets.randbits(48),
            ),
            SystemClock(),
            heartbeat_ms=settings.controller.heartbeat_ms,
            dead_after_ms=settings.controller.dead_after_ms,
        )
        hello = Hello(role=Role.CONTROLLER, name="controller", cluster=settings.cluster.name)
        frames = FrameSettings(
            max_frame_bytes=settings.frames.max_frame_bytes,
            max_buffered_bytes=settings.frames.max_buffered_bytes,
            max_in_flight=settings.frames.max_in_flight,
        )
        self._frames = FrameServer(self.port, hello, settings=frames)

    async def listen(self, address: str = "") -> str:
        """Serve frames at `address`, or where the settings say; returns it with its port."""
        return await self._frames.listen(address or self._settings.controller.listen)

    async def stop(self) -> None:
        self.port.stop()
        await self._frames.stop()

    def metrics(self) -> list[Metric]:
        return self.port.metrics()

"""What clients of the lean transport may cost, as settings (docs/concepts/transport.md)."""

from dataclasses import dataclass

from popmq.common.quantities import DAY_MS, GIB, HOUR_MS, KIB, MIB
from popmq.common.settings.section import SettingsSection, constant, within


@dataclass(frozen=True, slots=True)
class LeanSettings(SettingsSection):
    """Bounds of the lean transport, each per connection unless it says otherwise."""

    max_connections: int = within(20_000, 1, 1_000_000)  # of the server
    max_streams: int = within(10_000, 1, 1_000_000)
    max_header_bytes: int = within(32 * KIB, 4 * KIB, MIB)
    max_frame_bytes: int = within(16 * KIB, 16 * KIB, 16 * MIB - 1)
    max_message_bytes: int = within(130 * MIB, 64 * KIB, GIB)
    max_inflated_bytes: int = within(34 * MIB, 64 * KIB, GIB)  # a compressed message, unpacked
    stream_window_bytes: int = constant(MIB)
    connection_window_bytes: int = constant(8 * MIB)
    max_incoming_bytes: int = constant(160 * MIB)  # of incomplete requests, decompressed
    max_incoming_total_bytes: int = constant(256 * MIB)  # of the server
    max_unsent_bytes: int = within(64 * MIB, 64 * KIB, 4 * GIB)
    max_resets_per_s: int = within(1_000, 1, 1_000_000)
    max_control_per_s: int = within(5_000, 1, 1_000_000)  # PING, SETTINGS and their like
    handshake_ms: int = constant(10_000)
    stall_ms: int = within(60_000, 100, DAY_MS)
    idle_ms: int = within(HOUR_MS, 1_000, 7 * DAY_MS)  # without a call
    ping_ms: int = within(60_000, 0, DAY_MS)  # of silence before a PING; 0: none
    ping_answer_ms: int = within(20_000, 10, DAY_MS)
    max_age_ms: int = within(0, 0, 365 * DAY_MS)  # of a connection, about; 0: none
    max_age_grace_ms: int = within(60_000, 0, DAY_MS)  # for calls in progress then
    compress_bytes: int = within(0, 0, GIB)  # answers of that size; 0: none
    lanes: bool = True  # ordinary calls that came together are served together

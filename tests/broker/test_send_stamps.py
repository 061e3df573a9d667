"""The stamps of messages that came in one request."""

import pytest

from popmq.broker.log.commit_log import CommitLog
from popmq.common.errors import Code
from popmq.common.protocol import messaging_payloads as hop
from popmq.common.protocol.messaging_payloads import Kind, PutEntry, PutRequest
from popmq.common.topics import MessageType
from popmq.testing.harness.clock import ManualClock
from popmq.testing.harness.core_broker import CoreBroker


class TickingClock(ManualClock):
    """A millisecond passes with each look."""

    def boot_ms(self) -> int:
        self.advance(1)
        return super().boot_ms()


@pytest.mark.parametrize("kind", [MessageType.DELAY, MessageType.TRANSACTION])
def test_log_time_never_goes_back_within_a_request_of_several_kinds(kind: MessageType) -> None:
    core = CoreBroker(clock=TickingClock())
    core.topic("mixed", type=MessageType.MIXED)
    due_ms = core.clock.wall_ms() + 3_600_000 if kind is MessageType.DELAY else 0
    plain = PutEntry(MessageType.NORMAL, b"plain", b"")
    other = PutEntry(kind, b"other", b"", 0, -1, due_ms)
    request = PutRequest("mixed", [plain, other, plain])
    results = hop.decode_put_reply(core.reply(Kind.PUT, hop.encode_put(request)))
    assert [result.code for result in results] == [Code.OK] * 3
    folder, segment_bytes = core.settings.broker.data, core.settings.store.segment_bytes
    log = CommitLog(core.disk, f"{folder}/commitlog", segment_bytes=segment_bytes)
    log.load()
    times = [record.header.log_ms for record in log.scan(0)]
    assert times == sorted(times)

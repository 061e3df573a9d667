"""Messages of one request are stored as they would be one by one."""

import random

import pytest

from popmq.common.protocol import messaging_payloads as hop
from popmq.common.protocol.messaging_payloads import Kind, PutEntry, PutRequest
from popmq.common.topics import MessageType
from popmq.testing.harness.core_broker import CoreBroker

SENDS = 60


def entry(chance: random.Random, wall_ms: int) -> PutEntry:
    kind = chance.choice((MessageType.NORMAL,) * 8 + (MessageType.FIFO,))
    message_id = f"m{chance.randrange(SENDS)}"  # some come twice
    properties = b"\x12\x01k\x1a" + bytes((len(message_id),)) + message_id.encode()
    plain = PutEntry(
        kind,
        chance.randbytes(chance.randrange(1, 60)),
        properties,
        chance.getrandbits(64),
        chance.randrange(4),
        message_id=message_id,
    )
    match chance.randrange(20):
        case 0:
            return plain._replace(queue_id=-1)
        case 1:
            return plain._replace(queue_id=9)
        case 2:
            return plain._replace(type=MessageType.DELAY, due_ms=wall_ms + 60_000)
        case 3:
            return plain._replace(type=MessageType.TRANSACTION)
        case 4:
            return plain._replace(message_id="")
        case 5:
            return plain._replace(type=77)
        case _:
            return plain


@pytest.mark.parametrize("round_number", range(8))
def test_one_request_of_many_messages_is_as_many_requests_of_one(round_number: int) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    outcomes = []
    entries = [entry(chance, CoreBroker().clock.wall_ms()) for _ in range(SENDS)]
    entries[SENDS // 2] = entries[0]._replace(
        message_id="large", head=bytes(1 << 20)
    )  # larger than a segment
    for at_a_time in (1, chance.randrange(2, SENDS)):
        core = CoreBroker()
        core.topic("mixed", type=MessageType.MIXED)
        store, start = core.broker.store, core.broker.store.end
        answers = []
        for at in range(0, SENDS, at_a_time):
            body = hop.encode_put(PutRequest("mixed", entries[at : at + at_a_time]))
            answers.append(core.ask(Kind.PUT, body, settle=False))
        core.run_until_idle()
        results = []
        for answer in answers:
            assert answer.body is not None
            results += hop.decode_put_reply(answer.body)
        log = store.record_bytes(start, store.end - start)
        index = [*store.index.find(core.broker.registry.topic("mixed").id, 1, b"m3")]
        sends = core.broker.sends
        outcomes.append((results, log, index, sends.stored_by_topic, store.metrics.records))
    assert outcomes[0] == outcomes[1]
    assert len({result.code for result in outcomes[0][0]}) > 1

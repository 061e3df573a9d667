"""Random messages to send: as the official clients write them, and with something unusual."""

import random

from popmq.proxy.api import definition_pb2 as pb
from popmq.proxy.api import service_pb2 as service

NOW_MS = 1_700_000_000_123


def request(message: pb.Message) -> bytes:
    return service.SendMessageRequest(messages=[message]).SerializeToString()


def ordinary(chance: random.Random) -> pb.Message:
    """As the official clients write it."""
    message = pb.Message(topic=pb.Resource(name=chance.choice(("orders", "a-b_c", "T" * 100))))
    message.body = chance.randbytes(chance.choice((1, 100, 127, 128, 1_024)))
    for number in range(chance.randrange(4)):
        message.user_properties[f"key {number}"] = chance.choice(("", "red", "\u8272", "a\u200bb"))
    system = message.system_properties
    system.message_id = f"01{chance.getrandbits(128):032X}"
    system.message_type = pb.MessageType.NORMAL
    for expected in chance.sample(("tag", "keys", "host", "born", "encoding", "queue", "trace"), 5):
        if expected == "tag":
            system.tag = chance.choice(("a", "\u00fcber", ""))
        elif expected == "keys":
            system.keys.extend(chance.sample(("k", "\u043a", "order 7"), 2))
        elif expected == "host":
            system.born_host = "host-7"
        elif expected == "born":
            system.born_timestamp.seconds = NOW_MS // 1000 + chance.randrange(-5, 5)
            system.born_timestamp.nanos = chance.randrange(1_000_000_000)
        elif expected == "encoding":
            system.body_encoding = chance.choice((pb.Encoding.IDENTITY, pb.Encoding.GZIP))
        elif expected == "queue":
            system.queue_id = chance.randrange(16)
        else:
            system.trace_context = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    if chance.random() < 0.3:
        system.message_group = chance.choice(("g", "gr\u00fcn", "g" * 63))
        system.message_type = chance.choice((pb.MessageType.FIFO, pb.MessageType.NORMAL))
    if chance.random() < 0.2:
        system.priority = 0
    return message


def spoil(message: pb.Message, chance: random.Random) -> None:
    """Something unusual or wrong, at any place."""
    system = message.system_properties
    long = "x" * chance.choice((64, 127, 128, 256, 700))
    match chance.randrange(20):
        case 0:
            message.topic.name = chance.choice(("", " ", "%RETRY%g", "a b", "T" * 128))
        case 1:
            message.topic.resource_namespace = "n"
        case 2:
            message.body = b"x" * chance.choice((0, 2_000, 2_001))
        case 3:
            message.user_properties[chance.choice(("KEYS", "a\nb", long, "TIMER_SPREAD_MS"))] = "1"
        case 4:
            message.user_properties["k"] = chance.choice(("a\0b", long, "\x9f", "\u2028"))
        case 5:
            message.user_properties[chance.choice(("TIMER_DELAY_MS", "TIMER_DELAY_SEC"))] = "7"
        case 6:
            for number in range(chance.choice((4, 5))):
                message.user_properties[f"more {number}"] = ""
        case 7:
            system.message_id = chance.choice(("", " ", "\u3000", long))
        case 8:
            system.tag = chance.choice((" ", "a|b", "a\tb", " a", "a\u3000", "*", long))
        case 9:
            system.keys.append(chance.choice(("", " ", "a\nb", long)))
        case 10:
            system.message_group = chance.choice((" ", "g\n", long, "\u00fc" * 32))
        case 11:
            system.delivery_timestamp.FromMilliseconds(NOW_MS + 5_000)
        case 12:
            system.message_type = pb.MessageType.ValueType(chance.choice((0, 3, 4, 5, 6, 9)))
        case 13:
            system.receipt_handle = "mine"
        case 14:
            system.store_host = "mine"
        case 15:
            system.body_digest.checksum = "mine"
        case 16:
            system.priority = 1
        case 17:
            system.lite_topic = "lite"
        case 18:
            born = system.born_timestamp
            born.seconds = chance.choice((-5, 1 << 34, 1 << 35, 253_402_300_800, 1 << 55, 1))
            born.nanos = chance.choice((-7, 0, 999_999_999, 1_000_000_000, 2_000_000_000))
        case _:
            system.orphaned_transaction_recovery_duration.seconds = 5

"""Half messages that were given up, as operators see them."""

from transaction.rig import begin, broker

from popmq.common.protocol.messaging_payloads import Kind
from popmq.common.wire import admin_pb2 as admin


def test_what_was_given_up_is_listed_as_a_dead_letter_of_its_topic() -> None:
    core = broker(keep_ms=3_600_000)
    begin(core, "a")
    core.advance(3_700_000)
    request = admin.ListDeadLettersRequest(group="CID_RMQ_SYS_TRANS", bodies=True)
    reply = core.reply(Kind.LIST_DEAD_LETTERS, request.SerializeToString())
    (letter,) = admin.ListDeadLettersReply.FromString(reply).letters
    assert (letter.reason, letter.origin_topic) == ("transaction without an end", "orders")
    assert letter.head == b"body of a"

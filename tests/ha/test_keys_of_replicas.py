"""Another key of receipt handles, in a group whose replicas are of one release or of two."""

from ha.node_rig import Rig

from popmq.common.errors import Code
from popmq.common.protocol import replication_payloads as replication
from popmq.common.protocol.messaging_payloads import Kind
from popmq.common.wire.admin_pb2 import RotateKeysReply, RotateKeysRequest
from popmq.testing.harness.core_broker import Answer

LOOK = RotateKeysRequest(look=True).SerializeToString()


def key_ids(answer: Answer) -> list[int]:
    assert answer.body is not None, answer.error
    return [key.id for key in RotateKeysReply.FromString(answer.body).keys]


def test_every_replica_has_the_keys_and_the_same_tables() -> None:
    rig = Rig()
    rig.ready()
    for number in (1, 2):
        answer = rig.ask(Kind.ROTATE_KEYS, b"")
        rig.advance(100)
        assert key_ids(answer) == list(range(number + 1))
    keys = [list(node.node.broker.registry.signing_keys) for node in rig.nodes]
    assert keys[0] == keys[1] == keys[2]
    assert len(keys[0]) == 3


def test_while_a_slave_is_of_a_release_with_one_key_there_is_no_other() -> None:
    rig = Rig()
    rig.ready()
    leadership = rig.master.node.master_role
    assert leadership is not None
    (slave, _) = (node for node in rig.nodes if node is not rig.master)
    asked = replication.Handshake(
        leadership.replication_server.sync.epoch,
        slave.node.identity.store_id,
        "old-node",
        "",
        slave.end,
        rig.settings.store.segment_bytes,
    )
    body = replication.encode_handshake(asked)  # without features, as such a release writes it
    shaken = Answer()
    leadership.replication_server.request(Kind.HANDSHAKE, body, 1_000, shaken.on_result)
    end = rig.master.end
    refused = rig.ask(Kind.ROTATE_KEYS, b"")
    rig.settle()
    assert refused.error is not None
    assert refused.error.code is Code.PRECONDITION_FAILED
    assert "old-node runs a release that has one key" in str(refused.error)
    assert rig.master.end == end
    looked = rig.ask(Kind.ROTATE_KEYS, LOOK)
    rig.settle()
    assert key_ids(looked) == [0]
    # It shakes hands again as this release, which is its upgrade.
    rig.until(lambda: key_ids_after(rig) == [0, 1])


def key_ids_after(rig: Rig) -> list[int]:
    answer = rig.ask(Kind.ROTATE_KEYS, b"")
    rig.advance(50)
    return key_ids(answer) if answer.body is not None else []

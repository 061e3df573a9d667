"""`popmq explain`: how an answer is shown."""

import json

from cli.parsing import parsed

from popmq.cli.__main__ import main
from popmq.cli.explain import explained_lines, explained_rows
from popmq.common.wire import admin_pb2 as admin


def message() -> admin.ExplainedMessage:
    return admin.ExplainedMessage(
        broker="broker-a",
        topic="orders",
        queue_id=2,
        queue_offset=7,
        stored_ms=1_700_000_000_000,
        position=1_000,
        groups=[
            admin.Explained(
                group="g",
                state="INVISIBLE",
                since_ms=1_700_000_001_000,
                until_ms=1_700_000_031_000,
                attempt=1,
                client="me@1",
                text="delivered as attempt 1",
                next="unless it is acked it comes back as attempt 2",
                proofs=[
                    admin.Proof(
                        what="check point",
                        position=2_000,
                        wall_ms=1_700_000_001_000,
                        text="epoch 1 sequence 5",
                    )
                ],
            ),
            admin.Explained(group="h", state="EXPIRED", text="too old", next="nothing"),
        ],
    )


def test_each_group_has_its_state_its_reason_and_its_proof() -> None:
    assert explained_lines(message()) == [
        "message in topic orders broker broker-a queue 2 offset 7, "
        "stored 2023-11-14T22:13:20.000+00:00",
        "  g: INVISIBLE since 2023-11-14T22:13:21.000+00:00 until "
        "2023-11-14T22:13:51.000+00:00 by client me@1",
        "    why:  delivered as attempt 1",
        "    next: unless it is acked it comes back as attempt 2",
        "    log position 2000: check point at 2023-11-14T22:13:21.000+00:00, epoch 1 sequence 5",
        "  h: EXPIRED",
        "    why:  too old",
        "    next: nothing",
    ]


def test_as_json_each_group_is_an_object() -> None:
    first, second = json.loads(json.dumps(explained_rows(message())))
    assert (first["group"], first["state"], first["client"]) == ("g", "INVISIBLE", "me@1")
    assert first["message"]["position"] == 1_000
    assert first["proofs"][0]["position"] == 2_000
    assert (second["state"], second["since_ms"], second["proofs"]) == ("EXPIRED", None, [])


def test_a_message_that_no_group_reads_is_shown_all_the_same() -> None:
    alone = message()
    del alone.groups[:]
    assert explained_lines(alone)[1].startswith("  no group reads this topic")
    (value,) = explained_rows(alone)
    assert value["group"] is None


def test_it_takes_one_id() -> None:
    args = parsed("explain", "01AB", "--group", "g", "--topic", "t")
    assert (args.message_id, args.group, args.topic) == ("01AB", "g", "t")
    assert main(["explain"]) == 2

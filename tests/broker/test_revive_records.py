"""The records of the revive topic: each kind in bytes, as every version of the store has them."""

import pytest

from popmq.broker.deliveries.pop_check_point import (
    ChangeRecord,
    CheckPointRecord,
    EndRecord,
    ReviveKind,
    ReviveRecord,
    UnparkAction,
    UnparkRecord,
    decode_revive,
)
from popmq.common.record.message import BadRecord

RECORDS: list[tuple[ReviveRecord, str]] = [
    (
        CheckPointRecord(3, 7, 0b101, 100, 70, 71, 2, 9, 103, 5_000, 77, flags=5),
        "01 01 0005 00000003 0000000000000007 0000000000000005 0000000000000064 00000046 00000047 "
        "00000002 00000009 0000000000000067 0000000000001388 000000000000004d",
    ),
    (
        EndRecord(ReviveKind.ACK, 3, 7, 0b100, topic_id=70, group_id=71, queue_id=2),
        "01 02 0000 00000003 0000000000000007 0000000000000004 0000000000000000 00000046 00000047 "
        "00000002" + "00" * 28,
    ),
    (
        EndRecord(ReviveKind.RETURNED, 3, 7, 1, counted=False),
        "01 05 0008 00000003 0000000000000007 0000000000000001" + "00" * 48,
    ),
    (
        ChangeRecord(4, 8, 102, 70, 71, 2, 3, 7, 6_000, 77, flags=2),
        "01 03 0002 00000004 0000000000000008 0000000000000001 0000000000000066 00000046 00000047 "
        "00000002 00000003 0000000000000007 0000000000001770 000000000000004d",
    ),
    (
        UnparkRecord(UnparkAction.SKIP, 4, 0, 5, 6, 80, 71, 9),
        "01 06 0002 00000004 0000000000000000 0000000000000005 0000000000000006 00000050 00000047 "
        "00000000 00000000 0000000000000009" + "00" * 16,
    ),
]


@pytest.mark.parametrize(("record", "encoded"), RECORDS)
def test_a_revive_record_has_these_bytes_and_is_read_back(
    record: ReviveRecord, encoded: str
) -> None:
    assert record.encode() == bytes.fromhex(encoded)
    assert decode_revive(record.encode()) == record


def test_an_unknown_action_about_a_parked_key_is_a_bad_record() -> None:
    body = bytearray(UnparkRecord(UnparkAction.SKIP, 4, 0, 5, 6, 80, 71, 9).encode())
    body[3] = 99
    with pytest.raises(BadRecord, match="99 is not a valid UnparkAction"):
        decode_revive(bytes(body))

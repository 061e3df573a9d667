"""Names that new topics and groups may have."""

import pytest

from popmq.common.errors import Code, PopmqError
from popmq.testing.harness.core_broker import CoreBroker


@pytest.mark.parametrize("name", ["%odd", "%", "%DLQ", "%a|b-_"])
def test_no_new_topic_begins_with_a_percent_sign(name: str) -> None:
    with pytest.raises(PopmqError, match="begins with %") as caught:
        CoreBroker().topic(name)
    assert caught.value.code is Code.ILLEGAL_TOPIC


def test_no_new_group_begins_with_a_percent_sign() -> None:
    core = CoreBroker()
    core.topic("orders")
    with pytest.raises(PopmqError, match="begins with %") as caught:
        core.group("%odd")
    assert caught.value.code is Code.ILLEGAL_CONSUMER_GROUP
    with pytest.raises(PopmqError, match="begins with %"):
        core.receive("orders", "%odd")


def test_a_percent_sign_inside_a_name_is_fine() -> None:
    core = CoreBroker()
    core.topic("team%orders")
    core.group("team%readers")
    assert core.send("team%orders", b"x").code == Code.OK
    assert [delivery.head for delivery in core.receive("team%orders", "team%readers")] == [b"x"]

"""What a filter sees of a stored message: its own names, and nothing of anybody's bytes."""

from hypothesis import given
from hypothesis import strategies as st

from popmq.broker.filter.properties import PropertyReader, tag_of
from popmq.proxy.api import definition_pb2 as api


def head(properties: dict[str, str], body: bytes = b"body") -> bytes:
    topic = api.Resource(name="orders")
    return api.Message(topic=topic, user_properties=properties, body=body).SerializeToString()


@given(st.dictionaries(st.text(max_size=300), st.text(max_size=300), max_size=5), st.binary())
def test_the_wanted_names_are_read_whatever_is_beside_them(
    properties: dict[str, str], body: bytes
) -> None:
    own = {f"own-{name}": text for name, text in properties.items()}
    expected = sorted(own)[::2]
    result = PropertyReader(expected).read(head(own, body), b"")
    assert result == {name: own[name] for name in expected}


def test_four_names_are_of_the_message_itself() -> None:
    system = api.SystemProperties(
        tag="red", keys=["k1", "k2"], message_id="m-1", message_group="group"
    ).SerializeToString()
    reader = PropertyReader(["TAGS", "KEYS", "UNIQ_KEY", "__SHARDINGKEY", "a"])
    assert reader.read(head({"a": "1", "TAGS": "user's"}), system) == {
        "TAGS": "red",
        "KEYS": "k1 k2",
        "UNIQ_KEY": "m-1",
        "__SHARDINGKEY": "group",
        "a": "1",
    }
    assert reader.read(head({}), b"") == {}


def test_of_a_name_that_came_twice_the_last_counts() -> None:
    twice = head({"a": "1"}) + head({"a": "2"})
    assert PropertyReader(["a"]).read(twice, b"") == {"a": "2"}


@given(st.binary(max_size=80), st.binary(max_size=80))
def test_bytes_that_are_no_message_have_no_more_than_texts(first: bytes, second: bytes) -> None:
    result = PropertyReader(["a", "TAGS", "KEYS"]).read(first, second)
    assert all(isinstance(text, str) for text in result.values())
    assert isinstance(tag_of(second), bytes)


def test_the_tag_of_a_message_is_its_text() -> None:
    assert tag_of(api.SystemProperties(keys=["k"], tag="é").SerializeToString()) == "é".encode()
    assert tag_of(api.SystemProperties(message_id="m").SerializeToString()) == b""

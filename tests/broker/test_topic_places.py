"""Topics with message groups or lite topics name the broker groups that these are placed over."""

from dataclasses import replace

import pytest

from popmq.broker.meta.metadata_resolver import SAME_GROUPS_MS
from popmq.common.errors import Code, Refused
from popmq.common.protocol.messaging_payloads import Kind
from popmq.common.topics import MessageType, TopicConfig
from popmq.common.wire import admin_pb2 as admin
from popmq.testing.harness.core_broker import SMALL, CoreBroker

BOTH = ("broker-a", "broker-b")


def brokers_of(core: CoreBroker, name: str) -> tuple[str, ...]:
    return core.broker.registry.topic(name).brokers


def create(core: CoreBroker, name: str, *brokers: str) -> tuple[str, ...]:
    request = admin.CreateTopicRequest(topic=admin.Topic(name=name, type=name, brokers=brokers))
    core.reply(Kind.CREATE_TOPIC, request.SerializeToString())
    return brokers_of(core, name)


def add_without_a_list(core: CoreBroker, kind: MessageType, *, retention_ms: int = 0) -> None:
    """As brokers made topics before a controller had named any group."""
    topic = TopicConfig(0, kind.name.lower(), queues=1, type=kind, retention_ms=retention_ms)
    core.broker.registry.create_topic(topic)
    core.run_until_idle()


@pytest.fixture
def core() -> CoreBroker:
    return CoreBroker()


@pytest.mark.parametrize("kind", ["fifo", "mixed", "lite"])
def test_a_topic_is_made_over_the_groups_that_the_controllers_name(
    core: CoreBroker, kind: str
) -> None:
    core.broker.metadata_resolver.set_cluster_groups(BOTH, now_ms=0)
    assert create(core, kind) == BOTH


@pytest.mark.parametrize("kind", ["fifo", "mixed", "lite"])
def test_before_any_controller_has_named_groups_a_topic_is_made_over_its_owners_group(
    core: CoreBroker, kind: str
) -> None:
    assert create(core, kind) == ("broker-a",)


def test_a_topic_is_made_over_the_groups_that_the_request_names(core: CoreBroker) -> None:
    core.broker.metadata_resolver.set_cluster_groups(BOTH, now_ms=0)
    assert create(core, "fifo", "broker-b") == ("broker-b",)


def test_a_topic_without_fixed_places_names_no_groups(core: CoreBroker) -> None:
    core.broker.metadata_resolver.set_cluster_groups(BOTH, now_ms=0)
    assert create(core, "normal") == ()


@pytest.mark.parametrize("name", ["", "broker b", "b" * 101])
def test_a_list_with_an_impossible_name_is_refused(core: CoreBroker, name: str) -> None:
    with pytest.raises(Refused, match="topic fifo over broker group") as caught:
        create(core, "fifo", "broker-a", name)
    assert caught.value.code is Code.BAD_REQUEST


def test_a_topic_without_a_list_gets_one_when_the_groups_have_been_the_same_for_a_while(
    core: CoreBroker,
) -> None:
    add_without_a_list(core, MessageType.FIFO)
    add_without_a_list(core, MessageType.LITE)
    add_without_a_list(core, MessageType.DELAY)
    directory = core.broker.metadata_resolver
    directory.set_cluster_groups(("broker-a",), now_ms=0)  # broker-b has not registered yet
    directory.step(SAME_GROUPS_MS - 1)
    directory.set_cluster_groups(BOTH, now_ms=SAME_GROUPS_MS - 1)
    directory.set_cluster_groups(BOTH, now_ms=SAME_GROUPS_MS + 7)
    directory.step(2 * SAME_GROUPS_MS - 2)
    assert brokers_of(core, "fifo") == ()
    assert directory.step(2 * SAME_GROUPS_MS - 1) == 2
    core.run_until_idle()
    assert [brokers_of(core, name) for name in ("fifo", "lite", "delay")] == [BOTH, BOTH, ()]
    core.stop()
    core.start()
    assert brokers_of(core, "fifo") == BOTH


def test_later_groups_change_no_list(core: CoreBroker) -> None:
    directory = core.broker.metadata_resolver
    directory.set_cluster_groups(BOTH, now_ms=0)
    create(core, "fifo")
    directory.step(SAME_GROUPS_MS)
    directory.set_cluster_groups((*BOTH, "broker-c"), now_ms=SAME_GROUPS_MS)
    assert directory.step(3 * SAME_GROUPS_MS) == 0
    assert brokers_of(core, "fifo") == BOTH


def test_a_group_that_follows_anothers_topics_writes_no_list(core: CoreBroker) -> None:
    add_without_a_list(core, MessageType.FIFO)
    core.broker.registry.set_copied_version("broker-b", 1, 1)
    core.broker.metadata_resolver.set_cluster_groups(BOTH, now_ms=0)
    assert core.broker.metadata_resolver.step(SAME_GROUPS_MS) == 0
    assert brokers_of(core, "fifo") == ()


def test_a_topic_whose_list_cannot_be_written_harms_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    core = CoreBroker()
    add_without_a_list(core, MessageType.FIFO, retention_ms=3_600_000 * 60)
    add_without_a_list(core, MessageType.MIXED)
    core.stop()
    store = replace(core.settings.store, retention_hours=1)  # less than the topic's own
    core.settings = replace(SMALL, store=store)
    core.start()
    core.broker.metadata_resolver.set_cluster_groups(BOTH, now_ms=0)
    assert core.broker.metadata_resolver.step(SAME_GROUPS_MS) == 2
    assert [brokers_of(core, name) for name in ("fifo", "mixed")] == [(), BOTH]
    assert "a topic's broker groups cannot be written" in caplog.messages

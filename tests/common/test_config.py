"""Where each setting comes from, and what is refused before a process starts."""

from pathlib import Path

import pytest

from popmq.common.errors import ConfigError
from popmq.common.quantities import format_duration, parse_duration_ms, parse_size
from popmq.common.record.message import RevivalToken, message_size
from popmq.common.settings.replication_settings import ReplicationSettings
from popmq.common.settings.settings import (
    LoadedSettings,
    MessageSettings,
    PopSettings,
    Settings,
    StoreSettings,
    format_address,
    load_settings,
    parse_address,
)


def load(
    tmp_path: Path,
    toml: str = "",
    environ: dict[str, str] | None = None,
    flags: dict[str, object] | None = None,
) -> LoadedSettings:
    path = tmp_path / "popmq.toml"
    path.write_text(toml)
    return load_settings(str(path), environ or {}, flags or {})


def test_without_file_environment_and_flags_every_setting_is_its_default() -> None:
    loaded = load_settings(None, {}, {})
    assert loaded.settings == Settings()
    assert set(loaded.sources.values()) == {"default"}


def test_every_setting_has_a_source() -> None:
    loaded = load_settings(None, {}, {})
    assert list(loaded.sources) == list(loaded.settings.flat())


@pytest.mark.parametrize(
    ("key", "default"),
    [
        ("store.segment_bytes", 1073741824),
        ("store.max_pending_bytes", 268435456),
        ("pop.invisible_max_ms", 43200000),
        ("pop.reply_bytes", 8388608),
        ("timer.max_delay_ms", 366 * 86400 * 1000),
        ("timer.wheel_slots", 604800),
        ("timer.slot_ms", 1000),
        ("timer.log_segment_bytes", 26214400),
        ("timer.slot_limit", 0),
        ("group.max_attempts", 17),
        ("topic.auto_create", False),
        ("controller.addresses", ("127.0.0.1:9878",)),
        ("http.listen", "127.0.0.1:5557"),
    ],
)
def test_defaults_are_those_of_the_contract(key: str, default: object) -> None:
    assert Settings().flat()[key] == default


def test_the_constants_are_those_of_the_contract() -> None:
    assert Settings().timer.check_apart_ms == 4200000


@pytest.mark.parametrize(("key", "value"), Settings().flat(constants=True).items())
def test_a_constant_in_the_file_or_the_environment_is_refused_with_its_value(
    tmp_path: Path, key: str, value: object
) -> None:
    section, name = key.split(".")
    refusal = f"is no setting any more, it is always {value}"
    with pytest.raises(ConfigError, match=f"setting {key} {refusal}"):
        load(tmp_path, f"[{section}]\n{name} = 1\n", {}, {})
    variable = f"POPMQ_{key.replace('.', '_').upper()}"
    with pytest.raises(ConfigError, match=f"environment variable {variable} {refusal}"):
        load_settings(None, {variable: "1"}, {})


def test_a_flag_beats_the_environment_which_beats_the_file(tmp_path: Path) -> None:
    loaded = load(
        tmp_path,
        "[pop]\nmax_batch = 3\nreply_bytes = '1MiB'\nretry_first_percent = 5\n",
        {"POPMQ_POP_MAX_BATCH": "4", "POPMQ_POP_REPLY_BYTES": "2MiB"},
        {"pop.max_batch": 5},
    )
    pop = loaded.settings.pop
    assert (pop.max_batch, pop.reply_bytes, pop.retry_first_percent) == (5, 2 << 20, 5)
    assert loaded.sources["pop.max_batch"] == "--flag"
    assert loaded.sources["pop.reply_bytes"] == "POPMQ_POP_REPLY_BYTES"
    assert loaded.sources["pop.retry_first_percent"] == str(tmp_path / "popmq.toml")


def test_a_flag_that_was_not_given_changes_nothing() -> None:
    loaded = load_settings(None, {}, {"broker.data": None})
    assert loaded.settings.broker.data == "./popmq-data"
    assert loaded.sources["broker.data"] == "default"


def test_a_role_may_bring_its_own_defaults() -> None:
    loaded = load_settings(
        None,
        {"POPMQ_TOPIC_AUTO_CREATE": "false"},
        {},
        defaults={"store.segment_bytes": "64MiB", "topic.auto_create": True},
    )
    assert loaded.settings.store.segment_bytes == 64 << 20
    assert loaded.settings.topic.auto_create is False
    assert loaded.sources["store.segment_bytes"] == "default"


def test_durations_sizes_lists_and_booleans_are_read_from_text() -> None:
    settings = load_settings(
        None,
        {
            "POPMQ_POLL_MAX_MS": "20s",
            "POPMQ_CONTROLLER_HEARTBEAT_MS": "250",
            "POPMQ_STORE_SEGMENT_BYTES": "64MiB",
            "POPMQ_CONTROLLER_ADDRESSES": "a:1, b:2",
            "POPMQ_GROUP_AUTO_CREATE": "false",
        },
        {},
    ).settings
    assert settings.poll.max_ms == 20_000
    assert settings.controller.heartbeat_ms == 250
    assert settings.store.segment_bytes == 64 << 20
    assert settings.controller.addresses == ("a:1", "b:2")
    assert settings.group.auto_create is False


def test_an_unknown_setting_in_the_file_names_the_nearest_known_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"setting pop\.max_bach is unknown.*pop\.max_batch"):
        load(tmp_path, "[pop]\nmax_bach = 3\n")


def test_a_value_outside_a_section_is_unknown(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"setting flush is unknown; .* store\.flush"):
        load(tmp_path, "flush = 'fsync'\n")


def test_an_unknown_variable_names_the_nearest_known_one() -> None:
    with pytest.raises(ConfigError, match=r"POPMQ_POP_MAXBATCH is unknown.*POPMQ_POP_MAX_BATCH"):
        load_settings(None, {"POPMQ_POP_MAXBATCH": "3"}, {})


@pytest.mark.parametrize("name", ["POPMQ_TIMER_WHEEL_ENABLE", "POPMQ_TIMER_ENABLE"])
def test_a_wheel_that_is_switched_off_is_an_unknown_setting(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is unknown"):
        load_settings(None, {name: "false"}, {})


def test_the_clients_variable_is_no_setting() -> None:
    assert load_settings(None, {"POPMQ_ENDPOINT": "here:1"}, {}).settings == Settings()


@pytest.mark.parametrize(
    "name",
    [
        "POPMQ_SERVICE_HOST",
        "POPMQ_PORT",
        "POPMQ_BROKER_SERVICE_PORT",
        "POPMQ_PROXY_SERVICE_PORT_GRPC",
        "POPMQ_PROXY_PORT_8081_TCP",
        "POPMQ_PROXY_PORT_8081_TCP_ADDR",
    ],
)
def test_what_kubernetes_says_of_services_is_no_setting(name: str) -> None:
    assert load_settings(None, {name: "tcp://10.0.0.1:8081"}, {}).settings == Settings()


@pytest.mark.parametrize("value", ["0", "65", "x"])
def test_an_impossible_value_is_refused_with_its_setting(value: str) -> None:
    with pytest.raises(ConfigError, match=rf"pop\.max_batch = {value}"):
        load_settings(None, {"POPMQ_POP_MAX_BATCH": value}, {})


def test_a_refusal_names_value_limit_and_setting() -> None:
    with pytest.raises(ConfigError) as refusal:
        PopSettings(max_batch=99)
    assert str(refusal.value) == "pop.max_batch = 99: at most 64"


def test_memory_is_chosen_for_a_topic_and_not_for_the_store() -> None:
    with pytest.raises(ConfigError, match=r"store\.flush = memory: a topic's choice .*durability"):
        StoreSettings(flush="memory")


def test_one_disk_is_no_promise_of_several_replicas() -> None:
    with pytest.raises(ConfigError, match=r"store\.flush = fsync: .*replication\.replicas = 3"):
        load_settings(None, {}, {"store.flush": "fsync", "replication.replicas": 3})


def test_a_quorum_needs_more_than_one_replica() -> None:
    with pytest.raises(ConfigError, match=r"store\.flush = quorum: needs replication\.replicas"):
        load_settings(None, {}, {"store.flush": "quorum"})
    load_settings(None, {}, {"store.flush": "quorum", "replication.replicas": 2})


def test_no_more_replicas_have_to_be_in_sync_than_there_are() -> None:
    with pytest.raises(ConfigError, match=r"min_in_sync = 3: at most replication\.replicas = 2"):
        ReplicationSettings(replicas=2, min_in_sync=3)


@pytest.mark.parametrize(("replicas", "least"), [(1, 1), (2, 1), (3, 2), (5, 4)])
def test_all_replicas_but_one_have_to_be_in_sync_unless_set(replicas: int, least: int) -> None:
    assert ReplicationSettings(replicas=replicas).effective_min_in_sync == least
    assert ReplicationSettings(replicas=replicas, min_in_sync=1).effective_min_in_sync == 1


def test_a_block_of_log_must_fit_a_frame() -> None:
    with pytest.raises(ConfigError, match=r"replication\.fetch_bytes = 67108864: at most"):
        load_settings(None, {}, {"replication.fetch_bytes": "64MiB"})


def test_a_node_is_called_like_its_group_unless_it_has_a_name() -> None:
    assert Settings().node == "broker-a"
    assert load_settings(None, {}, {"broker.node": "a-2"}).settings.node == "a-2"


@pytest.mark.parametrize(
    ("key", "value", "limit"),
    [
        ("check_point_buffer_size", -1, "at least 0"),
        ("check_point_buffer_size", 10_000_001, "at most 10000000"),
        ("check_point_stay_ms", 0, "at least 1"),
        ("check_point_stay_ms", 600_001, "at most 600000"),
        ("check_point_write_ahead_ms", 0, "at least 1"),
        ("check_point_write_ahead_ms", 600_001, "at most 600000"),
        ("check_point_min_stay_ms", -1, "at least 0"),
        ("check_point_min_stay_ms", 600_001, "at most 600000"),
        ("check_point_min_stay_ms", 10_001, "at most pop.check_point_stay_ms = 10000"),
    ],
)
def test_a_bound_of_buffered_check_points_is_refused_outside_of_its_limits(
    key: str, value: int, limit: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        load_settings(None, {f"POPMQ_POP_{key.upper()}": str(value)}, {})
    assert str(refused.value) == f"pop.{key} = {value}: {limit}"


def test_a_flush_mode_that_never_existed_is_refused_with_the_choices() -> None:
    with pytest.raises(ConfigError, match=r"store\.flush = never: one of auto, fsync"):
        StoreSettings(flush="never")


def test_the_default_invisible_time_lies_between_its_limits() -> None:
    with pytest.raises(ConfigError, match=r"at most pop\.invisible_max_ms = 1000"):
        PopSettings(invisible_max_ms=1000)
    with pytest.raises(ConfigError, match=r"at least pop\.invisible_min_ms = 70000"):
        PopSettings(invisible_min_ms=70_000)


def test_a_broker_is_not_dead_before_it_missed_a_heartbeat() -> None:
    with pytest.raises(ConfigError, match=r"controller\.dead_after_ms = 900: at least 1000"):
        load_settings(None, {}, {"controller.dead_after_ms": 900})


def test_a_segment_must_hold_the_largest_message() -> None:
    with pytest.raises(ConfigError, match=r"store\.segment_bytes = 1048576: at least 4218880"):
        Settings(store=StoreSettings(segment_bytes=1 << 20))
    Settings(
        store=StoreSettings(segment_bytes=1 << 20),
        message=MessageSettings(max_body_bytes=64 << 10),
    )


def test_a_segment_holds_the_record_of_a_retry_of_the_largest_message() -> None:
    message = MessageSettings(max_body_bytes=1_000, max_properties_bytes=1_000)
    least = 2_000 + (8 << 10)
    with pytest.raises(ConfigError, match=rf"store\.segment_bytes = {least - 1}: at least"):
        Settings(message=message, store=StoreSettings(segment_bytes=least - 1))
    with pytest.raises(ConfigError, match=rf"store\.max_pending_bytes = {least - 1}: at least"):
        Settings(message=message, store=StoreSettings(max_pending_bytes=least - 1))
    Settings(message=message, store=StoreSettings(segment_bytes=least, max_pending_bytes=least))
    # What the proxy lets through (`check_stored_size`), stored with a token, is in there.
    assert message_size(bytes(message.largest_bytes), b"", bytes(RevivalToken.SIZE)) <= least


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("broker.listen", "nowhere"),
        ("remoting.group_ports", "broker-a"),
        ("remoting.group_ports", "broker-a:0"),
        ("remoting.group_ports", "broker-a:65536"),
        ("remoting.group_ports", "broker-a:9081,broker-a:9082"),
        ("remoting.group_ports", "broker-a:9081,broker-b:9081"),
        ("controller.addresses", ("a:1", "b")),
        ("controller.addresses", ""),
        ("broker.name", "a/b"),
        ("broker.data", " "),
        ("proxy.transport", "carrier-pigeon"),
        ("topic.auto_create", "maybe"),
        ("topic.queues", 1.5),
        ("poll.max_ms", True),
        ("store.segment_bytes", "64MB"),
        ("broker.name", 7),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=key.replace(".", r"\.")):
        load_settings(None, {}, {key: value})


def test_an_advertised_address_may_be_left_out() -> None:
    assert load_settings(None, {}, {"proxy.advertise": ""}).settings.proxy.advertise == ""


def test_a_file_that_is_not_there_or_not_toml_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*: No such file"):
        load_settings(str(tmp_path / "missing.toml"), {}, {})
    with pytest.raises(ConfigError, match="is not TOML"):
        load(tmp_path, "pop = [")


@pytest.mark.parametrize(
    ("text", "milliseconds"),
    [("250ms", 250), ("90s", 90_000), ("5m", 300_000), ("1h", 3_600_000), ("3d", 259_200_000)],
)
def test_durations_have_one_number_and_one_unit(text: str, milliseconds: int) -> None:
    assert parse_duration_ms(text) == milliseconds


@pytest.mark.parametrize(
    ("milliseconds", "text"),
    [(0, "0ms"), (250, "250ms"), (90_000, "1m30s"), (86_400_001, "1d1ms"), (5_400_000, "1h30m")],
)
def test_a_duration_is_written_as_it_is_read(milliseconds: int, text: str) -> None:
    assert format_duration(milliseconds) == text
    assert parse_duration_ms(text) == milliseconds


@pytest.mark.parametrize("text", ["", "5", "s", "-1s", "1.5s", "1h30", "5 parsecs", "٣s"])
def test_other_durations_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a duration"):
        parse_duration_ms(text)


@pytest.mark.parametrize(
    ("text", "size"),
    [("64KiB", 65_536), ("4MiB", 4_194_304), ("1 GiB", 1 << 30), ("10B", 10), ("7", 7), (8, 8)],
)
def test_sizes_are_read_in_binary_units(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "4MB", "1.5GiB", "-1", -1, True])
def test_other_sizes_are_refused(text: str | int) -> None:
    with pytest.raises(ConfigError, match="is not a size"):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:8081", ("127.0.0.1", 8081)),
        ("proxy.example:0", ("proxy.example", 0)),
        ("[::1]:8081", ("::1", 8081)),
    ],
)
def test_addresses_are_a_host_and_a_port(text: str, address: tuple[str, int]) -> None:
    assert parse_address(text) == address
    assert format_address(*address) == text


def test_an_ipv6_host_may_have_its_brackets_already() -> None:
    assert format_address("[::1]", 8081) == format_address("::1", 8081) == "[::1]:8081"


@pytest.mark.parametrize("text", ["", "host", ":8081", "host:", "host:http", "[]:1"])
def test_other_addresses_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not an address"):
        parse_address(text)


def test_an_ipv6_host_without_brackets_is_refused_with_the_way_to_write_it() -> None:
    with pytest.raises(ConfigError, match="in brackets"):
        parse_address("::1:8081")


@pytest.mark.parametrize("port", ["65536", "-1", "99999999999"])
def test_a_port_that_cannot_be_is_refused_with_its_limits(port: str) -> None:
    with pytest.raises(ConfigError, match=f"127.0.0.1:{port}': a port is 0 to 65535"):
        parse_address(f"127.0.0.1:{port}")

"""Who may register, what proxies are told, and when the version moves."""

from dataclasses import replace

import pytest

from popmq.common.errors import Code, PopmqError
from popmq.controller.routes import Route, Routes

KNOWN = Route("broker-a", "10.0.0.1:10911", epoch=3, store_id="1f")
DEAD_AFTER_MS = 2_000


def routes() -> Routes:
    """With `KNOWN`, heard at 0 ms."""
    route = Routes("popmq", dead_after_ms=DEAD_AFTER_MS)
    assert route.register("popmq", KNOWN, now_ms=0)
    return route


def refusal(
    found_routes: Routes, route: Route, *, now_ms: int = 1, cluster: str = "popmq"
) -> PopmqError:
    silent_ms = found_routes.silent_ms(KNOWN.broker, now_ms=now_ms)
    with pytest.raises(PopmqError) as caught:
        found_routes.register(cluster, route, now_ms=now_ms)
    assert found_routes.all() == [KNOWN]
    assert found_routes.silent_ms(KNOWN.broker, now_ms=now_ms) == silent_ms
    return caught.value


@pytest.mark.parametrize(
    "address", ["10.0.0.2:1", "[::1]:1", "unix:/run/popmq/frames.sock", "in-process"]
)
def test_a_broker_that_moved_gets_a_new_route_and_the_version_moves(address: str) -> None:
    found_routes, moved = routes(), replace(KNOWN, address=address, epoch=4)
    version = found_routes.version
    assert found_routes.register("popmq", moved, now_ms=1)
    assert not found_routes.register("popmq", moved, now_ms=2)
    assert (found_routes.all(), found_routes.version) == ([moved], version + 1)


@pytest.mark.parametrize(
    "address", ["", "nonsense", "host", "host:http", "unix:", "h" * 300 + ":1"]
)
def test_an_address_that_nobody_can_connect_to_is_refused(address: str) -> None:
    error = refusal(routes(), Route("broker-b", address, 1, "2e"))
    assert error.code is Code.BAD_REQUEST
    assert "broker broker-b" in str(error)


@pytest.mark.parametrize("name", ["", "a/b", "ü", "b" * 101])
def test_a_name_that_no_broker_may_have_is_refused(name: str) -> None:
    error = refusal(routes(), replace(KNOWN, broker=name))
    assert error.code is Code.BAD_REQUEST


def test_an_older_epoch_of_the_same_store_is_refused() -> None:
    error = refusal(routes(), replace(KNOWN, epoch=2))
    assert error.code is Code.PRECONDITION_FAILED
    assert "epoch 2, but epoch 3 is known" in str(error)


def test_a_second_broker_of_one_name_is_refused_while_the_first_is_heard() -> None:
    route = routes()
    second = Route(KNOWN.broker, "10.0.0.2:10911", epoch=9, store_id="2e")
    error = refusal(route, second, now_ms=DEAD_AFTER_MS)
    assert error.code is Code.PRECONDITION_FAILED
    assert str(error).startswith(
        "two brokers are called broker-a: store '1f' at 10.0.0.1:10911, whose last heartbeat "
        "came 2000 ms ago, and "
        "store '2e' at 10.0.0.2:10911, which is refused"
    )
    assert not route.register("popmq", KNOWN, now_ms=DEAD_AFTER_MS)
    refusal(route, second, now_ms=2 * DEAD_AFTER_MS)


def test_a_broker_whose_namesake_fell_silent_takes_its_place() -> None:
    route = routes()
    second = Route(KNOWN.broker, "10.0.0.2:10911", epoch=1, store_id="2e")
    assert route.register("popmq", second, now_ms=DEAD_AFTER_MS + 1)
    assert route.all() == [second]
    with pytest.raises(PopmqError, match="two brokers are called broker-a"):
        route.register("popmq", KNOWN, now_ms=DEAD_AFTER_MS + 2)


def test_a_broker_of_another_cluster_is_refused() -> None:
    assert "of cluster other" in str(refusal(routes(), KNOWN, cluster="other"))

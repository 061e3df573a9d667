"""How much one connection has in progress, whatever its client sends."""

from popmq.common.quantities import MIB
from popmq.common.settings.lean_settings import LeanSettings
from popmq.proxy.remoting.connection import RemotingCall, RemotingConnection
from popmq.proxy.remoting.frames import ONE_WAY, Command, FrameReader, encode
from popmq.proxy.transport.interface import Opening

LIMIT = 3


class Peer:
    """A connection whose requests are kept in progress."""

    def __init__(self, limit: int = LIMIT) -> None:
        opening = Opening("10.0.0.9:999", ("127.0.0.1", 8081), lambda: None)
        limits = LeanSettings(max_streams=limit)
        self.calls: list[RemotingCall] = []
        self.connection = RemotingConnection(
            opening, limits, lambda _, call: self.calls.append(call), now_ms=0
        )

    def send(self, count: int, *, flag: int = 0, body: bytes = b"") -> list[Command]:
        """The answers that these requests have got at once."""
        requests = (Command(10, number, flag, body=body) for number in range(count))
        self.connection.receive(b"".join(map(encode, requests)), now_ms=0)
        return list(FrameReader().feed(self.connection.outbox.take()))


def test_a_connection_with_too_many_requests_in_progress_is_busy_until_one_ends() -> None:
    peer = Peer()
    answers = peer.send(LIMIT + 2)
    assert [(answer.opaque, answer.code) for answer in answers] == [(3, 2), (4, 2)]
    assert "lean.max_streams" in answers[0].remark
    peer.calls[0].finish()
    assert peer.send(1) == []
    assert len(peer.calls) == LIMIT + 1


def test_who_asks_behind_the_end_of_a_connection_hears_at_once_that_its_client_is_gone() -> None:
    peer = Peer()
    peer.send(2)
    gone, finished = peer.calls
    finished.finish()
    peer.connection.lost()
    ended: list[str] = []
    gone.on_cancelled(lambda: ended.append("gone"))
    finished.on_cancelled(lambda: ended.append("finished"))
    assert ended == ["gone"]


def test_a_flood_of_one_way_requests_is_in_progress_up_to_the_limit_and_gets_no_answers() -> None:
    peer = Peer()
    assert peer.send(10_000, flag=ONE_WAY) == []
    assert len(peer.calls) == len(peer.connection.calls) == LIMIT


def test_the_bodies_in_progress_have_64_mib_at_most() -> None:
    peer = Peer(limit=10)
    body = bytes(15 * MIB)
    for _ in range(4):
        assert peer.send(1, body=body) == []
    assert [answer.code for answer in peer.send(1, body=body)] == [2]
    assert peer.send(1, body=bytes(MIB)) == []

"""Calls of several connections that come in one turn of the loop go through a lane together."""

import pytest
from proxy.test_lanes import Scene, status

from popmq.proxy.transport.lean import frames


def test_calls_of_all_connections_in_a_turn_are_one_request() -> None:
    first = Scene()
    second = Scene(beside=first)
    port = first.server.ports["broker-a"]
    sent = [(scene, scene.send()) for scene in (first, second, first, second)]
    first.deliver()
    second.deliver()
    first.server.end_turn()
    assert len(port.waiting) == 1
    first.server.serve()
    assert first.calls() == (4, 0, 0)
    answers = {scene: scene.answers() for scene in (first, second)}
    ids = [status(answers[scene][number]).entries[0].message_id for scene, number in sent]
    assert ids == ["m2", "n2", "m3", "n3"]


def test_a_connection_that_fails_ends_its_own_calls_only(monkeypatch: pytest.MonkeyPatch) -> None:
    first = Scene()
    second = Scene(beside=first)
    numbers = [scene.send() for scene in (first, second)]
    first.deliver()
    second.deliver()
    first.server.end_turn()

    def broken(stream_ids: object) -> None:
        raise RuntimeError("a fault of this connection")

    monkeypatch.setattr(first.connection, "answered", broken)
    first.server.serve()
    assert status(second.answers()[numbers[1]]).entries[0].message_id == "n2"


def test_a_request_goes_on_until_the_calls_of_every_connection_are_reset() -> None:
    first = Scene()
    second = Scene(beside=first)
    port = first.server.ports["broker-a"]
    numbers = [scene.send() for scene in (first, second)]
    first.deliver()
    second.deliver()
    first.server.end_turn()
    for scene, number, waiting in ((first, numbers[0], 1), (second, numbers[1], 0)):
        scene.client.unsent = frames.reset(number, frames.ErrorCode.CANCEL)
        scene.deliver()
        assert len(port.waiting) == waiting

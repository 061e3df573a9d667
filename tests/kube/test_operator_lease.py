"""One operator acts at a time, whatever clocks, answers and stopped processes do."""

import asyncio
from collections.abc import Awaitable, Callable

from kube.access import token_access
from kube.fake_api import FakeApi

from popmq.operator.kube.api_client import ApiClient
from popmq.operator.kube.lease import Elector

Story = Callable[["Two"], Awaitable[None]]


class Two:
    """Two operators, and the time that both see pass."""

    def __init__(self, fake: FakeApi, api: ApiClient) -> None:
        self.fake = fake
        self.now_s = 1000.0
        self.one, self.other = (
            Elector(
                api,
                namespace="apps",
                name="popmq-operator",
                identity=name,
                duration_s=15,
                monotonic=lambda: self.now_s,
            )
            for name in ("one", "other")
        )


def play(story: Story) -> None:
    async def whole() -> None:
        fake = FakeApi()
        await fake.start()
        api = ApiClient(token_access(fake.url, ""), timeout_s=2)
        try:
            await story(Two(fake, api))
        finally:
            await api.close()
            await fake.stop()

    asyncio.run(whole())


def test_the_first_holds_the_lease_and_the_second_waits() -> None:
    async def story(two: Two) -> None:
        assert await two.one.step()
        assert not await two.other.step()
        assert (two.one.holds, two.other.holds, two.other.holder) == (True, False, "one")

    play(story)


def test_a_silent_holder_is_followed_after_the_whole_duration_and_stops_before() -> None:
    async def story(two: Two) -> None:
        await two.one.step()
        await two.other.step()
        two.now_s += 10
        assert not two.one.holds
        assert not await two.other.step()
        two.now_s += 5
        assert await two.other.step()
        assert not await two.one.step()

    play(story)


def test_a_holder_that_renews_is_never_followed() -> None:
    async def story(two: Two) -> None:
        for _ in range(30):
            assert await two.one.step()
            assert not await two.other.step()
            two.now_s += 2

    play(story)


def test_a_released_lease_is_taken_at_once() -> None:
    async def story(two: Two) -> None:
        await two.one.step()
        await two.other.step()
        await two.one.release()
        assert not two.one.holds
        assert await two.other.step()

    play(story)


def test_a_renewal_whose_answer_is_lost_counts_from_the_next_that_arrives() -> None:
    async def story(two: Two) -> None:
        await two.one.step()
        two.fake.fault = lambda asked: "lost" if asked.writes else ""
        two.now_s += 5
        assert await two.one.step()  # by the last one that it knows of
        two.now_s += 5
        assert not await two.one.step()
        two.fake.fault = lambda asked: ""
        assert await two.one.step()

    play(story)


def test_of_two_that_take_it_at_once_one_does() -> None:
    async def story(two: Two) -> None:
        await two.one.step()
        await two.one.release()
        taken = await asyncio.gather(two.one.step(), two.other.step())
        assert sorted(taken) == [False, True]

    play(story)

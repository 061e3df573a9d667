"""Which waiters are asked when a message arrives, in which order, and at what cost."""

import random
import time

from popmq.broker.pop.long_polling import LongPolling, Waiter, WaiterResult

KEY = (1, 1)


class Queue:
    """Messages by filter; a waiter takes one of its filter."""

    def __init__(self) -> None:
        self.messages: dict[str, int] = {}
        self.asked: list[int] = []

    def waiter(self, number: int, filter_key: str) -> Waiter:
        def attempt() -> WaiterResult:
            self.asked.append(number)
            if not self.messages.get(filter_key):
                return WaiterResult.EMPTY
            self.messages[filter_key] -= 1
            return WaiterResult.ANSWERED

        return Waiter(KEY, filter_key, 10_000, attempt, lambda: None)


def test_waiters_are_asked_oldest_first_until_the_first_miss_of_each_filter() -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    for _ in range(200):
        polling, queue = LongPolling(1_000), Queue()
        waiting = [(number, dice.choice("abc")) for number in range(dice.randrange(30))]
        for number, filter_key in waiting:
            polling.add_waiter(queue.waiter(number, filter_key))
        queue.messages = {filter_key: dice.randrange(6) for filter_key in "abc"}
        expected, left, missed = [], dict(queue.messages), set[str]()
        for number, filter_key in waiting:
            if filter_key not in missed:
                expected.append(number)
                if left[filter_key]:
                    left[filter_key] -= 1
                else:
                    missed.add(filter_key)
        polling.wake(KEY[0])
        assert queue.asked == expected
        answered = sum(queue.messages.values()) - sum(left.values())
        assert answered == 0
        assert polling.count == len(waiting) - polling.woken


def test_a_waiter_that_comes_while_others_are_asked_is_asked_at_the_next_arrival() -> None:
    polling, queue = LongPolling(10), Queue()
    queue.messages["a"] = 2

    def attempt() -> WaiterResult:
        polling.add_waiter(queue.waiter(2, "a"))
        return WaiterResult.ANSWERED

    polling.add_waiter(Waiter(KEY, "a", 10_000, attempt, lambda: None))
    polling.wake(KEY[0])
    assert queue.asked == []
    polling.wake(KEY[0])
    assert queue.asked == [2]


def test_a_waiter_that_left_while_others_are_asked_is_passed_over() -> None:
    polling, queue = LongPolling(10), Queue()
    queue.messages["a"] = 3
    leaves = queue.waiter(2, "a")

    def attempt() -> WaiterResult:
        polling.remove(leaves)
        return WaiterResult.ANSWERED

    polling.add_waiter(Waiter(KEY, "a", 10_000, attempt, lambda: None))
    polling.add_waiter(leaves)
    polling.add_waiter(queue.waiter(3, "a"))
    polling.wake(KEY[0])
    assert queue.asked == [3]
    assert polling.count == 0


def test_an_arrival_costs_no_more_when_a_hundred_times_as_many_wait() -> None:
    def cost_s(waiters: int) -> float:
        polling, queue = LongPolling(100_000), Queue()
        for number in range(waiters):
            polling.add_waiter(queue.waiter(number, "a"))
        took_s = []
        for _ in range(5):
            began_s = time.thread_time()
            for _ in range(200):
                polling.wake(KEY[0])
            took_s.append(time.thread_time() - began_s)
        return min(took_s)

    few_s, many_s = cost_s(100), cost_s(10_000)
    print(f"200 arrivals: {few_s * 1e3:.2f} ms with 100 waiters, {many_s * 1e3:.2f} ms with 10,000")
    assert many_s < 5 * few_s

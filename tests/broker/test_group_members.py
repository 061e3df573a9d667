"""GroupMembers by itself: reports of proxies in, lists out, with a clock of the test's."""

import random
from collections.abc import Mapping, Sequence

import pytest

from popmq.broker.operations.group_members import ABSENT_MS, SETTLE_MS, GroupMembers, MemberList

WAIT_MS = 1_000


class Owner:
    def __init__(self) -> None:
        self.table = GroupMembers()
        self.now_ms = 1_000
        self.answers: dict[int, MemberList] = {}
        self._number = 0

    def ask(self, proxy: str, version: int = 0, **groups: Sequence[str]) -> int:
        return self._ask(proxy, groups, version)

    def wait(self, proxy: str, version: int) -> int:
        """Ask without news."""
        return self._ask(proxy, None, version)

    def _ask(self, proxy: str, groups: Mapping[str, Sequence[str]] | None, version: int) -> int:
        self._number += 1
        number = self._number

        def answer(member_list: MemberList) -> None:
            assert number not in self.answers
            self.answers[number] = member_list

        self.table.ask(
            number,
            proxy,
            groups,
            version,
            wait_ms=WAIT_MS,
            now_ms=self.now_ms,
            answer=answer,
        )
        self.table.check_invariants()
        return number

    def pass_ms(self, ms: int) -> None:
        self.now_ms += ms
        self.table.step(self.now_ms)
        self.table.check_invariants()


def test_all_proxies_hear_of_a_new_member_at_once() -> None:
    owner = Owner()
    first = owner.answers[owner.ask("p1", g=["a"])]
    assert first.groups == {"g": ["a"]}
    held = owner.wait("p1", first.version)
    assert held not in owner.answers
    joined = owner.answers[owner.ask("p2", g=["b"])]
    assert owner.answers[held].groups == joined.groups == {"g": ["a", "b"]}


def test_a_proxy_hears_at_once_that_the_lists_are_settled() -> None:
    owner = Owner()
    version = owner.answers[owner.ask("p1", g=["a"])].version
    owner.pass_ms(SETTLE_MS - WAIT_MS // 2)
    held = owner.wait("p1", version)
    owner.pass_ms(WAIT_MS // 2 - 1)
    assert held not in owner.answers
    owner.pass_ms(1)
    assert owner.answers[held].settled
    again = owner.wait("p1", version)
    owner.pass_ms(1)
    assert again not in owner.answers


def test_a_proxy_hears_of_its_own_groups_only() -> None:
    owner = Owner()
    version = owner.answers[owner.ask("p1", g=["a"])].version
    held = owner.wait("p1", version)
    owner.ask("p2", other=["b"])
    assert held not in owner.answers
    owner.pass_ms(WAIT_MS)
    assert owner.answers[held].groups == {"g": ["a"]}


def test_a_client_at_two_proxies_stays_until_it_has_left_both() -> None:
    owner = Owner()
    owner.ask("p1", g=["a"])
    version = owner.answers[owner.ask("p2", g=["a", "b"])].version
    held = owner.wait("p2", version)
    owner.ask("p1")
    assert owner.answers[held].groups == {"g": ["a", "b"]}


def test_the_members_of_a_proxy_that_is_gone_are_gone() -> None:
    owner = Owner()
    owner.ask("p1", g=["a"])
    version = owner.answers[owner.ask("p2", g=["b"])].version
    for _ in range(ABSENT_MS // WAIT_MS + 2):
        held = owner.wait("p2", version)
        owner.pass_ms(WAIT_MS)
        version = owner.answers[held].version
    assert owner.answers[held].groups == {"g": ["b"]}


def test_a_proxy_whose_list_is_not_known_is_asked_for_it() -> None:
    owner = Owner()
    assert owner.answers[owner.wait("p1", 7)].unknown


def test_lists_are_settled_when_every_proxy_has_had_the_time_to_report() -> None:
    owner = Owner()
    first = owner.answers[owner.ask("p1", g=["a"])]
    assert not first.settled
    owner.wait("p1", first.version)
    owner.pass_ms(SETTLE_MS - 1)
    held = owner.wait("p1", first.version)
    owner.pass_ms(WAIT_MS)
    assert owner.answers[held].settled


def test_an_owner_that_nobody_asked_for_long_is_not_settled_again() -> None:
    owner = Owner()
    owner.ask("p1", g=["a"])
    owner.pass_ms(10 * ABSENT_MS)
    owner.pass_ms(10 * ABSENT_MS)
    assert not owner.answers[owner.ask("p1", g=["a"])].settled


def test_a_stop_answers_everybody() -> None:
    owner = Owner()
    version = owner.answers[owner.ask("p1", g=["a"])].version
    held = owner.wait("p1", version)
    owner.table.dismiss()
    assert owner.answers[held].unknown


@pytest.mark.parametrize("_", range(20))
def test_the_last_answer_of_each_proxy_has_the_members_of_all(_: int) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    chance = random.Random(seed)
    owner = Owner()
    lists: dict[str, dict[str, list[str]]] = {}
    held: dict[str, int] = {}
    versions: dict[str, int] = {}
    for _step in range(200):
        proxy = chance.choice("pqr")
        if (number := held.pop(proxy, None)) is not None:
            if number in owner.answers:
                versions[proxy] = owner.answers[number].version
            owner.table.cancel(number)
        if proxy not in lists or chance.random() < 0.5:
            groups = {
                name: chance.sample("abcd", chance.randrange(1, 4))
                for name in chance.sample(["g", "h"], chance.randrange(3))
            }
            lists[proxy] = groups
            held[proxy] = owner._ask(proxy, groups, versions.get(proxy, 0))
        else:
            held[proxy] = owner.wait(proxy, versions.get(proxy, 0))
        owner.pass_ms(chance.randrange(50))
    for proxy, number in held.items():
        if number in owner.answers:  # it asks again, as it does after each answer
            held[proxy] = owner.wait(proxy, owner.answers[number].version)
    owner.pass_ms(WAIT_MS)
    for proxy, number in held.items():
        member_list = owner.answers[number].groups
        for group in lists[proxy]:
            everyone = {member for known in lists.values() for member in known.get(group, ())}
            assert member_list[group] == sorted(everyone)

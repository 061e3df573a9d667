"""Fuzzing of what says who calls: authorization header, dates, Remoting signatures, policy texts,
and names and files of certificates.

    cd tests && python -m proxy.auth_fuzz --inputs 300000 [--seed N]

Inputs are made from the grammar and then changed at random; what is read is compared with what an
input was made of, and decisions with a policy written anew here.  An exception that is no refusal,
a wrong answer, or 100 ms of CPU for one input ends the run with its seed.
"""

import argparse
import datetime
import hmac
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import click

from popmq.cli.users import actions_argument, networks_argument, quota_argument
from popmq.common.errors import Code, ConfigError, PopmqError
from popmq.common.settings.settings import ProxySettings
from popmq.common.users import (
    ACTIONS,
    PolicyEntry,
    UserConfig,
    check_user,
    parse_clock_offset,
    split_resource,
)
from popmq.proxy.auth.policy import Policy, group_need, topic_need
from popmq.proxy.auth.remoting_rights import RemotingRequest, signature_bytes, signed_contents
from popmq.proxy.auth.signature import HEADER_LIMIT, parse_authorization, parse_stamp
from popmq.proxy.transport.lean import self_signed

LONGEST_S = 0.1
LONGEST_REFUSAL = 1_300  # of 100 characters that are shown escaped
ODD = "\0\t\n\r ,=/%*:;\"'\\\x7f\x80\x9b\u202e\u0661\U0001f600\udcff"
NAMES = ("orders", "orders-eu", "team%orders", "team%", "a", "%DLQ%billing", "billing", "*")
NOW = datetime.datetime(2026, 1, 31, tzinfo=datetime.UTC)


def changed(dice: random.Random, text: str) -> str:
    """Some characters gone, doubled, swapped or replaced."""
    characters = list(text)
    for _ in range(dice.choice((0, 1, 1, 2, 5))):
        at = dice.randrange(len(characters) + 1)
        match dice.randrange(5):
            case 0:
                del characters[at : at + dice.choice((1, 1, 8))]
            case 1:
                characters[at:at] = dice.choice(ODD) * dice.choice((1, 1, 3, 3_000))
            case 2:
                characters[at:at] = characters[at : at + 12]
            case 3:
                characters[at : at + 1] = chr(
                    dice.choice((dice.randrange(128), 0x110000 - 1, 0xE9))
                )
            case _:
                dice.shuffle(characters[at : at + 4])
    return "".join(characters)


def refusal_of(code: Code, step: Callable[[], object]) -> bool:
    """Whether it was refused, as it has to be."""
    refused: PopmqError | None = None
    try:
        step()
    except PopmqError as error:
        refused = error
    if refused is None:
        return False
    assert refused.code is code, refused
    assert len(str(refused)) <= LONGEST_REFUSAL, refused
    return True


def header(dice: random.Random) -> str:
    key = dice.choice(("ann", "a" * 64, "", "a.b-c_d"))
    signature = dice.randbytes(dice.choice((0, 20, 20, 32))).hex()
    credential = key + dice.choice(("", "/", "/region/service"))
    parts = [f"Credential={credential}", f"Signature={dice.choice((signature, signature.upper()))}"]
    if dice.random() < 0.8:
        parts.append(dice.choice(("SignedHeaders=x-mq-date-time", "SignedHeaders=X-MQ-Date-Time")))
    dice.shuffle(parts)
    text = "MQv2-HMAC-SHA1 " + dice.choice((",", ", ", " ,  ")).join(parts)
    read = parse_authorization(text)
    assert read.access_key == key
    assert not key or read.signature.hex() == signature
    wrong = changed(dice, text)
    if refusal_of(Code.UNAUTHORIZED, lambda: parse_authorization(wrong)):
        return "header refused"
    read = parse_authorization(wrong)
    assert len(wrong.strip()) <= HEADER_LIMIT
    # Whatever was read stands in the text.
    assert read.access_key in wrong
    assert read.signature.hex() in "".join(wrong.lower().split())
    return "header read"


def date(dice: random.Random) -> str:
    numbers = (
        dice.randrange(10_000),
        *(dice.randrange(high) for high in (14, 33, 26, 62, 62)),
    )
    zone = dice.choice(("Z", "+05:45", "-03:30", "+24:00", "+00:00"))
    text = dice.choice(
        (
            "{:04}{:02}{:02}T{:02}{:02}{:02}Z".format(*numbers),
            "{:04}-{:02}-{:02}T{:02}:{:02}:{:02}".format(*numbers) + zone,
        )
    )
    text = changed(dice, text)
    if refusal_of(Code.UNAUTHORIZED, lambda: parse_stamp(text)):
        return "date refused"
    assert -62_200_000_000_000 < parse_stamp(text).ms < 253_500_000_000_000
    return "date read"


def remoting(dice: random.Random) -> str:
    secret = b"secret of a user"
    fields = {
        changed(dice, name): changed(dice, dice.choice(NAMES))
        for name in ("topic", "a", "AccessKey", "_UNIQUE_KEY_QUERY", "Signature")
    }
    request = RemotingRequest(10, fields, dice.randbytes(dice.choice((0, 3, 50))))
    given = signature_bytes(request)
    for content in signed_contents(request):
        assert not hmac.compare_digest(given, hmac.digest(secret, content, "sha1"))
        assert content.endswith(request.body)
    return "remoting request"


def resource(dice: random.Random) -> str:
    kind = dice.choice(("cluster", "namespace", "topic", "group", "topic", "group"))
    if kind == "cluster":
        return kind
    name = dice.choice(NAMES)
    return f"{kind}:{name}{'' if name == '*' else dice.choice(('', '', '*'))}"


def policy(dice: random.Random) -> str:
    """Texts of people, and what is decided by those that are accepted."""
    text = changed(dice, resource(dice))
    refusal_of(Code.BAD_REQUEST, lambda: split_resource(text))
    offset = changed(dice, "+05:45")
    refusal_of(Code.BAD_REQUEST, lambda: parse_clock_offset(offset))
    for parse, given in (
        (actions_argument, "pub,sub,get"),
        (networks_argument, "10.0.0.0/8,::1"),
        (quota_argument, "bytes=2MiB"),
    ):
        with suppress(click.BadParameter):
            parse(changed(dice, given))
    entries = [entry(dice) for _ in range(dice.randrange(1, 5))]
    name = changed(dice, "ann") if dice.random() < 0.1 else "ann"
    user = UserConfig(name, entries=tuple(entries))
    if refusal_of(Code.BAD_REQUEST, lambda: check_user(user)):
        return "user refused"
    compiled = Policy(user)
    for _ in range(4):
        action, name = dice.choice(ACTIONS), dice.choice(NAMES).strip("*") or "x"
        kind, host = dice.choice(("topic", "group")), dice.choice(("10.1.2.3", "192.0.2.1", ""))
        need = (topic_need if kind == "topic" else group_need)((action,), name)
        decided = compiled.decide(need, host)
        expected = decide_anew(entries, action, need.kind, need.name, host)
        assert decided.allowed == expected, (entries, need, host, decided)
    return "user decided"


def entry(dice: random.Random) -> PolicyEntry:
    resources = [resource(dice) for _ in range(dice.randrange(1, 3))]
    if dice.random() < 0.05:
        resources[0] = changed(dice, resources[0])
    networks: Sequence[str] = dice.choice((*[()] * 6, *[("10.0.0.0/8",)] * 5, ("10/8x",)))
    actions = dice.sample(ACTIONS, dice.randrange(1, 4))
    return PolicyEntry(tuple(resources), tuple(actions), tuple(networks), dice.random() < 0.3)


def decide_anew(
    entries: Sequence[PolicyEntry], action: str, kind: str, name: str, host: str
) -> bool:
    """A matching Deny wins; without a match the answer is no."""
    matching = [
        entry
        for entry in entries
        if action in entry.actions
        and (not entry.networks or host.startswith("10."))
        and any(is_of(text, kind, name) for text in entry.resources)
    ]
    return bool(matching) and not any(entry.deny for entry in matching)


def is_of(text: str, kind: str, name: str) -> bool:
    own, _, pattern = text.partition(":")
    if own == "namespace" and kind != "cluster":
        namespace, percent, rest = name.partition("%")
        if not (namespace and percent and rest):
            return False
        own, name = kind, namespace
    if own != kind:
        return False
    return name.startswith(pattern[:-1]) if pattern.endswith("*") else name == pattern


def certificate_name(dice: random.Random) -> str:
    """What the certificate of `up` is made for: the addresses of the settings."""
    host = changed(dice, dice.choice(("proxy.example.org", "10.1.2.3", "[::1]", "bücher.example")))
    try:
        settings = ProxySettings(advertise=f"{host}:8081")
    except ConfigError:
        return "address refused"
    names = self_signed._own_names(settings)
    refused = refusal_of(Code.BAD_REQUEST, lambda: list(map(self_signed._general, names)))
    return "name refused" if refused else "name taken"


@cache
def own_pair() -> bytes:
    return self_signed.make(self_signed.ALWAYS, NOW)[0]


def certificate_file(dice: random.Random, folder: Path) -> str:
    """A file of the data directory that was damaged: it is made again, and the start goes on."""
    data = bytearray(own_pair())
    for _ in range(dice.randrange(4)):
        data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    path = folder / "certificate.pem"
    path.write_bytes(data[: len(data) - dice.choice((0, 0, 30))])
    try:
        good = self_signed._is_good(path, {"localhost"}, NOW)
    except BaseException:
        print(path.read_bytes())  # the pair is another one in each process
        raise
    return "certificate good" if good else "certificate refused"


TARGETS = (header, header, header, date, remoting, policy, policy, certificate_name)


def timed(seed: int, number: int, folder: Path) -> tuple[str, float]:
    """The outcome of an input, and seconds of CPU."""
    dice = random.Random(seed + number)
    began = time.thread_time()
    if number % 50 == 0:
        outcome = certificate_file(dice, folder)
    else:
        outcome = TARGETS[number % len(TARGETS)](dice)
    return outcome, time.thread_time() - began


def run(seed: int, inputs: int) -> Counter[str]:
    """What became of them. `seed` is that of the first one; input N has seed + N."""
    outcomes: Counter[str] = Counter()
    longest = 0.0
    with TemporaryDirectory() as folder:
        own_pair()
        for number in range(inputs):
            try:
                outcome, took = timed(seed, number, Path(folder))
                if took >= LONGEST_S:  # other work of the machine, or the input: once more
                    outcome, took = timed(seed, number, Path(folder))
            except BaseException:
                print(f"seed {seed + number}, target {number % len(TARGETS)}, input {number}")
                raise
            longest = max(longest, took)
            assert took < LONGEST_S, f"seed {seed + number}: {took:.3f} s"
            outcomes[outcome] += 1
    print(f"{inputs} inputs from seed {seed}, 0 crashes, slowest {longest * 1_000:.1f} ms of CPU")
    for outcome, count in sorted(outcomes.items()):
        print(f"  {count:>9} {outcome}")
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=300_000)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    run(given.seed, given.inputs)


if __name__ == "__main__":
    main()

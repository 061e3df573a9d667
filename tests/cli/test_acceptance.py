"""150 wrong and 80 right commands, as people type them: exit status, answer, time and width.

All run in this process through the entry point of `popmq`, against one broker; `test_processes.py`
runs a few as processes.  The table that is printed has every command (pytest -s shows it).
"""

import json
import re
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from socketserver import StreamRequestHandler, ThreadingTCPServer
from threading import Thread

import pytest

from popmq.cli.__main__ import main
from popmq.testing.running_broker import RunningBroker

MAX_S = 5.0  # of a command, on a machine that does much else
WIDTHS = (80, 140)


@dataclass(frozen=True)
class Case:
    """`line` is split at spaces; {NAME} is what the fixture or an earlier command gave."""

    line: str
    status: int = 0
    says: str = ""  # a regular expression, looked for in all that is printed
    wide: bool = False  # lines of it may be longer than the terminal


@dataclass
class Shell:
    """Types commands, and remembers what later ones need."""

    broker: RunningBroker
    capsys: pytest.CaptureFixture[str]
    values: dict[str, str]

    def run(self, case: Case, width: int) -> str:
        """What is wrong with the answer; empty when nothing is."""
        arguments = [self._filled(word) for word in case.line.split(" ")]
        began_s = time.monotonic()
        status = main(arguments)
        took_s = time.monotonic() - began_s
        printed = self.capsys.readouterr()
        text = printed.out + printed.err
        wrong = []
        if status != case.status:
            wrong.append(f"exit status {status} instead of {case.status}")
        if not re.search(case.says, text):
            wrong.append(f"{case.says!r} is not in it")
        if "Traceback" in text:
            wrong.append("a traceback")
        if took_s > MAX_S:
            wrong.append(f"{took_s:.1f} s")
        if case.status == 0 and not case.wide:
            longest = max(map(len, printed.out.splitlines()), default=0)
            if longest > width:
                wrong.append(f"{longest} columns")
        if case.status and case.status != 2 and len(printed.err.splitlines()) > 1:
            wrong.append("more than one line of error")
        with self.capsys.disabled():
            verdict = "; ".join(wrong) or "as wanted"
            print(f"{width:4} {status:4} {took_s * 1000:7.0f} ms  {case.line[:90]:90} {verdict}")
        return f"{case.line}: {'; '.join(wrong)}\n{text}" if wrong else ""

    def _filled(self, word: str) -> str:
        word = word.replace("_", " ") if word.startswith("~") else word
        for name, value in self.values.items():
            word = word.replace("{" + name + "}", value)
        return word.removeprefix("~")


class Http1(StreamRequestHandler):
    """As the port of the metrics answers what it does not understand."""

    timeout = 10

    def handle(self) -> None:
        self.rfile.readline()
        self.wfile.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
        with suppress(ConnectionResetError):
            self.rfile.read()  # to its end: a close before that could overtake the answer


@pytest.fixture
def http1() -> Iterator[str]:
    with ThreadingTCPServer(("127.0.0.1", 0), Http1) as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.fixture
def shell(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    http1: str,
) -> Iterator[Shell]:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    with RunningBroker() as broker, socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # and does not listen
        assert main(["topic", "create", "orders", "--endpoint", broker.endpoint]) == 0
        capsys.readouterr()
        broker.send("orders", b"one", tag="eu", keys=["k1"])
        broker.send("orders", b"two", tag="us", keys=["k2"])
        (received,) = broker.receive("orders", "billing", limit=1)
        message_id = broker.send("orders", b"three")
        monkeypatch.setenv("POPMQ_ENDPOINT", broker.endpoint)
        values = {
            "E": broker.endpoint,
            "EMPTY": "",
            "HTTP1": http1,
            "DEAD": f"127.0.0.1:{bound.getsockname()[1]}",
            "ID": message_id,
            "HANDLE": received.handle,
            "DIR": str(tmp_path),
        }
        yield Shell(broker, capsys, values)


WRONG = [
    # What is no command.
    *(Case(line, 2, "Missing command|Usage") for line in ("topic", "group", "dlq", "message")),
    *(Case(line, 2, "Missing command|Usage") for line in ("context", "report")),
    Case("snd orders x", 2, "Did you mean send"),
    Case("revc orders", 2, "Did you mean recv"),
    Case("topik list", 2, "Did you mean topic"),
    Case("gruop list", 2, "Did you mean group"),
    Case("topic lst", 2, "Did you mean list"),
    Case("topic craete x", 2, "Did you mean create"),
    Case("group shwo g", 2, "Did you mean show"),
    Case("timers cancle x", 2, "Did you mean cancel"),
    Case("dlq redirve g", 2, "Did you mean redrive"),
    Case("context lsit", 2, "Did you mean list"),
    Case("stauts", 2, "Did you mean status"),
    Case("lags", 2, "Did you mean lag"),
    Case("exlpain x", 2, "Did you mean explain"),
    Case("xyzzy", 2, "There are"),
    Case("LAG", 2, "Did you mean lag"),
    Case("cleints", 2, "Did you mean clients"),
    # Options that are none, and values that are missing.
    *(
        Case(f"{role} --no-such X", 2, "No such option '--no-such'")
        for role in ("up", "broker", "proxy", "controller", "operator", "console")
    ),
    Case("broker --data X", 2, "No such option '--data'"),
    Case("topic list --sytem", 2, "--system"),
    Case("recv orders --gruop g", 2, "--group"),
    Case("send orders x --dealy 1s", 2, "--delay"),
    Case("lag --wacth", 2, "--watch"),
    Case("topic list --endpoint", 2, "requires an argument"),
    Case("topic list -o", 2, "requires an argument"),
    Case("topic list -o xml", 2, "is not one of 'table', 'wide', 'json', 'yaml', 'jsonl'"),
    Case("topic list extra", 2, "unexpected extra argument"),
    Case("send", 2, "Missing argument 'TOPIC'"),
    Case("recv", 2, "Missing argument 'TOPIC'"),
    Case("explain", 2, "Missing argument"),
    Case("topic create", 2, "Missing argument"),
    Case("topic show", 2, "Missing argument"),
    Case("group create", 2, "Missing argument"),
    Case("ack --topic orders --group billing", 2, "Missing argument"),
    Case("ack x --group billing", 2, "Missing option '--topic'"),
    Case("nack x --topic orders", 2, "Missing option '--group'"),
    Case("extend x --topic orders --group billing", 2, "Missing option '--by'"),
    Case("failover", 2, "Missing argument"),
    Case("drain", 2, "Missing argument"),
    Case("reset-offset --group billing --topic orders", 2, "Missing option '--to'"),
    Case("reset-offset --topic orders --to newest", 2, "Missing option '--group'"),
    Case("context add prod", 2, "Missing option '--endpoint'"),
    Case("context use", 2, "Missing argument"),
    Case("completion", 2, "Missing argument"),
    Case("completion tcsh", 2, "is not one of 'bash', 'zsh', 'fish'"),
    Case("doctor diff a", 2, "Missing argument"),
    # Bodies, and arguments that contradict each other.
    Case("send orders", 2, "name one BODY"),
    Case("send orders x --file /dev/null", 2, "name one BODY"),
    Case("send orders x --stdin-lines", 2, "name one BODY"),
    Case("send orders --file /no/such/file", 2, "does not exist"),
    Case("send orders x --group-key a --delay 1s", 2, "cannot be combined"),
    Case("send orders x --delay 1s --at 2030-01-01", 2, "cannot be combined"),
    Case("send orders x --priority 1 --lite a", 2, "cannot be combined"),
    Case("send orders x --transaction --batch 2", 2, "cannot be combined"),
    Case("send orders x --transaction=maybe", 2, "is not one of"),
    Case("send orders x --property a=1 --property a=2", 2, "--property a is given twice"),
    Case("send orders x --property a", 2, "is not a property"),
    Case("send orders x --property =1", 2, "is not a property"),
    Case("recv orders", 2, "Missing option '--group'"),
    Case("recv orders --group billing --latest 2", 2, "leave out --group"),
    Case("recv orders --latest 1 --from 2020-01-01", 2, "cannot be combined"),
    Case("recv orders --group g --tag a --sql b", 2, "cannot be combined"),
    Case("recv orders --latest 1 --tag a", 2, "leave out --tag"),
    Case("recv orders --group g --follow -o json", 2, "use -o jsonl"),
    Case("recv orders --group g --format {nobody}", 2, "is no field"),
    Case("timers reschedule 01AB", 2, "name one of --delay and --at"),
    Case("timers reschedule 01AB --delay 1s --at 2030-01-01", 2, "name one of"),
    Case("timers --topic orders list", 2, "--topic goes after list"),
    Case("reset-offset --group g --topic t --to 1 --skip-retries --keep-retries", 2, "combined"),
    # Durations, times and numbers.
    Case("send orders x --delay -5s", 2, "is negative"),
    Case("send orders x --delay 90", 2, "is not a duration"),
    Case("send orders x --delay 1h30", 2, "is not a duration"),
    Case("send orders x --delay 30m1h", 2, "is not a duration"),
    Case("send orders x --delay soon", 2, "is not a duration"),
    Case("send orders x --delay 99999d", 2, "over the limit of 36500d"),
    Case("send late x --delay 400d", 1, "over the limit"),
    Case("send orders x --at tomorrow", 2, "is not a time"),
    Case("send orders x --at 2030-13-01", 2, "is not a time"),
    Case("send orders x --count 0", 2, "is not a count from 1"),
    Case("send orders x --count -1", 2, "is not a count from 1"),
    Case("send orders x --count 99999999999", 2, "over the limit"),
    Case("send orders x --batch 0", 2, "not in the range"),
    Case("send orders x --batch 5000", 2, "not in the range"),
    Case("send orders x --priority -1", 2, "not in the range"),
    Case("recv orders --group g --wait long", 2, "is not a duration"),
    Case("recv orders --group g --invisible -1s", 2, "is negative"),
    Case("recv orders --latest 0", 2, "is not a count from 1"),
    Case("recv orders --from noon", 2, "is not a time"),
    Case("lag --every fast", 2, "is not a duration"),
    Case("topic create t --queues 0", 2, "is not a count from 1"),
    Case("topic create t --type odd", 2, "is not one of"),
    Case("topic create t --permission x", 2, "is not one of"),
    Case("topic create t --retention 0h", 2, "is no time"),
    Case("topic create t --durability tape", 2, "is not one of"),
    Case("topic alter orders --queues many", 2, "is not a count from 1"),
    Case("group create g --max-attempts 0", 2, "is not a count from 1"),
    Case("group create g --back-off 1s,,2s", 2, "is not a duration"),
    Case("group create g --jitter 200%", 2, "is not a percentage"),
    Case("group create g --multiplier x", 2, "is not a multiplier"),
    Case("group create g --start middle", 2, "is not one of"),
    Case("dlq redrive billing --rate fast", 2, "is not a count"),
    Case("dlq redrive billing --filter colour=red", 2, "is no filter"),
    Case("dlq list billing --count 0", 2, "is not a count"),
    Case("message show --topic orders --queue x --offset 0", 2, "is not a number from 0"),
    Case("message show --topic orders --offset -1 --queue 0", 2, "is not a number from 0"),
    Case(
        "reset-offset --group billing --topic orders --to yesterday",
        2,
        "is neither oldest, newest, an offset nor a time",
    ),
    Case("timers list --limit 0", 2, "is not a count"),
    Case("timers list --from soon", 2, "is not a time"),
    Case("bench --body 1", 2, "is not a number from"),
    # Endpoints and contexts.
    Case("topic list --endpoint nowhere", 2, "is not an address"),
    Case("topic list --endpoint http://127.0.0.1:8081", 2, "write 127.0.0.1:8081"),
    Case("topic list --endpoint https://127.0.0.1:8081", 2, "write tls://127.0.0.1:8081"),
    Case("topic list --endpoint 127.0.0.1:99999", 2, "a port is 0 to 65535"),
    Case("topic list --endpoint 127.0.0.1:0", 2, "port 0"),
    Case("topic list --endpoint ::1:8081", 2, "brackets"),
    Case("topic list --endpoint no-such-host.invalid:1", 3, "no host is called"),
    Case("topic list --endpoint {DEAD}", 3, "start one with `popmq up`"),
    Case("send orders x --endpoint {DEAD}", 3, "start one with `popmq up`"),
    Case("recv orders --group g --endpoint {DEAD}", 3, "start one with `popmq up`"),
    Case("lag --endpoint {DEAD}", 3, "start one with `popmq up`"),
    Case("status --endpoint {DEAD}", 3, "start one with `popmq up`"),
    Case("topic list --endpoint {HTTP1}", 3, "is no popmq proxy: it speaks HTTP/1"),
    Case("topic list --endpoint tls://{HTTP1}", 3, "speaks no TLS"),
    Case("topic list --endpoint tls://{E}", 3, "is not trusted"),
    Case("topic list --context nobody", 2, "no context 'nobody'"),
    Case("context use nobody", 1, "no context 'nobody'"),
    Case("context remove nobody", 1, "no context 'nobody'"),
    Case("context add x --endpoint http://a:1", 1, "write a:1"),
    Case("context add x --endpoint a:1 --tls-ca /no/such", 1, "there is no such file"),
    Case("context add x --endpoint a:1 --namespace a%b", 1, "has characters"),
    Case("topic list --namespace a%b", 1, "has characters"),
    # Names that there are not.
    Case("topic show ordres", 4, "did you mean orders"),
    Case("topic show Orders", 4, "did you mean orders"),
    Case("topic delete nothing", 4, "no topic nothing"),
    Case("topic alter nothing --queues 9", 4, "no topic nothing"),
    Case("topic purge nothing --yes", 4, "no topic nothing"),
    Case("group show biling", 4, "did you mean billing"),
    Case("group delete nobody", 4, "no group nobody"),
    Case("group alter nobody --max-attempts 3", 4, "no group nobody"),
    Case("recv typo --group billing", 4, "no topic typo"),
    Case("recv ordres --latest 1", 4, "did you mean orders"),
    Case("lag --group biling", 4, "did you mean billing"),
    Case("lag --topic ordres", 4, "did you mean orders"),
    Case("clients --group biling", 4, "did you mean billing"),
    Case("clients --topic ordres", 4, "did you mean orders"),
    Case("explain nothing", 4, "no message nothing"),
    Case("explain {ID} --group biling", 4, "did you mean billing"),
    Case("message show 01AB", 4, "no message 01AB"),
    Case("message show 01AB --topic orders", 4, "no such message"),
    Case("message show 01AB --topic ordres", 4, "did you mean orders"),
    Case("message show --topic orders --key none", 4, "no such message"),
    Case("dlq list biling", 4, "did you mean billing"),
    Case("dlq peek billing 01AB", 4, "no dead letter 01AB"),
    Case("dlq redrive nobody", 4, "no group nobody"),
    Case("timers show 01AB", 4, "no message 01AB"),
    Case("timers cancel 01AB", 4, "no message 01AB"),
    Case("failover broker-b", 4, "did you mean broker-a"),
    Case("drain broker-b", 4, "did you mean broker-a"),
    Case("reset-offset --group biling --topic orders --to newest", 4, "did you mean billing"),
    # What the server refuses.
    Case("topic create orders --queues 3", 1, "."),
    Case("topic create a/b", 1, "characters"),
    Case("send orders x --group-key a", 1, "takes NORMAL messages"),
    Case("send orders x --delay 1s", 1, "takes NORMAL messages"),
    Case("recv orders --group g --sql ~a_>", 1, "SQL filter"),
    Case("ack abc --topic orders --group billing", 1, "INVALID_RECEIPT_HANDLE"),
    *(
        Case(line, 2, "add --yes")
        for line in (
            *(
                "topic purge orders",
                "topic delete orders",
                "group delete billing",
                "user delete ann",
            ),
            *("failover broker-a", "drain broker-a", "timers cancel {TIMER}"),
            "reset-offset --group billing --topic orders --to newest",
        )
    ),
    Case("message show --key k", 2, "--topic T is missing"),
    Case("config explain pop.invisible", 4, "did you mean pop.invisible_m"),
    Case("config explain", 2, "Missing argument"),
    Case("config --endpoint {DEAD}", 3, "nobody listens|start one"),
    Case("message show", 2, "name one thing to find"),
    Case("message show --topic orders --queue 0", 2, "name one thing|goes with"),
    Case("send orders x --spread 1m", 2, "goes with --delay or --at"),
    Case("recv orders --format {", 2, "write {body}"),
    Case("recv orders --format {body", 2, "write {body}"),
    Case("topic create elsewhere --brokers nosuch --type fifo", 4, "no broker group nosuch"),
    Case("config explain nosuch", 4, "popmq config. shows all"),
    Case("config explain store", 4, "store.flush, "),
    Case("doctor", 2, "name the broker's data directory"),
    Case("doctor {DIR}", 2, "A folder goes after --data: popmq doctor --data"),
    Case("status --timeout 0s", 2, "at least 1ms"),
    Case("top --every 0s", 2, "at least 1ms"),
    Case("recv orders --latest 2 --ack", 2, "leave out --ack"),
    Case("send orders x --group-key {EMPTY}", 2, "--group-key is empty"),
    Case("send orders x --key {EMPTY}", 2, "--key is empty"),
    Case("topic delete ordres", 4, "did you mean orders"),
    Case("help nosuch", 2, "No such command 'nosuch'"),
    Case("up --port 99999", 2, "from 0 to 65535"),
    Case("up --replicas 0", 2, "from 1 to 9"),
    Case("doctor --data /no/such", 1, "/no/such"),
    Case("config --config /no/such", 1, "/no/such"),
]

RIGHT = [
    Case("--version", says="popmq 0"),
    Case("version", says="popmq 0"),
    Case("-h", says="Send and receive"),
    Case("help topic purge", says="Usage: popmq topic purge"),
    Case("recv orders --group later --wait 1ms --tag none -o json", says="^\\[\\]"),
    Case("--help", says="Send and receive:"),
    *(
        Case(f"{line} --help", says="Examples:")
        for line in (
            *("up", "broker", "send", "recv", "ack", "lag", "explain", "topic create", "status"),
            *("top", "timers", "dlq redrive", "failover", "doctor", "context add", "completion"),
        )
    ),
    Case("topic list", says="orders"),
    Case("topic list -o wide", says="BROKERS", wide=True),
    Case("topic list -o json", says='"name": "orders"', wide=True),
    Case("topic list -o yaml", says="- name: orders", wide=True),
    Case("topic list -o jsonl", says='{"name": "', wide=True),
    Case("topic list --json", says='{"name": "', wide=True),
    Case("topic list --system", says="%RETRY%|orders"),
    Case("topic show orders", says="orders"),
    Case("topic create queue-{N} --queues 2", says="queue-"),
    Case("topic alter queue-{N} --retention 24h", says="1d"),
    Case("topic delete queue-{N} --yes", says="deleted topic queue-"),
    Case("group create group-{N} --max-attempts 3 --back-off 1s,1m", says="1s,1m"),
    Case("group alter group-{N} --max-attempts 4", says="4"),
    Case("group show group-{N}", says="group-"),
    Case("group delete group-{N} --yes", says="deleted group group-"),
    Case("group list", says="billing"),
    Case("group show billing", says="IN-FLIGHT"),
    Case("group show billing -o json", says='"lags"', wide=True),
    Case("send orders hello", says="queue_offset="),
    Case("send orders hello --tag eu --key k --property a=b", says="queue_offset="),
    Case("send orders hello --count 3", says="queue_offset="),
    Case("send orders hello --count 5 --batch 5", says="queue_offset="),
    Case("send orders hello -o json", says='"message_id"', wide=True),
    Case("send orders --file {DIR}/body", says="queue_offset="),
    Case("send orders hello --namespace eu", says="queue_offset="),
    Case("send late x --delay 1h30m", says="due=", wide=True),
    Case("send late x --delay 1h30m -o jsonl", says="recall_handle", wide=True),
    Case("send late x --at 2020-01-01", says="queue_offset=", wide=True),
    Case("send ordered x --fifo-key a", says="queue_offset="),
    Case("send halves x --transaction", says="transaction=", wide=True),
    Case("send halves x --transaction=rollback", says="transaction=", wide=True),
    Case("recv orders --latest 2", says="id="),
    Case("recv orders --from ~1h_ago --count 2", says="id="),
    Case("recv orders --latest 1 -o yaml", says="message_id:", wide=True),
    Case(r"recv orders --latest 2 --format {body}\n", says="hello"),
    Case("recv orders --group work-{N} --wait 1ms", says="id="),
    Case("recv orders --group eu-{N} --tag eu --wait 1ms", says="tag=eu"),
    Case("recv orders --group sql-{N} --sql ~a_=_'b' --wait 1ms", says="id="),
    Case("recv orders --group ack-{N} --ack --count 3 --wait 1ms", says="id="),
    Case("recv late --group none-{N} --tag none --wait 1ms", says="no message in late"),
    Case("extend {HANDLE} --by 5m --topic orders --group billing", says="invisible", wide=True),
    Case("lag", says="OLDEST"),
    Case("lag --group billing", says="billing"),
    Case("lag --topic orders -o json", says='"oldest_ready_age_ms"', wide=True),
    Case("lag --watch", says="OLDEST"),
    Case("lag --watch --group billing", says="(?s)GROUP.*UNREAD.*(MEMBER|no member is connected)"),
    Case("clients", says="CLIENT|no client is connected"),
    Case("clients --topic single", says="no client that uses topic single is connected"),
    Case("clients -o json", says=r"\[", wide=True),
    Case("clients -o wide", says="ADDRESS|no client", wide=True),
    Case("status", says="healthy"),
    Case("status -o yaml", says="healthy: true", wide=True),
    Case("top", says="TOPIC"),
    Case("explain {ID}", says="billing"),
    Case("explain {ID} --group billing -o json", says='"state"', wide=True),
    Case("message show {ID}", says="three", wide=True),
    Case("message show --topic orders --key k1", says="one", wide=True),
    Case("message show --topic single --queue 0 --offset 0", says="offset=0", wide=True),
    Case("message show --topic rmq_sys_meta --queue 0 --offset 0", says="rmq_sys_meta", wide=True),
    Case("timers", says="next due"),
    Case("timers list", says="DUE"),
    Case("timers cancel {TIMER} --yes", says="cancelled"),
    Case("timers list --topic late -o jsonl", says="due_ms", wide=True),
    Case("dlq list billing", says="no dead letters"),
    Case("dlq redrive billing --dry-run", says="0 would be redriven"),
    Case("reset-offset --group billing --topic orders --to oldest --dry-run", says="WOULD-END"),
    Case("reset-offset --group billing --topic orders --to newest --yes", says="ENDED"),
    *(
        Case(f"reset-offset --group billing --topic orders --dry-run --to {time}", says="WOULD-END")
        for time in ("earliest", "latest", "now", "1700000000000", "~1h_ago")
    ),
    Case("recv orders --from earliest --count 2", says="id="),
    Case("recv orders --from latest", says=""),
    Case("message show --topic single --queue 0 --time oldest", says="offset=0", wide=True),
    Case("message show --topic orders --key k1 --begin earliest --end now", says="one", wide=True),
    Case("timers list --from now --to latest", says="DUE"),
    Case("dlq redrive billing --filter before=now --dry-run", says="0 would be"),
    Case("send late x --at now", says="queue_offset="),
    Case("topic purge orders --dry-run", says="would do"),
    Case("topic purge orders --yes", says="purged"),
    Case("broker list", says="broker-a"),
    Case("broker list -o wide", says="ADDRESS", wide=True),
    Case("broker list -o json", says='"group": "broker-a"', wide=True),
    Case("context list", says="no context|prod"),
    Case("context add prod --endpoint {E}", says="added context prod"),
    Case("context use prod", says="using context prod"),
    Case("topic list --context prod", says="orders"),
    Case("context remove prod", says="removed context prod"),
    Case("config", says="store.flush", wide=True),
    Case("config -o json", says='"key": "store.flush"', wide=True),
    Case("config explain store.flush", says="takes effect"),
    Case("config explain POPMQ_STORE_FLUSH", says="takes effect"),
    Case("config explain pop.invisible_max_ms -o yaml", says="default: 43200000", wide=True),
    Case("config --endpoint {E}", says="store.flush", wide=True),
    Case("completion bash", says="_POPMQ_COMPLETE", wide=True),
    Case("completion zsh", says="_POPMQ_COMPLETE", wide=True),
    Case("completion fish", says="_POPMQ_COMPLETE", wide=True),
]

EVERYDAY = {
    *("snd orders x", "recv orders --gruop g", "send orders x --delay -5s", "topic show ordres"),
    *("topic list --endpoint http://127.0.0.1:8081", "topic list --endpoint {DEAD}"),
    *("topic purge orders", "send orders x --property a=1 --property a=2", "--help"),
    *("topic list -o yaml", "send late x --delay 1h30m", "recv orders --latest 2", "lag"),
    *("explain {ID}", "topic purge orders --yes"),
}


def prepare(shell: Shell, folder: Path) -> None:
    (folder / "body").write_bytes(b"from a file")
    for name, kind in (("late", "delay"), ("ordered", "fifo"), ("halves", "transaction")):
        assert main(["topic", "create", name, "--type", kind]) == 0
    assert main(["topic", "create", "single", "--queues", "1"]) == 0
    assert main(["send", "single", "x"]) == 0
    shell.capsys.readouterr()
    assert main(["send", "late", "x", "--delay", "1h", "--json"]) == 0
    shell.values["TIMER"] = json.loads(shell.capsys.readouterr().out)["message_id"]


def run_all(
    shell: Shell, folder: Path, patch: pytest.MonkeyPatch, width: int, cases: Sequence[Case]
) -> None:
    prepare(shell, folder)
    patch.setenv("COLUMNS", str(width))
    shell.values["N"] = str(width)
    failures = [text for case in cases if (text := shell.run(case, width))]
    assert not failures, "\n".join(failures)


@pytest.mark.more
@pytest.mark.parametrize("width", WIDTHS)
def test_150_wrong_commands_are_refused_in_words(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    assert len(WRONG) >= 150
    run_all(shell, tmp_path, monkeypatch, width, WRONG)


@pytest.mark.more
@pytest.mark.parametrize("width", WIDTHS)
def test_80_right_commands_do_what_they_say_and_fit_the_terminal(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    assert len(RIGHT) >= 80
    run_all(shell, tmp_path, monkeypatch, width, RIGHT)


def test_15_of_these_commands_run_every_day(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = [case for case in (*WRONG, *RIGHT) if case.line in EVERYDAY]
    assert len(cases) == len(EVERYDAY) == 15
    run_all(shell, tmp_path, monkeypatch, WIDTHS[0], cases)


def test_every_format_for_programs_has_the_same_objects(
    shell: Shell, capsys: pytest.CaptureFixture[str]
) -> None:
    import yaml

    printed = {}
    for name in ("jsonl", "json", "yaml"):
        assert main(["lag", "--topic", "orders", "-o", name]) == 0
        printed[name] = capsys.readouterr().out
    lines = [json.loads(line) for line in printed["jsonl"].splitlines()]
    assert [row["group"] for row in lines] == ["billing"]
    for rows in (json.loads(printed["json"]), yaml.safe_load(printed["yaml"])):
        assert [row.keys() for row in rows] == [row.keys() for row in lines]


def test_recv_of_an_unknown_topic_creates_none(
    shell: Shell, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["recv", "typo", "--group", "g", "--wait", "1ms"]) == 4
    assert main(["topic", "list", "-o", "jsonl"]) == 0
    assert "typo" not in capsys.readouterr().out


def test_lines_of_standard_input_become_messages(
    shell: Shell,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    lines = tmp_path / "lines"
    lines.write_text("".join(f"line {number}\n" for number in range(5)))
    with lines.open() as file:
        monkeypatch.setattr(sys, "stdin", file)
        assert main(["send", "lines", "--stdin-lines", "--batch", "2"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 5
    assert main(["recv", "lines", "--latest", "9", "--format", "{body}\\n"]) == 0
    assert sorted(capsys.readouterr().out.splitlines()) == [f"line {n}" for n in range(5)]


def test_a_message_that_is_returned_comes_back_and_one_that_is_acked_does_not(
    shell: Shell, capsys: pytest.CaptureFixture[str]
) -> None:
    def received() -> list[dict[str, object]]:
        assert main(["recv", "once", "--group", "w", "--wait", "1ms", "-o", "json"]) == 0
        rows: list[dict[str, object]] = json.loads(capsys.readouterr().out or "[]")
        return rows

    at = ("--topic", "once", "--group", "w")
    assert main(["send", "once", "x"]) == 0
    capsys.readouterr()
    (first,) = received()
    assert main(["nack", str(first["receipt_handle"]), *at]) == 0
    shell.broker.advance("1h")
    capsys.readouterr()
    (again,) = received()
    assert again["attempt"] == 2
    assert main(["ack", str(again["receipt_handle"]), *at]) == 0
    shell.broker.advance("2h")
    capsys.readouterr()
    assert received() == []


def test_a_half_message_is_seen_once_it_is_committed(
    shell: Shell, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["topic", "create", "halves", "--type", "transaction"]) == 0
    for end in ("rollback", "open", "commit"):
        assert main(["send", "halves", end, f"--transaction={end}"]) == 0
    capsys.readouterr()
    assert main(["recv", "halves", "--latest", "9", "--format", "{body}\\n"]) == 0
    assert capsys.readouterr().out == "commit\n"

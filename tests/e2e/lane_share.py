"""Which share of an official client's calls takes a lane, by the counter of the proxy."""

import time
from collections import defaultdict
from functools import partial
from itertools import count, islice
from pathlib import Path
from urllib.request import urlopen

from e2e.official import PORTION_S, START_S, Launch, OfficialClient
from e2e.payloads import payload
from e2e.processes import Cluster, Role
from prometheus_client.parser import text_string_to_metric_families

COUNT = 2_000  # sent, by eight at a time
SEED, MOST_BYTES = (
    1,
    8_192,
)  # of a body: larger ones are no ordinary calls, they have several frames
LEAST = 0.95
COUNTER = "popmq_proxy_lane_calls"


def check_that_calls_take_their_lane(launch: Launch, folder: Path, client_name: str) -> None:
    """A producer and a consumer of the client; each method that has a lane is checked."""
    topic, group = "lanes", "of-lanes"
    bodies = ((k, payload(seed=SEED, k=k, max_body=MOST_BYTES).body) for k in count())
    numbers = list(islice((k for k, body in bodies if len(body) <= MOST_BYTES), COUNT))
    with Cluster(folder) as cluster:
        cluster.create(topic=topic, groups=[group])
        (proxy,) = cluster.proxies
        start = {"op": "start", "endpoint": cluster.endpoints[0], "topic": topic, "namespace": ""}
        with (
            OfficialClient("simple", launch("simple"), folder=folder) as consumer,
            OfficialClient("producer", launch("producer"), folder=folder) as producer,
        ):
            consumer.tell(**start, group=group, invisible_s=60)
            producer.tell(**start, group="")
            for client in (consumer, producer):
                client.wait(partial(_is_ready, client), "being ready", within_s=START_S)
            producer.tell(op="send", numbers=numbers, seed=SEED, max_body=MOST_BYTES)
            producer.wait(lambda: producer.count("done") > 0, "all sent", within_s=PORTION_S)
            consumer.wait(lambda: consumer.delivered >= COUNT, "all received", within_s=PORTION_S)
            acked = sum(event["acked"] for event in consumer.of("delivered"))
            until = time.monotonic() + PORTION_S
            while proxy.metric("popmq_proxy_acks_total") < acked:
                assert time.monotonic() < until, "not all is acked"
                time.sleep(0.05)
        calls = calls_by_path(proxy)
    print()
    for method, paths in sorted(calls.items()):
        for path, calls_there in sorted(paths.items()):
            print(f"{client_name}: {method} {path} {calls_there:,}")
    assert {"SendMessage", "AckMessage"} <= set(calls)
    for method, paths in calls.items():
        assert paths["lane"] >= LEAST * sum(paths.values()), f"{method}: {dict(paths)}"


def calls_by_path(proxy: Role) -> dict[str, dict[str, int]]:
    """Of each method that has a lane."""
    calls: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    with urlopen(proxy.ready.metrics, timeout=10) as page:
        families = list(text_string_to_metric_families(page.read().decode()))
    for family in families:
        if family.name == COUNTER:
            for sample in family.samples:
                labels = sample.labels
                calls[labels["method"]][labels["path"]] += int(sample.value)
    return calls


def _is_ready(client: OfficialClient) -> bool:
    return client.count("ready") > 0

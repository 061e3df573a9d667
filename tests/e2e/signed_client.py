"""The official Python client with credentials: sends one message and receives it.

Arguments: endpoint, access key, secret, topic, group.  Prints `got BODY`.
"""

import os
import sys
import time

from rocketmq import (  # type: ignore[import-untyped,import-not-found,unused-ignore]
    ClientConfiguration,
    Credentials,
    FilterExpression,
    Message,
    Producer,
    SimpleConsumer,
)


def main() -> None:
    endpoint, access_key, secret, topic, group = sys.argv[1:]
    config = ClientConfiguration(endpoint, Credentials(access_key, secret))
    producer = Producer(config, (topic,))
    producer.startup()
    message = Message()
    message.topic, message.body = topic, f"hi {os.environ['TZ']}".encode()
    producer.send(message)
    consumer = SimpleConsumer(config, group, {topic: FilterExpression()}, await_duration=10)
    consumer.startup()
    until = time.monotonic() + 30
    while time.monotonic() < until:
        for received in consumer.receive(max_message_num=1, invisible_duration=30):
            consumer.ack(received)
            print("got", received.body.decode(), flush=True)
            producer.shutdown()
            consumer.shutdown()
            os._exit(0)  # the client leaves threads behind that would keep the process alive
    sys.exit("nothing came")


main()

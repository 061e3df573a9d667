"""The one registry of requests: what serves a request of each kind that a broker is asked.

PUT, POP and ACK are served directly (handlers/server.py). common/protocol/frame_kinds.py says of
each kind who sends it and what it costs.
"""

from popmq.broker.core.broker import Broker
from popmq.broker.handlers import dead_letter_requests as dead_letters
from popmq.broker.handlers import drain_requests, lag_requests, lite_requests, lookup_requests
from popmq.broker.handlers import metadata_requests as metadata
from popmq.broker.handlers import pull_requests as pulls
from popmq.broker.handlers import relay_requests as relay
from popmq.broker.handlers import report_requests as reports
from popmq.broker.handlers import timer_requests as timers
from popmq.broker.handlers import transaction_requests as transactions
from popmq.broker.handlers.client_requests import list_clients
from popmq.broker.handlers.explain_requests import explain
from popmq.broker.handlers.request import Handler, Request
from popmq.broker.handlers.reset_requests import reset_offset
from popmq.common.errors import Code
from popmq.common.protocol.messaging_payloads import Kind, decode_change
from popmq.common.settings.settings_reply import settings_reply
from popmq.common.wire import admin_pb2


def change(broker: Broker, request: Request) -> bytes:
    """Another invisible time for one message: the new receipt handle."""
    requested = decode_change(request.body)
    broker.metadata_resolver.check_group_copied(requested.group, requested.group_id)
    return broker.pop.acks.change(
        topic=requested.topic,
        group=requested.group,
        handle=requested.handle,
        invisible_ms=requested.invisible_ms,
    )


def describe_settings(broker: Broker, request: Request) -> bytes:
    return settings_reply("broker", broker.settings.node, broker.settings)


def rotate_keys(broker: Broker, request: Request) -> bytes:
    """Sign with a new key from now on; the reply has no secret."""
    if not admin_pb2.RotateKeysRequest.FromString(request.body).look:
        broker.rotate_signing_key()
    name, keys = broker.settings.broker.name, broker.registry.signing_keys
    shown = [
        admin_pb2.SigningKeyState(broker=name, id=key.id, until_ms=key.until_ms) for key in keys
    ]
    status = admin_pb2.Status(code=Code.OK, message="OK")
    return admin_pb2.RotateKeysReply(status=status, keys=shown).SerializeToString()


HANDLERS: dict[Kind, Handler] = {
    Kind.CHANGE: change,
    Kind.CLIENTS: lite_requests.clients,
    Kind.LIST_CLIENTS: list_clients,
    Kind.SYNC_LITE: lite_requests.sync_lite,
    Kind.END_TRANSACTION: transactions.end_transaction,
    Kind.CHECKS: transactions.wait_for_checks,
    Kind.PULL: pulls.pull,
    Kind.UPDATE_OFFSET: pulls.update_offset,
    Kind.GET_OFFSET: pulls.get_offset,
    Kind.QUERY_OFFSET: pulls.query_offset,
    Kind.READ_MESSAGE: pulls.read_message,
    Kind.SEND_BACK: pulls.send_back,
    Kind.MEMBERS: pulls.members,
    Kind.ASK_CLIENT: relay.ask_client,
    Kind.CLIENT_REQUESTS: relay.client_requests,
    Kind.REJECT: dead_letters.reject,
    Kind.LIST_DEAD_LETTERS: dead_letters.list_dead_letters,
    Kind.REDRIVE: dead_letters.redrive,
    Kind.DESCRIBE_TOPIC: metadata.describe_topic,
    Kind.CREATE_TOPIC: metadata.create_topic,
    Kind.ALTER_TOPIC: metadata.alter_topic,
    Kind.DELETE_TOPIC: metadata.delete_topic,
    Kind.LIST_TOPICS: metadata.list_topics,
    Kind.DESCRIBE_GROUP: metadata.describe_group,
    Kind.CREATE_GROUP: metadata.create_group,
    Kind.ALTER_GROUP: metadata.alter_group,
    Kind.DELETE_GROUP: metadata.delete_group,
    Kind.LIST_GROUPS: metadata.list_groups,
    Kind.UNPARK: metadata.unpark,
    Kind.COPY_META: metadata.copy_meta,
    Kind.FIND_MESSAGES: lookup_requests.find,
    Kind.EXPLAIN: explain,
    Kind.LAG: lag_requests.lag,
    Kind.TIME_SPANS: lag_requests.time_spans,
    Kind.RESET_OFFSET: reset_offset,
    Kind.RECALL: timers.recall,
    Kind.RESCHEDULE: timers.reschedule,
    Kind.LIST_TIMERS: timers.list_timers,
    Kind.FORECAST_TIMERS: timers.forecast_timers,
    Kind.DRAIN: drain_requests.drain,
    Kind.TAKE_TIMERS: drain_requests.take_timers,
    Kind.DESCRIBE_TABLES: reports.describe_tables,
    Kind.READ_RAW: reports.read_raw,
    Kind.NAMES: reports.names,
    Kind.DESCRIBE_SETTINGS: describe_settings,
    Kind.FOLLOW_USERS: metadata.follow_users,
    Kind.CHANGE_USER: metadata.change_user,
    Kind.ROTATE_KEYS: rotate_keys,
}

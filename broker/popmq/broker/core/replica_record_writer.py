"""ReplicaRecordWriter: what a master writes so that its slaves can stay, and prove to be, equal."""

from popmq.broker.deliveries.check_point_buffer import CheckPointBuffer
from popmq.broker.store.message_store import MessageStore
from popmq.broker.store.replica_records import LogStart, SnapshotMark, StateHash
from popmq.broker.timer.timer_state import TimerState
from popmq.common.record.message import RecordKind


class ReplicaRecordWriter:
    """Writes nothing until `begin`, which a broker without replicas never says."""

    def __init__(self, store: MessageStore, buffer: CheckPointBuffer, timers: TimerState) -> None:
        self._store = store
        self._buffer = buffer
        self._timers = timers
        self._writes = False

    def begin(self) -> None:
        """From now on this broker is a master of replicas."""
        self._writes = True

    def before_snapshot(self) -> None:
        """Everything in the tables becomes a record; then slaves begin a snapshot, too."""
        self._buffer.write_all()
        self._put(RecordKind.SNAPSHOT_MARK, SnapshotMark(self._timers.classified).encode())

    def on_snapshot_made(self, position: int, state_hash: int) -> None:
        self._put(RecordKind.STATE_HASH, StateHash(position, state_hash).encode())

    def on_log_start(self, position: int) -> None:
        self._put(RecordKind.LOG_START, LogStart(position, self._timers.classified).encode())

    def _put(self, kind: RecordKind, body: bytes) -> None:
        if self._writes:
            self._store.put_record(kind, topic_id=0, queue_id=0, body=body)

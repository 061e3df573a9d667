"""The doctor: what is wrong with a data folder, what a start would make of it, what to do.

`examine` changes nothing (RehearsalDisk opens read-only).  `repair` (doctor/repair.py) does
what the findings propose, and saves every byte before it cuts one.  docs/concepts/doctor.md.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import starmap

from popmq.broker.doctor.finding import (
    Finding,
    MoveFiles,
    Repair,
    RequiredAction,
    TruncateSegment,
)
from popmq.broker.doctor.finding_texts import (
    COPY,
    MENDED,
    hole_finding,
    lost_tail_finding,
    padding_finding,
    refusal_finding,
    short_finding,
    slave_tail_finding,
    snapshot_ahead_finding,
    stranger_finding,
    unordered_finding,
)
from popmq.broker.doctor.index_check import (
    IndexCheck,
    QueueKey,
    expected_unit,
    stored_unit,
    unit_position,
)
from popmq.broker.doctor.log_walk import LogWalk
from popmq.broker.doctor.rehearsal import RehearsalResult, Rehearse
from popmq.broker.doctor.rehearsal_disk import RehearsalDisk
from popmq.broker.doctor.small_files import (
    OrderCheck,
    load_checkpoint,
    newest_snapshot,
    small_file_findings,
    snapshot_findings,
    snapshots_behind,
)
from popmq.broker.log.segment_file import segment_bytes_of
from popmq.broker.persistence.abort_file import own_from_epoch
from popmq.common.record.message import HEADER_SIZE

LOSS = f"{COPY}; or cut here with --repair --accept-loss"


@dataclass(frozen=True, slots=True)
class Summary:
    """The store as it is after the next start, or after the proposed repair when it needs one."""

    log_start: int
    log_end: int
    records: int
    epoch: int
    starts: bool  # a start as things are
    starts_after_repair: bool
    cluster: str = ""  # whose store it is; empty: the cluster of its next start
    topics: int = 0
    groups: int = 0
    check_points: int = 0
    in_flight: int = 0
    messages: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    data: str
    findings: tuple[Finding, ...]
    summary: Summary

    @property
    def healthy(self) -> bool:
        """Nothing that a normal start does not mend by itself."""
        return all(finding.need is RequiredAction.NOTHING for finding in self.findings)


def examine(
    data: str,
    rehearse: Rehearse,
    *,
    revive_unit_bytes: int,
    segment_bytes: int = 0,
    cluster: str = "",
) -> Diagnosis:
    """Look at everything. `segment_bytes` is found from the files when not given; `cluster` is
    what the identity says, and where it says nothing the rehearsed start takes one from them."""
    disk = RehearsalDisk()
    try:
        index = IndexCheck(disk, data, revive_unit_bytes, cluster)
        examination = _Examination(disk, data, rehearse, index, segment_bytes, cluster)
        try:
            return examination.diagnosis()
        finally:
            examination.close()
    finally:
        disk.close()


class _Examination:
    def __init__(
        self,
        disk: RehearsalDisk,
        data: str,
        rehearse: Rehearse,
        index: IndexCheck,
        segment_bytes: int,
        cluster: str,
    ) -> None:
        self._disk = disk
        self._rehearsal = rehearse
        self._data = data
        self._segment_bytes = segment_bytes or segment_bytes_of(disk, data) or 1 << 26
        self._walk = LogWalk(disk, data, self._segment_bytes)
        self._index = index
        self._checkpoint = load_checkpoint(disk, data)
        self._order = OrderCheck(self._checkpoint)
        self._findings: list[Finding] = []
        self._rehearsed: list[RehearsalDisk] = []
        self._index_is_to_blame = False  # no broker starts while its files lie there
        self._told = cluster
        known = set(index.clusters)
        self._cluster = cluster or (known.pop() if len(known) == 1 else "popmq")

    def diagnosis(self) -> Diagnosis:
        self._read_log()
        walk = self._walk
        self._findings += walk.findings + self._order.findings
        self._findings += small_file_findings(
            self._disk, self._data, self._order, log_start=walk.start, log_end=walk.end
        )
        self._findings += snapshot_findings(self._disk, self._data, log_end=walk.end)
        self._findings += [padding_finding(padding) for padding in walk.paddings]
        start = self._rehearse(())
        final = self._log_findings(start)
        final = self._index_findings(final)
        if final.refusal:
            self._findings.append(refusal_finding(final.refusal))
        self._findings += starmap(unordered_finding, final.unordered.items())
        summary = self._summary(start, final)
        return Diagnosis(self._data, tuple(self._findings), summary)

    def close(self) -> None:
        for disk in self._rehearsed:
            disk.close()

    def _read_log(self) -> None:
        holes = 0
        for record in self._walk.records():
            after_hole = len(self._walk.holes) > holes
            path = self._walk.file_of(record.header.position)
            self._order.take(record, path, bool(self._walk.holes) or after_hole)
            self._index.take(record)
        self._index.finish(self._walk.start, self._damaged())

    def _damaged(self) -> list[range]:
        """Where records were that are no more; behind the log's end everything may have been."""
        return [range(gap.position, gap.end) for gap in self._walk.holes] + [
            range(self._walk.end, 1 << 63)
        ]

    def _rehearse(self, repairs: tuple[Repair, ...]) -> RehearsalResult:
        after = self._rehearsal(
            self._data, repairs, segment_bytes=self._segment_bytes, cluster=self._cluster
        )
        self._rehearsed.append(after.disk)
        return after

    def _planned(self) -> tuple[Repair, ...]:
        return tuple(repair for finding in self._findings for repair in finding.repairs)

    # -- the log's end and its holes

    def _log_findings(self, start: RehearsalResult) -> RehearsalResult:
        """Say what a start makes of each hole and of the tail; returns the start after repair."""
        walk, planned = self._walk, self._planned()
        after = self._rehearse(planned) if planned and start.refusal else start
        cut = None
        if after.refusal:
            cut, after = self._smallest_cut(after)
        elif planned:
            after = self._rehearse(planned)
        if cut is None and not after.refusal and after.kept_end < walk.end:
            cut = after.kept_end  # it starts, and throws away what is intact behind the hole
        for hole in walk.holes:
            if cut is None or hole.position < cut:
                self._findings.append(hole_finding(walk.file_of(hole.position), hole))
        torn = next((gap for gap in walk.holes if gap.position == cut), None)
        if torn is not None and not start.refusal and own_from_epoch(self._disk, self._data):
            # A master may have confirmed what this disk did not have yet.
            behind = sum((walk.counted - torn.counted).values())
            path = walk.file_of(torn.position)
            self._findings.append(slave_tail_finding(path, torn.position, torn.reason, behind))
            return after
        if cut is not None:
            self._findings.append(self._loss_finding(cut, refused=bool(start.refusal)))
            return self._rehearse(self._planned())
        if after.refusal:
            return after
        if after.kept_end > walk.end:
            path = walk.file_of(walk.end)
            self._findings.append(
                lost_tail_finding(path, walk.end, after.kept_end, walk.end_reason)
            )
            return after
        ahead = snapshots_behind(self._disk, self._data, walk.end)
        self._findings += [snapshot_ahead_finding(path, walk.end) for path in ahead]
        self._findings += self._tail_findings()
        return after

    def _smallest_cut(self, refused: RehearsalResult) -> tuple[int | None, RehearsalResult]:
        """The last place to cut at so that a broker starts; None when the index is to blame."""
        planned = self._planned()
        index = self._index_repairs(self._bad_queues())
        places = [hole.position for hole in self._walk.holes] + [self._walk.end]
        cuts = [(None, ()), *((place, self._cut(place)) for place in reversed(places))]
        for place, cut in cuts:
            for more in ((), index) if index else ((),):
                after = self._rehearse((*planned, *cut, *more))
                if not after.refusal and (place is None or self._reaches(after, place)):
                    self._index_is_to_blame = bool(more)
                    return place, after
                after.disk.close()
        return None, refused

    def _reaches(self, after: RehearsalResult, place: int) -> bool:
        """Whether that start kept the log up to `place`, and did not end it at an earlier hole."""
        return not any(after.kept_end <= hole.position < place for hole in self._walk.holes)

    def _cut(self, position: int, *, keep_empty: bool = False) -> tuple[Repair, ...]:
        """End the log at `position`. The checkpoint goes last: without it a start would cut."""
        segment = self._walk.segment_of(position)
        behind = [segment.start for segment in self._walk.segments if segment.start > position]
        if keep_empty and behind and not self._walk.filled_behind(behind[0])[0]:
            behind.clear()  # segments that were allocated ahead
        moves = [f"commitlog/{start:020d}" for start in behind]
        moves += snapshots_behind(self._disk, self._data, position)
        repairs: list[Repair] = [MoveFiles(tuple(moves))] if moves else []
        if segment is not None:
            at = position - segment.start
            repairs.append(TruncateSegment(f"commitlog/{segment.start:020d}", at, segment.size))
        if self._checkpoint is not None and self._checkpoint.vouched > position:
            repairs.append(MoveFiles(("checkpoint",)))
        return tuple(repairs)

    def _loss_finding(self, position: int, *, refused: bool) -> Finding:
        vouched = self._checkpoint.vouched if self._checkpoint else 0
        vouched = max(vouched, newest_snapshot(self._disk, self._data))
        hole = next((gap for gap in self._walk.holes if gap.position >= position), None)
        before = hole.counted if hole else self._walk.counted
        given_up = self._walk.counted - before
        text = ", ".join(f"{number} {name}" for name, number in sorted(given_up.items()))
        reason = hole.reason if hole else self._walk.end_reason
        where = f"intact again from {hole.end}" if hole else "nothing intact behind it"
        filled = self._walk.filled_behind(position)[0]
        if position < vouched:
            what, why = "damage below the checkpoint", f"everything below {vouched} was durable"
        else:
            what, why = "damage in the middle", "what is behind it may have been acknowledged"
        consequence = (
            "the broker refuses to start"
            if refused
            else f"a start cuts {sum(given_up.values())} intact records and keeps no copy"
        )
        return Finding(
            what,
            self._walk.file_of(position),
            position,
            f"{reason}; {why}; {where}; {filled} bytes from here on",
            consequence,
            f"{LOSS}: gives up {text or 'no intact record'}, and those in the damaged bytes",
            RequiredAction.ACCEPT_LOSS,
            self._cut(position),
        )

    def _tail_findings(self) -> Iterator[Finding]:
        end = self._walk.end
        count, first = self._walk.filled_behind(end)
        if not count:
            return
        clean = self._checkpoint is not None and self._checkpoint.position == end
        clean = clean and not self._disk.exists(f"{self._data}/abort")
        torn = first - end < HEADER_SIZE and not clean
        yield Finding(
            "torn tail" if torn else "trailing garbage",
            self._walk.file_of(end),
            end,
            f"{self._walk.end_reason}; {count} bytes, nothing intact behind; a crash leaves "
            "such a tail, but damage of the last record looks the same"
            if torn
            else f"the log ends here; {count} bytes from {first} on are no records",
            f"start cuts {count} bytes, never acknowledged if a crash left them"
            if torn
            else f"start cuts {count} bytes",
            "nothing to do; --repair keeps a copy of them",
            RequiredAction.NOTHING,
            self._cut(end, keep_empty=True),
        )

    # -- the index

    def _index_repairs(self, keys: list[QueueKey]) -> tuple[Repair, ...]:
        paths = [tuple(self._index.queues[key].paths) for key in keys]
        return tuple(MoveFiles(some) for some in paths if some)

    def _bad_queues(self) -> list[QueueKey]:
        """Queues with more amiss than that their newest units are missing."""
        queues = self._index.queues.items()
        return [key for key, queue in queues if not queue.healthy and not queue.only_short]

    def _index_findings(self, after: RehearsalResult) -> RehearsalResult:
        """Say of every bad queue whether the start mends it; returns the start after repair."""
        queues = self._index.queues
        bad = self._bad_queues()
        short = [key for key, queue in queues.items() if not queue.healthy and key not in bad]
        unmended = bad
        if not after.refusal and not self._index_is_to_blame:
            unmended = self._unmended(after, bad + short) if bad else []
        refusal = after.refusal
        if unmended:
            rebuilt = self._rehearse((*self._planned(), *self._index_repairs(unmended)))
            refusal = rebuilt.refusal
            if not refusal or after.refusal:
                after = rebuilt
        if after.store is not None:
            dispatch = after.store.dispatch
            short = [key for key in short if dispatch.has_topic(key[0]) and key not in unmended]
            bad = [key for key in bad if dispatch.has_topic(key[0])]
        if short:
            missing = sum(queues[key].missing for key in short)
            self._findings.append(short_finding(len(short), missing))
        for key in bad:
            self._findings.append(self._queue_finding(key, key in unmended, refusal))
        self._findings += self._stranger_findings(after)
        return after

    def _unmended(self, after: RehearsalResult, bad: list[QueueKey]) -> list[QueueKey]:
        """Queues that hold a wrong unit even after the start."""
        assert after.store is not None
        dispatch = after.store.dispatch
        alive = {key for key in bad if dispatch.has_topic(key[0])}
        wrong = set()
        for record in LogWalk(self._disk, self._data, self._segment_bytes).records():
            header = record.header
            key = (header.topic_id, header.queue_id)
            if not record.has_unit or key not in alive or key in wrong:
                continue
            if header.position >= after.kept_end:
                continue
            if stored_unit(dispatch.queue(*key), record) != expected_unit(record):
                wrong.add(key)
        for key in alive - wrong:
            queue, checked = dispatch.queue(*key), self._index.queues[key]
            for offset in range(max(checked.following, 0), queue.count):
                position = unit_position(queue.raw(offset, 1), checked.unit_size)
                if not any(position in place for place in self._damaged()):
                    wrong.add(key)
        return sorted(wrong)

    def _queue_finding(self, key: QueueKey, unmended: bool, refusal: str) -> Finding:
        queue = self._index.queues[key]
        folder = queue.folder or f"consumequeue/*@{key[0]}/{key[1]}"
        if not unmended:
            consequence, proposal, need = MENDED, "nothing to do", RequiredAction.NOTHING
        elif refusal:
            consequence = f"messages are missed, and the log cannot rebuild it: {refusal}"
            proposal, need = COPY, RequiredAction.HUMAN
        else:
            consequence = "start keeps them: reports miss records, or the broker stops"
            proposal, need = (
                "delete the queue's files: the next start rebuilds them",
                RequiredAction.REPAIR,
            )
        repairs = self._index_repairs([key]) if need is RequiredAction.REPAIR else ()
        first = max(queue.first_bad, 0) if queue.first_bad >= 0 else max(queue.following, 0)
        return Finding(
            "bad index", folder, first, queue.describe(), consequence, proposal, need, repairs
        )

    def _stranger_findings(self, after: RehearsalResult) -> Iterator[Finding]:
        strangers = list(self._index.strangers)
        if after.store is not None:
            dispatch = after.store.dispatch
            strangers += [
                (queue.folder, queue.paths)
                for key, queue in self._index.queues.items()
                if queue.paths and not dispatch.has_topic(key[0])
            ]
        for folder, paths in strangers:
            yield stranger_finding(folder, paths)

    # -- the rest

    def _summary(self, start: RehearsalResult, final: RehearsalResult) -> Summary:
        walk = self._walk
        counted, messages = walk.counted, walk.messages
        for hole in walk.holes:
            if final.store is not None and hole.position >= final.kept_end:
                counted, messages = hole.counted, hole.messages
                break
        summary = Summary(
            log_start=walk.start,
            log_end=final.kept_end if final.store else walk.end,
            records=sum(counted.values()),
            epoch=self._order.epoch,
            starts=not start.refusal,
            starts_after_repair=not final.refusal,
            cluster=self._told,
        )
        if final.store is None:
            return summary
        names = {name: messages[topic_id] for topic_id, name in final.topics.items()}
        return replace(
            summary,
            topics=len(names),
            groups=final.groups,
            check_points=final.check_points,
            in_flight=final.in_flight,
            messages=names,
        )

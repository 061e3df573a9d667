"""Redrives that run in the console: started by a page, in pieces, no faster than its rate.

What was redriven stays redriven when the console ends: the same redrive, started again, goes on
with the rest (docs/concepts/dead_letters.md).
"""

import threading
from dataclasses import fields, replace

from popmq.cli.dlq import Redrive
from popmq.common.errors import Code, PopmqError, Refused
from popmq.common.wire import admin_pb2 as admin
from popmq.console.client import ConsoleClient, new_job_id, now_ms
from popmq.console.model import RedriveCounts, RedriveFilter, RedriveJob

KEPT_JOBS = 50
MAX_RUNNING = 4


class RedriveStopped(Exception):
    """A person asked for it, or the console ends."""


class Redrives:
    """The newest jobs of this process, by id."""

    def __init__(self, client: ConsoleClient) -> None:
        self._client = client
        self._jobs: dict[str, RedriveJob] = {}
        self._stop: dict[str, threading.Event] = {}

    def jobs(self, group: str) -> list[RedriveJob]:
        """The newest first."""
        return [job for job in reversed(self._jobs.values()) if job.group == group]

    def count(self, chosen: RedriveFilter) -> RedriveCounts:
        """The dry run: what a redrive would do now."""
        return _run(Redrive(self._ask), chosen, dry_run=True)

    def _ask(self, request: admin.RedriveRequest) -> admin.RedriveReply:
        reply = self._client.redrive(request)
        for part in reply.progress:
            if part.reason != request.reason:
                raise Refused(
                    Code.UNSUPPORTED,
                    f"broker {part.broker} is of an older popmq, which looks at no reason: select "
                    "dead letters one by one",
                )
        return reply

    def start(self, chosen: RedriveFilter, *, rate: int) -> RedriveJob:
        """`rate` is in messages a second, 0 without a limit.  Raises TOO_MANY_REQUESTS."""
        if sum(not job.end for job in self._jobs.values()) >= MAX_RUNNING:
            raise Refused(
                Code.TOO_MANY_REQUESTS, f"{MAX_RUNNING} redrives run already: wait for one to end"
            )
        job = RedriveJob(new_job_id(), chosen.group, now_ms(), rate)
        stop = threading.Event()
        self._jobs[job.id], self._stop[job.id] = job, stop
        while len(self._jobs) > KEPT_JOBS:
            oldest = next(iter(self._jobs))
            del self._jobs[oldest], self._stop[oldest]
        name = f"redrive-{job.id}"
        threading.Thread(
            target=self._work, args=(job, chosen, stop), name=name, daemon=True
        ).start()
        return job

    def stop(self, job_id: str) -> None:
        """Between two pieces; nothing happens when it has ended."""
        if job_id in self._stop:
            self._stop[job_id].set()

    def _work(self, job: RedriveJob, chosen: RedriveFilter, stop: threading.Event) -> None:
        def ask(request: admin.RedriveRequest) -> admin.RedriveReply:
            if stop.is_set():
                raise RedriveStopped
            reply = self._ask(request)
            if not request.dry_run:
                for part in reply.progress:
                    job.done = _added(job.done, part)
            return reply

        redrive = Redrive(ask, rate=job.rate, sleep_s=stop.wait)
        try:
            _run(redrive, chosen, dry_run=False)
            job.end = f"not all: {redrive.incomplete}" if redrive.incomplete else "done"
        except RedriveStopped:
            job.end = "stopped"
        except PopmqError as error:
            job.end = f"failed: {error}"
        finally:
            job.end = job.end or "failed: the log of the console says why"


def _run(redrive: Redrive, chosen: RedriveFilter, *, dry_run: bool) -> RedriveCounts:
    request = admin.RedriveRequest(
        group=chosen.group,
        topic=chosen.topic,
        tag=chosen.tag or None,
        key=chosen.key or None,
        after_ms=chosen.after_ms,
        before_ms=chosen.before_ms,
        reason=chosen.reason,
        dry_run=dry_run,
    )
    if not chosen.places:
        return _added(RedriveCounts(), redrive.all(request))
    total = RedriveCounts()
    for place in chosen.places:
        offset, _, broker = place.partition("@")
        if not (offset.isascii() and offset.isdecimal() and len(offset) < 19 and broker):
            raise Refused(Code.BAD_REQUEST, f"{place[:40]!r} names no dead letter: OFFSET@BROKER")
        request.broker, request.from_offset = broker, int(offset)
        request.end_offset, request.limit = int(offset) + 1, 1
        for part in redrive.piece(request).progress:
            total = _added(total, part)
        if redrive.rate and not dry_run:
            redrive.sleep_s(1 / redrive.rate)
    return total


def _added(counts: RedriveCounts, part: admin.Redriven) -> RedriveCounts:
    names = [field.name for field in fields(counts)]
    return replace(counts, **{n: getattr(counts, n) + getattr(part, n) for n in names})

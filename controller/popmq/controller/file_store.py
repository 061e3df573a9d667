"""The records in a folder of files, for controllers of one machine.

One JSON file per key.  A write holds an flock over the whole of read, compare, write, fsync and
rename, so that two controllers on one folder are as safe as one.
"""

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from popmq.common.errors import ConfigError
from popmq.common.protocol.group_record import GroupRecord
from popmq.controller.metadata_store import (
    MetadataStoreUnavailable,
    WriteOutcome,
    WriteResult,
    judge,
)

LOCK_WAIT_S = 5.0
LOCK_LOOK_S = 0.005


class FileStore:
    """`folder` is made when it is missing. Raises ConfigError when it cannot be written."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        try:
            os.makedirs(folder, exist_ok=True)
            os.close(os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640))
            _sync_folder(folder)
        except OSError as error:
            raise ConfigError(
                f"controller.data = {folder} cannot be written: {error.strerror}"
            ) from error

    def read(self, key: str) -> GroupRecord | None:
        """A rename is atomic, so reading needs no lock."""
        path = self._path(key)
        try:
            with open(path, encoding="utf-8") as file:
                return record_from_json(file.read())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise MetadataStoreUnavailable(f"{path} cannot be read: {error}") from error

    def swap(self, key: str, expected_version: int, record: GroupRecord) -> WriteResult:
        assert record.version == expected_version + 1, "each write moves the version by one"
        try:
            with self._locked():
                found_record = self.read(key)
                if (found_record.version if found_record else 0) != expected_version:
                    return WriteResult(WriteOutcome.CONFLICT, found_record)
                self._write(self._path(key), record_to_json(record))
                return WriteResult(WriteOutcome.WRITTEN, record)
        except MetadataStoreUnavailable as error:  # nothing was tried
            return WriteResult(WriteOutcome.UNKNOWN, None, str(error))
        except OSError as error:
            return self._look_again(key, expected_version, record, str(error))

    def _look_again(
        self, key: str, expected_version: int, record: GroupRecord, reason: str
    ) -> WriteResult:
        """A record whose rename is not durable may be gone after the next power cut."""
        try:
            _sync_folder(self._folder)
            return judge(record, expected_version, self.read(key), reason)
        except (OSError, MetadataStoreUnavailable):
            return WriteResult(WriteOutcome.UNKNOWN, None, reason)

    def _write(self, path: str, text: str) -> None:
        """Whole or not at all, and durable when this returns."""
        draft = f"{path}.tmp"
        with open(draft, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
        _sync_folder(self._folder)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        fd = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
        try:
            self._take(fd)
            yield
        finally:
            os.close(fd)

    def _take(self, fd: int) -> None:
        """Another controller holds it for the time of an fsync, or it was stopped holding it."""
        give_up = time.monotonic() + LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > give_up:
                    raise MetadataStoreUnavailable(
                        f"another controller has held {self._lock_path} for {LOCK_WAIT_S} s"
                    ) from None
            time.sleep(LOCK_LOOK_S)

    @property
    def _lock_path(self) -> str:
        return f"{self._folder}/lock"

    def _path(self, key: str) -> str:
        return f"{self._folder}/{key}.json"


def _sync_folder(folder: str) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def record_to_json(record: GroupRecord) -> str:
    return json.dumps(
        {
            "leader": record.leader,
            "epoch": record.epoch,
            "sync_state_set": record.sync_state_set,
            "version": record.version,
        }
    )


def record_from_json(text: str) -> GroupRecord:
    """ValueError for anything that is no record."""
    try:
        document = json.loads(text)
        members = tuple(map(str, document["sync_state_set"]))
        version = int(document["version"])
        record = GroupRecord(str(document["leader"]), int(document["epoch"]), members, version)
        record.check_invariants()
    except (KeyError, TypeError, AssertionError) as error:
        raise ValueError(f"it is no record of a broker group: {error}") from error
    return record

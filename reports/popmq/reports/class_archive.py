"""Spark's classes as Java has them in memory, in a file: a report starts in half the time with it.

Java writes such a file itself at the end of a run, and checks when it starts that it is of the same
Java and the same jars; if not, it goes without.  `popmq report prepare` makes one (prepare.py).
"""

import os
from dataclasses import dataclass
from pathlib import Path

from popmq.reports.java import Java, cache_folder, hash_of

_CACHES_SINCE = 25  # what writes and reads such a file in one step each (JEP 514)


@dataclass(frozen=True, slots=True)
class ClassArchive:
    """That of one Java and one installation of Spark."""

    java: Java
    spark: Path  # the folder of pyspark

    @property
    def path(self) -> Path:
        """Java does not take one that was written with other jars in the same place, so those are
        of its name: name, bytes and time of each."""
        jars = sorted((self.spark / "jars").glob("*.jar"))
        known = [(jar.name, jar.stat().st_size, jar.stat().st_mtime_ns) for jar in jars]
        return cache_folder() / f"{self._stem}-{hash_of(repr(known)):x}{self._suffix}"

    def keep(self, written: Path) -> Path:
        """Put it in its place; those of jars that were here before have no use any more."""
        path = self.path
        os.replace(written, path)
        for older in cache_folder().glob(f"{self._stem}*{self._suffix}"):
            if older != path:
                older.unlink(missing_ok=True)
        return path

    def reading(self) -> str:
        """The option that Java starts with; empty while there is no archive."""
        if not self.path.exists():
            return ""
        return f"-XX:{'AOTCache' if self._is_cache else 'SharedArchiveFile'}={self.path}"

    def writing(self, path: Path) -> str:
        """The option with which Java writes one to `path` when it ends."""
        return f"-XX:{'AOTCacheOutput' if self._is_cache else 'ArchiveClassesAtExit'}={path}"

    @property
    def _stem(self) -> str:
        return f"spark-{hash_of(f'{self.java.home} {self.java.said} {self.spark}'):012x}"

    @property
    def _suffix(self) -> str:
        return ".aot" if self._is_cache else ".jsa"

    @property
    def _is_cache(self) -> bool:
        return self.java.version >= _CACHES_SINCE

"""Spark's classes as Java has them in memory, in a file: a report starts in half the time with it.

Java writes such a file itself at the end of a run, and checks when it starts that it is of the same
Java and the same jars; if not, it goes without.  `popmq report prepare` makes one (prepare.py).
"""

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
        name = hash_of(f"{self.java.home} {self.java.said} {self.spark}")
        kind = "aot" if self._is_cache else "jsa"
        return cache_folder() / f"spark-{name:x}.{kind}"

    def reading(self) -> str:
        """The option that Java starts with; empty while there is no archive."""
        if not self.path.exists():
            return ""
        return f"-XX:{'AOTCache' if self._is_cache else 'SharedArchiveFile'}={self.path}"

    def writing(self, path: Path) -> str:
        """The option with which Java writes one to `path` when it ends."""
        return f"-XX:{'AOTCacheOutput' if self._is_cache else 'ArchiveClassesAtExit'}={path}"

    @property
    def _is_cache(self) -> bool:
        return self.java.version >= _CACHES_SINCE

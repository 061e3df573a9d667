"""Index files for tests of checkpoints."""

from collections.abc import Callable

from popmq.broker.log.segment_file import Syncable
from popmq.broker.persistence.checkpoint_scheduler import IndexPieces


def index_files(*files: Syncable, pieces: int = 1) -> Callable[[], IndexPieces]:
    """An index whose files are written already, in so many pieces."""

    def flush() -> IndexPieces:
        for _ in range(pieces - 1):
            yield
        return list(files)

    return flush

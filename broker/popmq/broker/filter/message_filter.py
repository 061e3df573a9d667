"""MessageFilter: which messages a receive wants; what pop needs to know of it."""

from popmq.common.record.message import StoredMessage


class MessageFilter:
    """Accepts everything, unless a subclass says otherwise."""

    text: str  # as its client wrote it
    cost: int = 1  # what a message costs to look at, beside that of a simple filter

    @property
    def matches_all(self) -> bool:
        """Whether nothing needs to be looked at."""
        return False

    @property
    def uses_tag_hash(self) -> bool:
        """Whether `may_accept` tells most messages apart without reading them."""
        return False

    def may_match_hash(self, hash_of_tag: int) -> bool:
        """By the unit of the index alone; what this lets through is read and looked at."""
        return True

    def accepts(self, message: StoredMessage) -> bool:
        return True


class MatchAll(MessageFilter):
    text = ""

    @property
    def matches_all(self) -> bool:
        return True


EVERYTHING = MatchAll()

"""Tag expressions: `*`, or tags joined by `||` (RocketMQ's FilterAPI).

A unit of the index holds 64 bits of the tag's hash, so most messages of another tag are passed
over without reading them; the text of those that are read is compared, so that a collision
delivers nothing foreign.
"""

from dataclasses import dataclass

from popmq.broker.filter.message_filter import EVERYTHING, MessageFilter
from popmq.broker.filter.properties import tag_of
from popmq.common.record.message import StoredMessage, tag_hash


@dataclass(frozen=True)
class TagFilter(MessageFilter):
    text: str
    tags: frozenset[bytes]
    hashes: frozenset[int]

    @property
    def uses_tag_hash(self) -> bool:
        return True

    def may_match_hash(self, hash_of_tag: int) -> bool:
        return hash_of_tag in self.hashes

    def accepts(self, message: StoredMessage) -> bool:
        return tag_of(message.properties) in self.tags


def parse_tags(expression: str) -> MessageFilter:
    """`A || B` accepts A and B; `*`, an empty text, or a `*` among the tags accepts all."""
    tags = {tag.strip() for tag in expression.split("||")} - {""}
    if not tags or "*" in tags:
        return EVERYTHING
    return TagFilter(
        " || ".join(sorted(tags)),
        frozenset(tag.encode() for tag in tags),
        frozenset(tag_hash(tag) for tag in tags),
    )

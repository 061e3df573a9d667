"""Tag expressions: `*`, or tags joined by `||` (RocketMQ's FilterAPI).

A unit of the index holds 64 bits of the tag's hash, so a message of another tag is passed
over without reading it.
"""

from dataclasses import dataclass

from popmq.common.message import tag_hash


@dataclass(frozen=True, slots=True)
class TagFilter:
    """Accepts every tag when `hashes` is empty."""

    hashes: frozenset[int] = frozenset()

    def accepts(self, hash_of_tag: int) -> bool:
        return not self.hashes or hash_of_tag in self.hashes


EVERYTHING = TagFilter()


def parse_tags(expression: str) -> TagFilter:
    """`A || B` accepts A and B; `*`, an empty text, or a `*` among the tags accepts all."""
    tags = {tag.strip() for tag in expression.split("||")} - {""}
    if not tags or "*" in tags:
        return EVERYTHING
    return TagFilter(frozenset(tag_hash(tag) for tag in tags))

"""Which images a spec may name: the administrator of the operator decides, not its author.

A rule is a prefix that ends where a part of the name does (`registry.example/popmq` allows its tags
and what is below it, not `registry.example/popmq-other`), a digest (`sha256:...`), or `*`.
"""

from collections.abc import Sequence

ANY_IMAGE = "*"
DIGEST = "sha256:"


def is_allowed(image: str, rules: Sequence[str]) -> bool:
    return any(_matches(image, rule) for rule in rules)


def repository(image: str) -> str:
    """Without tag and digest: `registry:5000/popmq` of `registry:5000/popmq:1@sha256:...`."""
    name = image.partition("@")[0]
    head, separator, tag = name.rpartition(":")
    return head if separator and "/" not in tag else name


def _matches(image: str, rule: str) -> bool:
    if rule == ANY_IMAGE:
        return True
    if rule.startswith(DIGEST):
        return image.endswith(f"@{rule}")
    rest = image.removeprefix(rule)
    return image.startswith(rule) and (rule[-1:] in "/:@" or not rest or rest[0] in "/:@")

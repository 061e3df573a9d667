"""Which filter a request asks for."""

from popmq.broker.filter.message_filter import EVERYTHING, MessageFilter
from popmq.broker.filter.sql92 import SqlFilters
from popmq.broker.filter.tag import parse_tags
from popmq.common.protocol.messaging_payloads import FilterType


def compile_filter(known: SqlFilters, filter_type: int, expression: str) -> MessageFilter:
    """ILLEGAL_FILTER_EXPRESSION for what is none."""
    if filter_type == FilterType.SQL:
        return known.get(expression)
    return parse_tags(expression) if filter_type else EVERYTHING

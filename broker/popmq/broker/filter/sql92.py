"""SQL-92 filters on the properties of messages, compiled once and kept while they are used.

Meanings and precedence are those of the standard; docs/concepts/filters.md has them all, and
docs/differences.md where RocketMQ's differ.
"""

from collections import OrderedDict

from popmq.broker.filter.message_filter import MessageFilter
from popmq.broker.filter.properties import PropertyReader
from popmq.broker.filter.sql_parser import SqlParser
from popmq.broker.filter.sql_program import compiled, names_in
from popmq.common.errors import Code, Refused
from popmq.common.record.message import StoredMessage

SIZE_LIMIT = 4 << 10  # bytes of an expression
_BYTES_PER_WORK = 128  # of an expression: about what another message to look at costs


class SqlFilter(MessageFilter):
    """Raises ILLEGAL_FILTER_EXPRESSION, which names the column."""

    def __init__(self, expression: str) -> None:
        size = len(expression.encode())
        if size > SIZE_LIMIT:
            raise Refused(
                Code.ILLEGAL_FILTER_EXPRESSION,
                f"SQL filter of {size} bytes is over the limit of {SIZE_LIMIT} bytes",
            )
        parser = SqlParser(expression)
        tree = parser.parse()
        self.text = expression
        self.words = parser.words
        self.cost = 1 + size // _BYTES_PER_WORK
        self._test = compiled(tree)
        self._reader = PropertyReader(names_in(tree))

    def accepts(self, message: StoredMessage) -> bool:
        """Whether the expression is true; unknown is not."""
        return self._test(self._reader.read(message.head, message.properties)) is True


class SqlFilters:
    """The filters that were used lately; a receive of a known one compiles nothing.

    A word becomes about four objects, all of which the garbage collector looks at in one go: that
    takes 50 ms at the limit of words.
    """

    def __init__(self, limit: int = 1_024, words_limit: int = 1 << 16) -> None:
        self._limit = limit
        self._words_limit = words_limit
        self._words = 0
        self._filters: OrderedDict[str, SqlFilter] = OrderedDict()
        self.compiled = 0

    def __len__(self) -> int:
        return len(self._filters)

    def get(self, expression: str) -> SqlFilter:
        known = self._filters.get(expression)
        if known is not None:
            self._filters.move_to_end(expression)
            return known
        sql_filter = SqlFilter(expression)
        self.compiled += 1
        self._filters[expression] = sql_filter
        self._words += sql_filter.words
        while len(self._filters) > self._limit or self._words > self._words_limit:
            _, gone = self._filters.popitem(last=False)
            self._words -= gone.words
        return sql_filter

"""What the tables of a broker say of themselves, asked between any two events of a simulator."""

import traceback

from popmq.broker.core.broker import Broker


def broken_invariant(broker: Broker) -> str:
    """The first invariant that does not hold, and where it is stated; empty when all hold."""
    tables = (
        *(broker.table, broker.buffer, broker.deliveries.redriven),
        *(broker.deliveries.described, broker.transactions.table, broker.lites.subscriptions),
    )
    for table in tables:
        try:
            table.check_invariants()
        except AssertionError as error:
            stated = traceback.extract_tb(error.__traceback__)[-1]
            return (
                f"{str(error) or stated.line} ({stated.name} of {stated.filename}, {stated.lineno})"
            )
    return ""

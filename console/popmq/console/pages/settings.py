"""`/settings`: the values that processes run with, and where they differ."""

import htpy as h

from popmq.console.markup import missing, number, search, table, text
from popmq.console.page import Console, Page, Request

HEADS = ("Setting", "Value", "Process", "Default", "Unit", "Meaning")


def show(console: Console, request: Request) -> Page:
    rows, lack = console.client.settings(request.query.get("q", ""))
    only_set = request.query.get("only", "") == "set"
    shown = [row for row in rows if not (only_set and row.is_default)]
    changed = sum(not row.is_default for row in rows)
    return Page(
        "Settings",
        [
            h.h1["Running settings"],
            h.p[
                f"{number(changed)} of {number(len(rows))} values are not the default. "
                "A setting takes effect when its process starts again. ",
                h.a(href="?" if only_set else "?only=set")[
                    "Show all" if only_set else "Show those that are set"
                ],
            ],
            search(request, "settings"),
            missing(lack),
            table(
                HEADS,
                [
                    (
                        h.code(class_="key")[row.key],
                        text(row.value) if row.is_default else h.strong[text(row.value)],
                        text(row.process),
                        text(row.default),
                        row.unit,
                        text(row.meaning),
                    )
                    for row in shown
                ],
                empty="There is no such setting.",
            ),
        ],
    )

"""`/reports`: the last HTML pages of `popmq report`, and each of them."""

import htpy as h

from popmq.console.markup import link, moment, size, table, text
from popmq.console.page import Console, Document, Page, Request, bad_input, now_ms, to


def show(console: Console, request: Request) -> Page | Document:
    """Reports are about every topic and group: users who may not see the cluster see none."""
    console.client.brokers()
    reports = console.reports
    if reports is None:
        raise bad_input("no folder of reports is named: set console.reports (--reports)")
    if request.name:
        return Document(reports.read(request.name))
    rows = [
        (
            link(each.url or to("reports", each.name), each.name),
            moment(each.made_ms, now_ms()),
            size(each.size) if each.size >= 0 else "-",
        )
        for each in reports.last()
    ]
    return Page(
        "Reports",
        [
            h.h1["Reports"],
            h.p[
                "The last reports of ",
                link(reports.place, reports.place) if reports.is_url else text(reports.place),
                ". ",
                h.code["popmq report lag --html FILE"],
                " makes one.",
            ],
            table(("Report", "Made", "#Size"), rows, empty="There is no report yet."),
        ],
    )

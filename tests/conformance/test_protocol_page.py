"""docs/reference/protocol.md: no call and no field of the public protocol without an answer."""

import re
from collections.abc import Iterator

from conformance.page_tables import ROOT, section, table
from google.protobuf.descriptor import Descriptor

from popmq.proxy.admin.public_admin import INSTEAD
from popmq.proxy.api import admin_pb2, definition_pb2, service_pb2

PAGE = (ROOT / "docs" / "reference" / "protocol.md").read_text(encoding="utf-8")
FILES = (definition_pb2.DESCRIPTOR, service_pb2.DESCRIPTOR, admin_pb2.DESCRIPTOR)
QUOTED = re.compile(r"`(\w+)`")


def messages() -> Iterator[tuple[str, Descriptor]]:
    for file in FILES:
        for name, message in file.message_types_by_name.items():
            yield name, message
            for inner in message.nested_types:
                if not inner.GetOptions().map_entry:
                    yield f"{name}.{inner.name}", inner


def calls(title: str) -> dict[str, str]:
    """The answer of each call of the service of that name."""
    rows = {QUOTED.findall(row[0])[0]: row[1] for row in table(section(PAGE, title))}
    assert len(rows) == len(table(section(PAGE, title))), "a call has two rows"
    return rows


def test_every_call_has_its_answer() -> None:
    for title, file in (("MessagingService", service_pb2), ("Admin", admin_pb2)):
        reporteds = calls(title)
        assert sorted(reporteds) == sorted(file.DESCRIPTOR.services_by_name[title].methods_by_name)
        assert [name for name, answer in reporteds.items() if not answer] == []


def test_the_calls_that_are_refused_are_those_that_the_page_names() -> None:
    refused = {name for name, answer in calls("Admin").items() if answer.startswith("UNSUPPORTED")}
    assert refused == set(INSTEAD)
    assert not any(
        answer.startswith("UNSUPPORTED") for answer in calls("MessagingService").values()
    )


def test_every_field_of_every_message_has_one_place() -> None:
    rows = {row[0]: row[1:] for row in table(section(PAGE, "Fields"))}
    expected = {name: sorted(message.fields_by_name) for name, message in messages()}
    assert sorted(rows) == sorted(expected)
    for name, cells in rows.items():
        assert sorted(QUOTED.findall(" ".join(cells))) == expected[name], name


def test_what_is_not_used_says_why() -> None:
    for name, _, _, unused in table(section(PAGE, "Fields")):
        for reason in filter(None, unused.split("; ")):
            fields, _, why = reason.rpartition("`: ")
            assert fields, f"{name}: {reason}"
            assert why, f"{name}: {reason}"

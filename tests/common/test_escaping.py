"""Text of others in logs and on terminals."""

import json
import logging

import pytest

from popmq.common.escaping import escaped, escaped_lines, json_text
from popmq.common.observability import JsonFormatter, TerminalFormatter

CONTROLS = [*range(0x20), *range(0x7F, 0xA0), *range(0x2028, 0x202F), *range(0x2066, 0x206A)]


@pytest.mark.parametrize("number", CONTROLS)
def test_no_character_that_moves_or_colours_or_turns_anything_is_left(number: int) -> None:
    char = chr(number)
    assert char not in escaped(f"a{char}b")
    assert (char in escaped_lines(f"a{char}b")) == (char == "\n")
    assert char not in json_text({f"a{char}": f"b{char}"})
    assert json.loads(json_text({f"a{char}": f"b{char}"})) == {f"a{char}": f"b{char}"}


def test_other_text_stays_as_it_is() -> None:
    text = "Grüße, 世界 🎉 100 %"
    assert escaped(text) == escaped_lines(text) == json.loads(json_text(text)) == text
    assert text in json_text(text)


@pytest.mark.parametrize("formatter", [JsonFormatter("broker"), TerminalFormatter()])
def test_lines_of_the_log_have_no_control_characters(formatter: logging.Formatter) -> None:
    record = logging.LogRecord("popmq", logging.INFO, "", 0, "from \x9b31m", None, None)
    record.client = "me\x1b]0;owned\x07\x85"
    line = formatter.format(record)
    assert line.isprintable(), line
    assert "owned" in line

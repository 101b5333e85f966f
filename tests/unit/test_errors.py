"""A failure is one printable line, whatever stood in a file's name or content."""

from __future__ import annotations

import pytest

from simmoe.cli import run
from simmoe.errors import ProfileError, SimmoeError


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("plain, 'ü' and …", "plain, 'ü' and …"),
        ("two\nlines\r", "two\\nlines\\r"),
        ("\x1b[31mred\x1b[0m", "\\x1b[31mred\\x1b[0m"),
        ("no text: \udcff", "no text: \\udcff"),
        ("a separator\u2028", "a separator\\u2028"),
    ],
)
def test_what_is_not_printable_is_escaped(text: str, line: str) -> None:
    assert str(SimmoeError(text)) == line
    assert str(ProfileError(f"in {SimmoeError(text)}")) == f"in {line}"


def test_the_command_line_prints_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["profile", "show", "two\nlines\x1b[31m\udcff"]) == 2
    assert capsys.readouterr().err.startswith(r"simmoe: no profile 'two\nlines\x1b[31m\udcff'")

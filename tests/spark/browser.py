"""Chromium without a window: what a page looks like, and whether it fits."""

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from programs import run_program

_TIMEOUT_S = 60
_MEASURE = """<script>addEventListener("load", () => {
  const wide = document.documentElement.clientWidth;
  const found = {
    wide, overflow: document.documentElement.scrollWidth - wide,
    scrolled: [...document.querySelectorAll(".scroll")].filter(
      each => each.scrollWidth > each.clientWidth).length,
    outside: [...document.images].filter(one => !one.src.startsWith("data:")).length,
    background: getComputedStyle(document.body).backgroundColor,
    colour: getComputedStyle(document.body).color,
    high: Math.ceil(document.body.getBoundingClientRect().bottom),
  };
  document.title = JSON.stringify(found);
});</script>"""


@dataclass(frozen=True, slots=True)
class Look:
    """Pixels; colours as CSS writes them."""

    wide: int
    overflow: int  # by so much the page is wider than its window
    scrolled: int  # tables that are wider than the page
    outside: int  # pictures that are not in the page
    background: str
    colour: str
    high: int


class Browser:
    """Its profile and what it is shown lie in `folder`."""

    def __init__(self, folder: Path) -> None:
        binary = shutil.which("chromium") or shutil.which("google-chrome")
        if binary is None:
            pytest.skip("no chromium on PATH: `apt-get install chromium`")
        self._binary, self._folder = binary, folder

    def look(self, page: Path, *, wide: int, dark: bool = False) -> Look:
        measured = self._folder / "measured.html"
        measured.write_text(page.read_text(encoding="utf-8") + _MEASURE, encoding="utf-8")
        # A window is never narrower than 500 pixels; a frame is.
        frame = self._folder / "frame.html"
        frame.write_text(
            f'<iframe src="measured.html" style="width:{wide}px;height:2000px;border:0"></iframe>'
            "<script>addEventListener('load', () => document.body.append("
            "document.querySelector('iframe').contentDocument.title))</script>"
        )
        dumped = self._run(frame, "--dump-dom", dark=dark)
        match = re.search(r"\{&quot;wide.*?\}|\{\"wide.*?\}", dumped)
        assert match is not None, dumped[-500:]
        return Look(**json.loads(match[0].replace("&quot;", '"')))

    def picture(self, page: Path, to: Path, *, wide: int, high: int, dark: bool = False) -> None:
        self._run(page, f"--screenshot={to}", f"--window-size={wide},{high}", dark=dark)
        assert to.stat().st_size > 0

    def _run(self, page: Path, *what: str, dark: bool) -> str:
        done = run_program(
            [
                self._binary,
                *("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
                *("--allow-file-access-from-files", "--virtual-time-budget=3000"),
                f"--blink-settings=preferredColorScheme={0 if dark else 1}",
                f"--user-data-dir={self._folder / 'profile'}",
                *what,
                page.resolve().as_uri(),
            ],
            timeout=_TIMEOUT_S,
        )
        assert done.returncode == 0, done.stderr[-2_000:]
        return done.stdout

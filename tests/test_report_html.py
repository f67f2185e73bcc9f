"""Pages are whole HTML that asks for nothing, hold the lanes and the numbers, and open without an error."""

from __future__ import annotations

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from oomc.plan import format_bytes
from oomc.report import Report
from oomc.report_html import page
from oomc.report_svg import seconds
from tests.reports import recorded

VOID = {"meta", "br", "link", "img", "input", "hr"}
CHROMIUM = shutil.which("chromium")


class Reader(HTMLParser):
    """Checks that every element is closed, and keeps text and attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data: str) -> None:
        self.text += data


def read(html: str) -> Reader:
    reader = Reader()
    reader.feed(html)
    reader.close()
    assert reader.open == []
    return reader


@pytest.fixture(scope="module")
def html() -> str:
    return page(recorded()[1].data)


def test_elements_are_closed_and_nothing_is_asked_for(html: str) -> None:
    reader = read(html)
    assert re.findall(r"https?://", html) == []
    for tag, attributes in reader.found:
        assert tag not in ("link", "img", "iframe") and not {"src", "href", "xlink:href"} & attributes.keys()
    assert "@import" not in html and "url(" not in html and "prefers-color-scheme: dark" in html


def test_lanes_and_numbers_are_there(html: str) -> None:
    reader, data = read(html), recorded()[1].data
    for lane in ("compute", "h2d", "d2h", "host", "device"):
        assert f">{lane}</span>" in html
    for number in (data["timeline"]["step_s"], data["measured"]["step_s"], *data["timeline"]["limits"].values()):
        assert seconds(number) in reader.text
    for tier in data["tiers"].values():
        for _, _, nbytes in tier["rows"]:
            assert format_bytes(nbytes) in reader.text
    for part in ("projected", "measured", "allowed", "bound by", "the compute waits for", data["plan"], data["graph"]):
        assert part in reader.text
    shown = {str(attributes.get("data-t")).partition(",")[0] for tag, attributes in reader.found if tag == "rect"}
    assert {f"{lane}: {name} of {block}" for lane, _, name, block, _, end, _ in data["timeline"]["events"]
            if end >= 0} <= shown  # fmt: skip


def test_every_block_has_its_decisions(html: str) -> None:
    reader, data = read(html), recorded()[1].data
    assert [row["block"] for row in data["decisions"]] == data["blocks"]
    assert all(f"<td>{name}</td>" in html for name in data["blocks"])
    plan = recorded()[0].plan
    values = [name for row in data["decisions"] for names in row["values"].values() for name in names]
    assert sorted(values) == sorted(plan.residency)
    assert {row["block"] for row in data["decisions"] if row["state"] == "device"} == set(plan.resident)
    assert "decisions" in reader.text.lower()
    assert "one more GiB of device memory" in reader.text
    for block, text in data["why"]["blocks"]:
        assert block in reader.text and text in reader.text
    assert "measured during each node" in reader.text


def test_texts_are_escaped() -> None:
    reader = read(page({"text": "a <b> & 'c'", "stage": "<capture>"}))
    assert "a <b> & 'c'" in reader.text and "<capture>" in reader.text


def test_a_stage_is_a_page_of_its_text(tmp_path: Path) -> None:
    saved = Report.of_stage("%x = add(%a, %b)", "capture").save(tmp_path / "stage.html")
    assert "%x = add(%a, %b)" in read(saved.read_text()).text


@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")
def test_it_opens_in_a_browser(html: str, tmp_path: Path) -> None:
    probe = """<script>
      var plot = document.querySelector('.chart svg'), r = plot.getBoundingClientRect();
      function mouse(kind, on, x) {
        on.dispatchEvent(new MouseEvent(kind, {bubbles: true, clientX: x, clientY: r.top + 5}));
      }
      mouse('mousedown', plot, r.left + 0.25 * r.width);
      mouse('mousemove', window, r.left + 0.5 * r.width);
      mouse('mouseup', window, r.left + 0.5 * r.width);
      mouse('mousemove', document.querySelector('rect'), r.left + 5);
      document.body.dataset.zoomed = plot.getAttribute('viewBox');
      document.body.dataset.tip = document.getElementById('tip').textContent;
    </script></body>"""
    path = tmp_path / "report.html"
    path.write_text(html.replace("</body>", probe))
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
               "--enable-logging=stderr", "--window-size=1200,900", "--dump-dom", path.as_uri()]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
    body = next(attributes for tag, attributes in read(done.stdout).found if tag == "body")
    x, _, width, _ = (float(part) for part in str(body["data-zoomed"]).split())
    assert [x, width] == pytest.approx([2500, 2500], abs=20)
    assert str(body["data-tip"]).startswith("compute: ")

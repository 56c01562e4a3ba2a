"""A page as a test reads it, and how it is written."""

import pathlib
import re
from html.parser import HTMLParser

from trace_jax import report

HOSTILE = "<script>alert('tool')</script>\x00\x1b[31m\u202egnp.exe\ud800 </details><img src=x onerror=alert(1)>"


class Page(HTMLParser):
    """Tags with their attributes, the visible text of each section, and the order of headings."""

    VOID = {"meta", "link", "br", "img", "input", "line", "rect", "circle", "polyline", "wbr"}

    def __init__(self, source):
        super().__init__()
        self.source, self.open, self.tags, self.headings, self.sections, self.section = source, [], [], [], {}, ""
        self.feed(source)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in self.VOID:
            self.open.append(tag)
        if re.fullmatch("h[1-6]", tag):
            self.headings.append(int(tag[1]))
        if tag == "section":
            self.section = dict(attributes)["id"]

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing, line {self.getpos()[0]}"
        if tag in ("td", "th", "dt", "dd"):
            self.handle_data(" ")

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("style", "script"):
            self.sections[self.section] = self.sections.get(self.section, "") + data

    def said(self, section):
        return " ".join(self.sections[section].split())


def written(workdir):
    """The report of a workdir."""
    return Page(pathlib.Path(report.write_report(workdir)).read_text("utf-8"))

"""report.html and the pictures: complete, and readable without a network."""

import base64
import re
from pathlib import Path

import pytest

from allfinite.train import layout
from allfinite.train.report import write_report
from allfinite.train.summary import read_run, write_summary
from support.runs import write_run

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("run")
    options = write_run(directory)
    summary = write_summary(directory, options)
    write_report(directory, read_run(directory, options), summary)
    return directory


def test_report_loads_nothing_from_anywhere(folder: Path) -> None:
    """A script, font or picture from the net would leave a hole offline."""
    html = layout.report(folder).read_text()
    assert not re.search(r"https?:|@import|<script|<link|url\(", html)
    sources = re.findall(r'(?:src|href)="([^"]*)"', html)
    assert sources
    assert all(source.startswith("data:image/png;base64,") for source in sources)


def test_pictures_are_whole_inside_and_beside_the_report(folder: Path) -> None:
    html = layout.report(folder).read_text()
    inside = [base64.b64decode(data) for data in re.findall(r'src="data:image/png;base64,([^"]*)"', html)]
    beside = [path.read_bytes() for path in folder.glob("*.png")]
    assert {"loss.png", "scale.png", "logit.png", "accuracy.png"} <= {path.name for path in folder.glob("*.png")}
    assert sorted(inside) == sorted(beside)
    for data in beside:
        assert data.startswith(PNG)
        assert data.rstrip().endswith(b"IEND\xaeB`\x82")


def test_report_holds_every_recipe_verdict_and_advice(folder: Path) -> None:
    html = layout.report(folder).read_text()
    for text in (
        "died at step 50",
        "finite to the end",
        "passed 65504 at step 33",
        "Lower the learning rate, to 0.003.",
    ):
        assert text in html
    for name in ("stock", "sdpa", "allfinite", "advised"):
        assert re.search(rf"<h3>{name}\s", html)


def test_report_escapes_what_comes_from_the_machine(folder: Path) -> None:
    """A processor's name such as `<b>` must not become markup."""
    options = read_run(folder, write_run(folder))
    summary = write_summary(folder, write_run(folder))
    summary["environment"]["processor"] = "<b>fast</b>"
    write_report(folder, options, summary)
    assert "&lt;b&gt;fast" in layout.report(folder).read_text()


@pytest.mark.parametrize("steps", [0, 1])
def test_report_of_a_run_that_has_hardly_begun(tmp_path: Path, steps: int) -> None:
    """No step, or one: no picture may fail for want of points."""
    options = write_run(tmp_path)
    for name in options.recipes:
        log = layout.log(tmp_path, name)
        log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[: 1 + steps]))
    summary = write_summary(tmp_path, options)
    assert write_report(tmp_path, read_run(tmp_path, options), summary).stat().st_size > 10_000

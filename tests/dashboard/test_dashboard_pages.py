"""The dashboard's pages in a real Chromium: every page of a job that runs, live, and without another host.

PACELINE_SCREENSHOTS=docs/dashboard keeps the pictures that docs/dashboard.md shows.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.browsers import Watched, chromium, needs_chromium
from support.dashboards import TOKEN, Server, dashboard, make_run, start_event, step_event, write_events
from support.jobs import start, wait_for

pytestmark = [pytest.mark.integration, needs_chromium]
browser = chromium
DOCS = Path(__file__).parents[2] / "docs" / "dashboard"
PAGES = {
    "overview": "/run/train", "time": "/run/train/time", "timeline": "/run/train/timeline?first=2&last=3",
    "plan": "/run/train/plan", "memory": "/run/train/memory", "events": "/run/train/events",
    "output": "/run/train/output", "why": "/run/train/why", "runs": "/", "compare": "/compare?run=train&run=baseline",
}  # fmt: skip
TRAIN = """
import os, time, torch, paceline

def model():
    return torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))

def samples():
    inputs = torch.randn(640, 64, generator=torch.Generator().manual_seed(1))
    return torch.utils.data.TensorDataset(inputs, inputs[:, :8].argmax(1))

def loss(model, batch):
    inputs, labels = batch
    return torch.nn.functional.cross_entropy(model(inputs), labels, reduction="sum"), len(labels)

workload = paceline.Workload(
    model=model, data=samples, loss=loss, batch_size=64, epochs=1000,
    optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
)

if __name__ == "__main__":
    job = paceline.distribute(workload)
    for batch in job.batches():
        if job.rank == 2:
            time.sleep(0.03)
        job.step(batch)
        time.sleep(0.02)
        job.log(lr=1e-3 / job.step_number)
        if job.step_number % 20 == 0:
            print(f"step {job.step_number} of rank {job.rank}")
            job.evaluate(samples)
        if job.rank == 0 and job.step_number == 5:
            job.log_text("sample", "<b>to be</b> or not to be")
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    """The dashboard of a job of four ranks that trains, and of a run that has ended."""
    folder = tmp_path_factory.mktemp("dashboard")
    if "PACELINE_SCREENSHOTS" in os.environ:  # pictures show paths
        folder = Path(tempfile.gettempdir()) / "example"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    (folder / "train.py").write_text(TRAIN)
    make_run(folder / "runs", "baseline", steps=60)
    job = start(folder, "run", "-n", "4", "--plan", "replicate=2,tensor=2", "--job", "train", "train.py")
    events = folder / "runs" / "train" / "events.jsonl"
    try:
        assert wait_for(lambda: events.exists() and b'"step": 25,' in events.read_bytes(), 120), job.poll()
        predicted = start(folder, "profile", "--job", "train", "train.py")
        assert "kept in" in predicted.communicate(timeout=120)[1]
        with dashboard(folder / "runs") as served:
            yield served
    finally:
        job.send_signal(signal.SIGINT)
        job.communicate(timeout=60)


@pytest.fixture
def opened(browser, server) -> Iterator[Watched]:
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    watched = Watched(context, server)
    yield watched
    context.close()
    assert watched.faults == []


def picture(watched: Watched, name: str, folder: Path) -> None:
    """Take a picture of a page, which must show more than one colour, and keep it where somebody asks for that."""
    path = Path(os.environ.get("PACELINE_SCREENSHOTS", folder)) / f"{name}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    watched.page.screenshot(path=path, full_page=name not in ("runs", "events", "output", "plan"))
    assert path.stat().st_size > 10_000


@pytest.mark.parametrize("name", PAGES)
def test_every_page_opens_without_a_fault(opened, name, tmp_path):
    opened.open(PAGES[name])
    wanted = {
        "overview": "Checkpoints", "time": "rank 2 is waited for", "timeline": "Perfetto",
        "plan": "its output stays split",
        "memory": "tensors at the peak", "events": "evaluation", "output": "of rank 3", "why": "rank 2 is waited for",
        "runs": "baseline", "compare": "plan: mesh",
    }  # fmt: skip

    def is_shown():
        if name == "why":
            opened.page.click("#ask-button")
            opened.page.wait_for_selector("#answer")
        return wanted[name] in opened.page.inner_text("main")

    assert wait_for(is_shown, 60)  # beside other programs another rank may be the slow one for some steps
    picture(opened, name, tmp_path)
    assert DOCS.joinpath(f"{name}.png").exists(), "docs/dashboard.md shows each page"
    charts = opened.page.locator(".js-plotly-plot").count()
    assert charts >= {"overview": 6, "compare": 4, "time": 1, "timeline": 1, "memory": 1}.get(name, 0)


@pytest.mark.parametrize("name", PAGES)
def test_dark_on_a_small_screen(browser, server, name, tmp_path):
    context = browser.new_context(viewport={"width": 360, "height": 740}, color_scheme="dark")
    watched = Watched(context, server)
    watched.open(PAGES[name])
    assert watched.page.evaluate("document.documentElement.scrollWidth") <= 360, "it must not scroll sideways"
    assert watched.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(17, 24, 31)"
    if name == "time":
        picture(watched, f"{name}-dark", tmp_path)
    context.close()
    assert watched.faults == []


def test_a_page_follows_a_job_that_trains(opened):
    opened.open("/run/train")
    before = opened.page.inner_text("#head")
    chart = "document.querySelector('.chart').data.at(-1).x.at(-1)"
    step = opened.page.evaluate(chart)
    assert wait_for(lambda: opened.page.inner_text("#head") != before, 20)
    assert wait_for(lambda: opened.page.evaluate(chart) > step, 20)
    assert "<b>to be</b>" in opened.page.inner_text("#rest")


def test_all_of_it_is_reached_by_the_keyboard(opened):
    page = opened.page
    opened.open("/")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("/")
    page.keyboard.type("train")
    page.keyboard.press("Enter")
    page.wait_for_url("**/?q=train*")
    assert page.locator("tbody tr").count() >= 1
    page.locator("tbody th a", has_text="train").first.focus()
    time.sleep(4.5)  # the table is refreshed meanwhile
    assert page.evaluate("document.activeElement.innerText") == "train"
    page.keyboard.press("Enter")
    page.wait_for_url("**/run/train")
    page.keyboard.press("2")
    page.wait_for_url("**/run/train/time")
    page.keyboard.press("1")
    page.wait_for_url("**/run/train")
    page.wait_for_selector("[data-curves][data-is-drawn=all]")
    page.locator("summary").first.focus()
    page.keyboard.press("Enter")
    numbers = page.locator("details[open] table tr")
    assert wait_for(lambda: numbers.count() > 10), "a chart's numbers can be read"


def test_chosen_runs_stay_chosen_while_the_list_is_refreshed(opened):
    opened.open("/")
    for name in ("train", "baseline"):
        opened.page.check(f"input[value={name}]")
    time.sleep(4.5)
    opened.page.click("#compare-button")
    opened.page.wait_for_url("**/compare?**")
    assert opened.page.inner_text("thead").split() == ["train", "baseline"]


def test_the_colours_that_were_chosen_are_kept(opened):
    opened.open("/run/train/time")
    opened.page.select_option("#theme", "dark")
    opened.open("/")
    assert opened.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(17, 24, 31)"


def test_a_wrong_token_shows_a_page_with_a_way_in(browser, server):
    context = browser.new_context()
    page = context.new_page()
    page.goto(f"{server.address}/?token=not-this-one")
    assert "not the token" in page.inner_text("main")
    page.fill("input", TOKEN)
    page.click("button")
    page.wait_for_selector("#runs")
    assert page.url == f"{server.address}/"
    context.close()


def test_names_are_text_in_charts_too(browser, tmp_path):
    evil = "<img src=x onerror=document.title='owned'>"
    for name in (evil, "other"):
        folder = make_run(tmp_path / "runs", name)
        with (folder / "events.jsonl").open("a") as file:
            file.write(json.dumps({"event": "logged", "at": 1.0, "step": 3, evil: 1.0}) + "\n")
    with dashboard(tmp_path / "runs") as served:
        context = browser.new_context()
        watched = Watched(context, served)
        watched.open("/compare?run=other&run=%3Cimg%20src%3Dx%20onerror%3Ddocument.title%3D%27owned%27%3E")
        assert watched.page.locator(".legendtext", has_text="<img src=x").count() > 0
        watched.open("/run/other")
        assert evil in watched.page.inner_text("[data-curves]")
        assert watched.page.locator("main img").count() == 0
        assert watched.page.title() != "owned"
        context.close()
    assert watched.faults == []


def test_what_was_opened_stays_open_and_output_begins_at_its_end(browser, tmp_path):
    folder = make_run(tmp_path / "runs", "a", status="failed")
    (folder / "failures").mkdir()
    for rank in (0, 1):
        failure = {
            "rank": rank, "step": 3, "at": 1.0 + rank, "type": "ValueError", "message": "cold", "is_peer_loss": False,
            "is_paceline": False, "where": None, "exit_code": 1, "traceback": "lines",
        }  # fmt: skip
        (folder / f"failures/{rank}.json").write_text(json.dumps(failure))
    (folder / "output.log").write_text("".join(f"1.0 0\tline {number}\n" for number in range(400)))
    with dashboard(tmp_path / "runs") as served:
        context = browser.new_context()
        watched = Watched(context, served)
        watched.open("/run/a")
        watched.page.click("#rest details:nth-of-type(1) summary")
        watched.page.click("#rest details:nth-of-type(2) summary")
        opened = "[...document.querySelectorAll('#rest details')].map((each) => each.open)"
        assert watched.page.evaluate(opened) == [False, True]
        with (folder / "events.jsonl").open("a") as file:
            file.write(json.dumps({"event": "stopped", "at": 1.0, "step": 3}) + "\n")
        assert wait_for(lambda: "stopped" in watched.page.inner_text("#rest"), 20)
        assert watched.page.evaluate(opened) == [False, True]
        many = {f"n{number}": 1.0 for number in range(250)}
        with (folder / "events.jsonl").open("a") as file:
            file.write(json.dumps({"event": "logged", "at": 1.0, "step": 3, **many}) + "\n")
        assert wait_for(lambda: "more names than have a chart" in watched.page.inner_text("main"), 30)
        watched.page.goto(f"{served.address}/run/a/output")
        place = "document.querySelector('pre').scrollTop + document.querySelector('pre').clientHeight"
        assert wait_for(lambda: watched.page.evaluate(f"{place} > document.querySelector('pre').scrollHeight - 5"))
        context.close()
    assert watched.faults == []


@pytest.fixture
def charts(browser, tmp_path) -> Iterator[Watched]:
    """The overview of a run with constants, and with losses of which some have no logarithm."""
    folder = make_run(tmp_path / "runs", "a")
    steps = [step_event(number, loss=[4.0, 0.5, 0.0, -1.0][number % 4], seconds=0.25) for number in range(1, 21)]
    own = [{"event": "logged", "at": 1.0, "step": number, "lr": 0.001, "zero": 0} for number in range(1, 21)]
    write_events(folder / "events.jsonl", [start_event(20), *steps, *own])
    with dashboard(tmp_path / "runs") as served:
        context = browser.new_context()
        watched = Watched(context, served)
        watched.open("/run/a")
        yield watched
        context.close()
    assert watched.faults == []


def axis_of(watched: Watched, name: str) -> dict:
    axis = f"document.querySelector('figure[data-name=\"{name}\"] .chart')._fullLayout.yaxis"
    return watched.page.evaluate(f"({{type: {axis}.type, range: {axis}.range}})")


def test_a_constant_stands_in_the_middle_of_its_axis(charts):
    assert axis_of(charts, "lr")["range"] == [pytest.approx(0.0005), pytest.approx(0.0015)]
    assert axis_of(charts, "seconds of a step")["range"] == [0, pytest.approx(0.375)]
    assert axis_of(charts, "zero")["range"] == [-1, 1]
    low, high = axis_of(charts, "loss")["range"]
    assert low < -1 < 4 < high


def test_dashboard_logarithmic_axis_counts_points_not_shown(charts):
    page = charts.page
    figure = page.locator("figure[data-name=loss]")
    figure.get_by_label("loss on a logarithmic axis").check()
    assert wait_for(lambda: axis_of(charts, "loss")["type"] == "log")
    assert "10 points are 0 or less and not shown" in figure.locator("figcaption").inner_text()
    time.sleep(4.5)  # the page has been refreshed meanwhile
    assert axis_of(charts, "loss")["type"] == "log"
    assert axis_of(charts, "lr")["type"] == "linear"
    figure.get_by_label("loss on a logarithmic axis").uncheck()
    assert wait_for(lambda: axis_of(charts, "loss")["type"] == "linear")
    assert figure.locator("figcaption span").inner_text() == "loss"
    assert page.get_by_label("zero on a logarithmic axis").is_disabled(), "none of its values has a logarithm"


def test_on_a_phone_the_list_is_not_cut(browser, tmp_path):
    make_run(tmp_path / "runs", "a-name-that-is-as-long-as-names-of-files-with-a-time-are-20261129-121314")
    make_run(tmp_path / "runs", "b", plan="replicate=2,tensor=2,compression=bf16", status="failed")
    with dashboard(tmp_path / "runs") as served:
        context = browser.new_context(viewport={"width": 390, "height": 844})
        watched = Watched(context, served)
        watched.open("/")
        cells = "[...document.querySelectorAll('tbody th, tbody td')].map((each) => each.getBoundingClientRect().right)"
        ends = watched.page.evaluate(cells)
        assert len(ends) == 18
        assert max(ends) <= 390
        text = watched.page.inner_text("tbody")
        assert "compression=bf16" in text
        assert watched.page.locator("thead a").count() == 5, "it can still be sorted"
        context.close()
    assert watched.faults == []

"""The dashboard's server: who gets in, what pages say, and what bad files and addresses do."""

from __future__ import annotations

import html
import json
import math
import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from starlette.requests import Request

from paceline.cli.main import main
from paceline.dashboard import charts
from paceline.dashboard.access import Access, token_of
from paceline.dashboard.app import Dashboard
from paceline.dashboard.charts import curves_of
from paceline.dashboard.run_facts import _AXIS_MEANING, end_of, history
from paceline.dashboard.run_list import RunList, chosen
from paceline.nouns.errors import UsageError
from paceline.run.read.runs import read_run

from support.dashboards import TOKEN, dashboard, make_run, start_event, step_event, write_events
from support.jobs import write_workload

PAGES = ("", "/time", "/timeline", "/plan", "/memory", "/events", "/output", "/why", "/data/curves", "/trace.json")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A dashboard of good and bad runs."""
    runs = tmp_path_factory.mktemp("dashboard") / "runs"
    make_run(runs, "good")
    make_run(runs, "mesh", plan="replicate=2,tensor=2")
    make_run(runs, "<img src=x onerror=alert(1)>", status="<i>odd")
    make_run(runs, "a b%2F?#&+é")
    for name in ("torn", "empty", "folders"):
        make_run(runs, name)
    (runs / "torn" / "plan.json").write_text('{"mesh": ')
    (runs / "torn" / "result.json").write_text("[]")
    with (runs / "torn" / "events.jsonl").open("a") as file:
        file.write('{"event": "step", "st')
    for name in ("plan.json", "events.jsonl", "result.json"):
        (runs / "empty" / name).write_text("")
        (runs / "folders" / name).unlink()
        (runs / "folders" / name).mkdir()
    (runs / "no-run").mkdir()
    (runs.parent / "outside").mkdir()
    (runs.parent / "outside" / "job.json").write_text("{}")
    (runs.parent / "secret.png").write_text("secret")
    older = make_run(runs, "older")
    first = start_event(2)
    del first["version"]
    write_events(older / "events.jsonl", [first, step_event(1), {"event": "of_later", "at": 1.0, "x": "<b>bold</b>"}])
    with dashboard(runs) as served:
        yield served


@pytest.mark.parametrize(
    "path", ["/", "/compare?run=good", "/run/good/data/curves", "/run/good/trace.json", "/nowhere"]
)
@pytest.mark.parametrize(
    ("headers", "query"),
    [
        ({}, ""),
        ({"Authorization": "Bearer wrong-token-wrong"}, ""),
        ({"Authorization": f"Basic {TOKEN}"}, ""),
        ({"Cookie": "paceline_dashboard_1=" + TOKEN}, ""),
        ({"Cookie": "paceline_dashboard={}"}, ""),
        ({}, "token=wrong-token-wrong"),
        ({}, "token="),
        ({}, "token=" + TOKEN[:-1]),
        ({}, "token=%F0%9F%92%A9"),
    ],
)
def test_without_the_token_there_is_nothing(server, path, headers, query):
    answer = server.ask(path + ("&" if "?" in path else "?") * bool(query) + query, token=None, **headers)
    assert answer.status == 401
    assert "good" not in answer.text
    assert TOKEN not in answer.text
    assert ("not the token" in answer.text) == bool(query)


def test_the_token_becomes_a_cookie_and_leaves_the_address(server):
    answer = server.ask(f"/run/good/events?kind=start&token={TOKEN}", token=None)
    assert (answer.status, answer.headers["location"]) == (303, "/run/good/events?kind=start")
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=lax" in cookie
    assert server.ask("/", token=None, Cookie=cookie.partition(";")[0]).status == 200


@pytest.mark.parametrize("path", ["//evil.example/x", "///evil.example", "/%2f/evil.example"])
def test_the_token_sends_nobody_to_another_host(server, path):
    answer = server.ask(f"{path}?token={TOKEN}", token=None)
    assert answer.status == 303
    assert not answer.headers["location"].startswith(("//", "http"))


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:80",
        "127.0.0.1.evil.example",
        "",
        "[::2]",
        "localhost:/login?",
        "localhost:/static/x",
    ],
)
def test_names_of_other_hosts_are_refused(server, host):
    assert server.ask("/", Host=host).status == 421


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST", "127.0.0.1", "[::1]"])
def test_names_of_this_host_are_not(server, host):
    assert server.ask("/", Host=f"{host}:{server.port}").status == 200


@pytest.mark.parametrize("origin", [None, "http://evil.example", "null", "https://127.0.0.1:1"])
def test_pages_of_others_ask_no_rank(server, origin):
    cookie = f"paceline_dashboard_{server.port}={TOKEN}"
    headers = {"Cookie": cookie} | ({} if origin is None else {"Origin": origin})
    assert server.ask("/run/good/why", "POST", token=None, **headers).status == 403
    own = {"Cookie": cookie, "Origin": server.address}
    assert server.ask("/run/good/why", "POST", token=None, **own).status == 200


def test_browsers_are_told_what_to_refuse(server):
    for path in ("/", "/static/dashboard.js", "/nowhere"):
        headers = server.ask(path).headers
        assert "script-src 'self';" in headers["content-security-policy"], path
        assert headers["x-content-type-options"] == "nosniff"
    assert server.ask("/").headers["cache-control"] == "no-store"


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("name", ["good", "mesh", "torn", "empty", "folders", "older", "a%20b%252F%3F%23%26%2B%C3%A9"])
def test_every_page_of_every_run_can_be_opened(server, name, page):
    answer = server.ask(f"/run/{name}{page}")
    assert answer.status == 200, answer.text
    if page == "/why":
        assert server.ask(f"/run/{name}{page}", "POST").status == 200


@pytest.mark.parametrize("page", PAGES[:8])
def test_html_in_names_is_text(server, page):
    text = server.ask("/run/%3Cimg%20src%3Dx%20onerror%3Dalert(1)%3E" + page).text
    assert "&lt;img src=x" in text
    assert "<img src=x" not in text
    text += server.ask("/run/older" + page).text + server.ask("/").text
    text += server.ask("/compare?run=good&run=%3Cimg%20src%3Dx%20onerror%3Dalert(1)%3E").text
    assert not [bad for bad in ("<img src=x", "<b>bold", "<i>odd") if bad in text]


@pytest.mark.parametrize(
    "path",
    [
        "/run/none", "/run/no-run", "/run/..", "/run/%2e%2e", "/run/..%2Foutside", "/run/" + "x" * 5000, "/run/%00",
        "/run/good/none", "/static/none", "/static/..%2Fapp.py", "/run/good/picture?path=..%2F..%2Fsecret.png",
        "/run/good/picture?path=events.jsonl", "/run/good/picture", "/none",
    ],
)  # fmt: skip
def test_what_is_not_there_is_not_found(server, path):
    answer = server.ask(path)
    assert answer.status == 404
    assert "secret" not in answer.text.replace("secret.png", "")


@pytest.mark.parametrize(
    "query", ["page=-1", "page=x", "page=99999999999999999999", "kind=none", "kind=%00", "first=x", "first=0&last=-4"]
)
def test_odd_queries_show_something(server, query):
    for page in ("/events", "/timeline", "/data/curves", "/data/spans", ""):
        assert server.ask(f"/run/good{page}?{query}").status == 200
    assert server.ask(f"/?{query}&sort=none&status=none").status == 200


def test_the_list_finds_sorts_and_says_what_a_run_is(server):
    text = server.ask("/?q=good").text
    assert "1 of " in text
    assert "/run/good" in text
    assert "/run/older" not in text
    by_name = server.ask("/?sort=job").text
    assert by_name.index('href="/run/good"') < by_name.index('href="/run/torn"')
    falling = server.ask("/?sort=-job").text
    assert falling.index('href="/run/good"') > falling.index('href="/run/torn"')
    assert "No run matches" in server.ask("/?q=zzz").text


def test_how_ranks_failed_is_told_the_first_cause_first(tmp_path):
    folder = make_run(tmp_path / "runs", "a", status="failed")
    (folder / "failures").mkdir()
    usual = {"step": 7, "is_paceline": False, "where": None, "exit_code": 1, "traceback": ""}
    loss = {**usual, "rank": 0, "at": 1.0, "type": "CollectiveError", "message": "gone", "is_peer_loss": True}
    cause = {**usual, "rank": 1, "at": 2.0, "type": "ValueError", "message": "<b>cold", "is_peer_loss": False}
    (folder / "failures/0.json").write_text(json.dumps(loss))
    (folder / "failures/1.json").write_text(json.dumps({**cause, "traceback": 'File "train.py", line 3'}))
    (folder / "failures/2.json").write_text("{")
    with dashboard(tmp_path / "runs") as served:
        text = served.ask("/run/a").text
    assert text.index("rank 1, step 7: ValueError") < text.index("rank 0, step 7: CollectiveError")
    assert "&lt;b&gt;cold" in text
    assert "line 3" in text
    assert "rank 2 failed, and what it wrote" in text


def test_two_runs_are_compared(server):
    text = server.ask("/compare?run=good&run=mesh&run=none&run=good").text
    assert text.count('<th scope="col">') == 2
    assert "plan: mesh" in text
    data = server.ask("/data/compare?run=good&run=mesh").json()
    loss = next(chart for chart in data["charts"] if chart["name"] == "loss")
    assert [curve["run"] for curve in loss["runs"]] == ["good", "mesh"]
    assert "Choose two or more" in server.ask("/compare").text


def test_what_has_not_changed_is_not_sent_again(server):
    first = server.ask("/run/good/events")
    assert server.ask("/run/good/events", If_None_Match=first.headers["etag"]).status == 304


def test_a_run_that_is_written_is_seen(server, tmp_path_factory):
    assert server.ask("/run/good/data/curves").json()["curves"][0]["step"][-1] == 20
    runs = next(path for path in tmp_path_factory.getbasetemp().glob("dashboard*/runs"))
    with (runs / "good" / "events.jsonl").open("a") as file:
        file.write(json.dumps(step_event(21)) + "\n")
    assert server.ask("/run/good/data/curves").json()["curves"][0]["step"][-1] == 21


def test_bad_requests_get_one_clear_error(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    (tmp_path / "runs").mkdir()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for words, found in (
            (["none"], "no such folder"),
            (["file"], "it is a file"),
            (["--port", "-1"], "ports go from 0 to 65535"),
            (["--port", "70000"], "ports go from 0 to 65535"),
            (["--port", port], "another program listens there"),
            (["--host", "198.51.100.7"], "no such address"),
            (["--host", "no host"], "no such address"),
        ):
            assert main(["dashboard", *words]) == 2, words
            assert found in capsys.readouterr().err, words


@pytest.mark.parametrize("token", ["", "short", "with space in the middle", "\u00e9" * 20, "a" * 15])
def test_a_weak_token_is_refused(token):
    with pytest.raises(UsageError, match="token"):
        token_of({"PACELINE_DASHBOARD_TOKEN": token})


def test_tokens_are_made_anew():
    assert token_of({}) != token_of({})
    assert len(token_of({})) >= 32


def test_a_token_of_other_characters_is_wrong_and_no_error():
    assert not Access("right" * 5, 1).is_right("falsch\u00e9\udce9".encode("utf-8", "replace").decode())


def test_a_run_directory_leads_to_its_run(tmp_path):
    make_run(tmp_path / "runs", "one&two")
    with dashboard(tmp_path / "runs" / "one&two") as server:
        assert server.ask("/run/one%26two").status == 200


def test_the_next_free_port_is_taken_where_none_is_asked_for(tmp_path):
    from paceline.dashboard import serve

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(serve, "PORT", taken.getsockname()[1])
            with serve._listener("127.0.0.1", None) as listener:
                assert listener.getsockname()[1] != taken.getsockname()[1]


def test_it_listens_on_this_machine_alone_unless_asked(server):
    import psutil

    (listening,) = [each for each in psutil.Process(server.process.pid).net_connections() if each.status == "LISTEN"]
    assert listening.laddr.ip == "127.0.0.1"
    (child,) = [" ".join(psutil.Process(server.process.pid).cmdline())]
    assert TOKEN not in child


def test_without_the_extra_it_says_what_to_install(tmp_path):
    (tmp_path / "runs").mkdir()
    code = (
        "import sys; sys.modules['starlette'] = None; from paceline.cli.main import main; sys.exit(main(['dashboard']))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, env=os.environ)
    assert (done.returncode, done.stdout) == (2, "")
    assert "pip install 'paceline[dashboard]'" in done.stderr


def test_dashboard_partial_curves_are_never_called_complete(tmp_path, monkeypatch):
    folder = make_run(tmp_path / "runs", "a")
    pages = Dashboard(tmp_path / "runs")
    index = pages._index(folder)
    read_on = index.read_on
    index.follower.size = folder.joinpath("events.jsonl").stat().st_size
    monkeypatch.setattr(index, "read_on", lambda seconds: index)
    monkeypatch.setattr(charts, "curves_of", lambda *wanted: [curves_of(*wanted), read_on(1.0)][0])
    scope = {
        "type": "http",
        "method": "GET",
        "path": "/",
        "query_string": b"",
        "headers": [],
        "path_params": {"job": "a"},
    }
    assert json.loads(pages.curves(Request(scope)).body)["is_complete"] is False
    assert json.loads(pages.curves(Request(scope)).body)["is_complete"] is True


@pytest.mark.parametrize("host", ["localhost:/login?", "localhost:/static/x"])
def test_a_path_in_the_name_of_the_host_needs_the_token_too(host):
    """Starlette before 1.0.1 took the path of an address from it."""
    headers = [(b"host", host.encode())]
    scope = {"type": "http", "method": "GET", "path": "/run/a", "query_string": b"", "headers": headers}
    for hosts in (("localhost",), ()):
        assert Access("right" * 5, 1, hosts).refusal(Request(scope)).status_code in (401, 421)


def test_pictures_are_shown(tmp_path):
    folder = make_run(tmp_path / "runs", "a")
    (folder / "x.png").write_bytes(b"a picture")
    with (folder / "events.jsonl").open("a") as file:
        file.write(json.dumps({"event": "picture", "at": 1.0, "step": 3, "name": "n", "path": "x.png"}) + "\n")
    with dashboard(tmp_path / "runs") as served:
        assert "/run/a/picture?path=x.png" in served.ask("/run/a").text
        assert served.ask("/run/a/picture?path=x.png").status == 200


def test_fields_that_are_missing_end_no_page(tmp_path):
    folder = make_run(tmp_path / "runs", "a")
    job = json.loads((folder / "job.json").read_text())
    (folder / "job.json").write_text(json.dumps({**job, "arguments": 5}))
    odd = os.fsencode(tmp_path / "runs") + b"/bad\xff"
    os.mkdir(odd)
    with open(odd + b"/job.json", "w") as file:
        file.write("{}")
    kinds = ("checkpoint", "text", "picture", "logged", "stopped", "resumed", "checkpoint_failed", "later")
    events = [{"event": kind, "at": 1.0, "path": "x"} for kind in kinds]
    events += [{"event": kind} for kind in ("text", "picture", "later", "checkpoint")]
    events += [{"event": "end", "at": 1.0, "step": 2, "ledger": [{"x": 1}, 3]}]
    with (folder / "events.jsonl").open("a") as file:
        file.write("".join(json.dumps(event) + "\n" for event in events))
    with dashboard(tmp_path / "runs") as served:
        for page in ("/", "/compare?run=a", *(f"/run/a{page}" for page in PAGES)):
            assert served.ask(page).status == 200, page
        assert served.ask("/run/a/picture?path=%00").status == 404


def test_the_output_has_what_comes_after_a_carriage_return(tmp_path):
    folder = make_run(tmp_path / "runs", "a")
    (folder / "output.log").write_bytes(b"1.0 0\t\r1/9\r2/9 \x1b[32mdone\x1b[0m\r\n")
    with dashboard(tmp_path / "runs") as served:
        text = served.ask("/run/a/output").text
    assert "<b>[0]</b> 2/9 done\n" in text
    assert "1/9" not in text


def test_an_address_of_loopback_that_is_asked_for_can_be_opened(tmp_path):
    make_run(tmp_path / "runs", "a")
    with dashboard(tmp_path / "runs", "--host", "127.0.0.2") as served:
        assert served.address.startswith("http://127.0.0.2:")
        assert served.ask("/run/a").status == 200
        assert served.ask("/run/a", Host="evil.example").status == 421


def test_runs_without_a_loss_come_last_in_both_orders(tmp_path):
    for number, loss in enumerate((2.0, None, 1.0, math.nan)):
        folder = make_run(tmp_path, f"r{number}", steps=1)
        events = [] if loss is None else [step_event(1, loss=loss)]
        write_events(folder / "events.jsonl", [start_event(1), *events])
    runs = RunList(tmp_path).runs()
    assert [run.name for run in chosen(runs, "", "", "loss")][:2] == ["r2", "r0"]
    assert [run.name for run in chosen(runs, "", "", "-loss")][:2] == ["r0", "r2"]


def test_a_start_without_the_end_of_the_one_before_is_told(tmp_path):
    events = [{**start_event(9), "at": at} for at in (1.0, 5.0, 9.0)] + [{"event": "end", "at": 6.0, "step": 9}]
    folder = make_run(tmp_path, "a", status=None)
    told = history(events, folder, read_run(folder))
    assert [(each.at, each.is_fault) for each in told] == [(9.0, False), (6.0, False), (5.0, True), (1.0, False)]
    assert "wrote no end" in told[2].text


def test_more_runs_than_are_compared_are_told(tmp_path):
    for number in range(10):
        make_run(tmp_path / "runs", f"r{number}", steps=1)
    with dashboard(tmp_path / "runs") as served:
        text = served.ask("/compare?" + "&".join(f"run=r{number}" for number in range(10))).text
    assert "2 more are not shown" in text


def test_axes_are_described_as_in_the_documentation():
    page = (Path(__file__).parents[2] / "docs/plan-options.md").read_text()
    for axis, (has, sent) in _AXIS_MEANING.items():
        assert f"| {has} | {sent} |" in page, axis


FAILURE = {
    "rank": 1, "step": 7, "at": 2.0, "type": "BatchError", "is_peer_loss": False, "is_paceline": True, "where": None,
    "exit_code": 1, "traceback": "lines", "parts": None,
    "message": "a batch should have samples\n  found: it has <none>\n  fix: look at the loader",
}  # fmt: skip


def failed_run(runs: Path, failure=None, status="failed", checkpoint=True) -> str:
    """Return the overview of a run that ended so."""
    folder = make_run(runs, "a b", status=None)
    (folder / "result.json").write_text(json.dumps({"status": status, "failure": failure}))
    if checkpoint:
        (folder / "checkpoints/step-00000005").mkdir(parents=True)
    return page_of(runs, "overview", "a b")


def page_of(runs: Path, page: str, job: str = "") -> str:
    scope = {
        "type": "http", "method": "GET", "path": "/", "query_string": b"", "headers": [], "path_params": {"job": job},
    }  # fmt: skip
    return getattr(Dashboard(runs), page)(Request(scope)).body.decode()


def test_dashboard_failed_run_has_error_and_resume_command_first(tmp_path):
    text = failed_run(tmp_path, FAILURE)
    assert "rank 1, step 7 failed first: BatchError: a batch should have samples: it has &lt;none&gt;" in text
    assert "fix: look at the loader" in text
    assert "goes on from its newest checkpoint, of step 5" in text
    assert text.index("failed first") < text.index("This command goes on") < text.index("speed</dt>")
    command = shlex.split(html.unescape(re.search(r"<pre>(paceline run .*)</pre>", text)[1]))
    plan = str(tmp_path / "a b/plan.json")
    words = ["--plan", plan, "--runs", str(tmp_path), "--job", "a b", "--resume", "/home/ada/train.py", "--lr", "0.1"]
    assert command == ["paceline", "run", *words]


def test_the_command_that_goes_on_is_one_that_paceline_takes(tmp_path, capsys):
    assert "There is no such file on this host" in failed_run(tmp_path / "elsewhere")
    write_workload(tmp_path, name="train.py")
    folder = make_run(tmp_path / "runs", "a", status="failed")
    (folder / "job.json").write_text(json.dumps({"script": str(tmp_path / "train.py"), "arguments": [], "ranks": 2}))
    (folder / "result.json").write_text(json.dumps({"status": "failed"}))
    assert "There is no such file" not in page_of(tmp_path / "runs", "overview", "a")
    command = shlex.split(end_of(read_run(folder)).command)
    assert main([*command[1:2], "--dry-run", *command[2:]]) == 0
    assert "# 2 ranks on this host" in capsys.readouterr().out, "the plan has their number"


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ({"failure": None}, "The ranks had to be killed"),
        ({"failure": {**FAILURE, "rank": None, "step": None}}, "<b>the job failed: BatchError: a batch"),
        ({"failure": {**FAILURE, "type": 5, "message": None}}, "None"),
        ({"failure": FAILURE, "checkpoint": False}, "It has no checkpoint. This command starts it again at step 0"),
        ({"failure": None, "status": "stopped"}, "goes on from its newest checkpoint, of step 5"),
    ],
)
def test_how_a_run_ended_is_true(tmp_path, case, said):
    assert said in failed_run(tmp_path, **case)


@pytest.mark.parametrize("status", ["done", None])
def test_a_run_that_needs_nothing_is_told_no_command(tmp_path, status):
    make_run(tmp_path, "a", status=status)
    assert "--resume" not in page_of(tmp_path, "overview", "a")


@pytest.mark.parametrize(
    ("status", "said"),
    [(None, "No step is written down yet"), ("failed", "It has ended, and no step is written down")],
)
def test_a_run_without_a_step_says_so(tmp_path, status, said):
    folder = make_run(tmp_path, "a", status=status)
    assert "step is written down" not in page_of(tmp_path, "overview", "a")
    write_events(folder / "events.jsonl", [start_event(20)])
    assert said in page_of(tmp_path, "overview", "a")
    assert json.loads(page_of(tmp_path, "curves", "a"))["curves"] == [], "an empty chart says nothing"


def test_without_runs_the_page_says_what_to_do(tmp_path, monkeypatch):
    text = page_of(tmp_path / "no runs", "runs")
    assert f"There is no run in {tmp_path}/no runs: there is no such folder" in text
    assert f"paceline run --runs &#39;{tmp_path}/no runs&#39; train.py" in text
    assert "paceline dashboard DIR" in text
    (tmp_path / "no runs").mkdir()
    assert "there is no such folder" not in page_of(tmp_path / "no runs", "runs")
    make_run(tmp_path / "no runs", "a")
    assert "There is no run" not in page_of(tmp_path / "no runs", "runs")


def test_the_folder_of_runs_need_not_be_there_yet(tmp_path, monkeypatch, capsys):
    served = []
    monkeypatch.setattr("paceline.dashboard.serve.serve", lambda *words: served.append(words[0]))
    monkeypatch.chdir(tmp_path)
    assert main(["dashboard"]) == 0
    assert served == [Path("runs")]
    assert main(["dashboard", "rusn"]) == 2, "a name that somebody has written is a mistake"
    (tmp_path / "runs").write_text("")
    assert main(["dashboard"]) == 2
    assert "it is a file" in capsys.readouterr().err

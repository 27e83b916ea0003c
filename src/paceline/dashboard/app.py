"""The dashboard's pages, and the data of its charts."""

from __future__ import annotations

import hashlib
import json
import math
import re
import shlex
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import jinja2
import numpy as np
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from paceline import __version__
from paceline.dashboard import charts, run_facts, run_list
from paceline.dashboard.access import Access, Guard
from paceline.dashboard.charts import Curve
from paceline.nouns.table import without_colours
from paceline.run import shown
from paceline.run.causes import causes
from paceline.run.job_facts import collect
from paceline.run.prediction import rates, read_predictions
from paceline.run.rank_output import FILE, last_lines
from paceline.run.read import times
from paceline.run.read.event_columns import EventIndex
from paceline.run.read.runs import Run, difference, read_details, read_plan, read_run, speed_of
from paceline.run.timeline import make_trace, write_trace
from paceline.train.memory_file import RankMemory, read_memory

TABS = ("overview", "time", "timeline", "plan", "memory", "events", "output", "why")
_READ_S = 0.15  # the time for which a page's request reads on in the events
_READ_DATA_S = 0.4  # the same for the data of charts, which is asked for again until all is read
_INDEXES = 16  # runs whose events are kept in memory
_POINTS = 500  # the points of a curve
_MOST_POINTS = 5000
_COMPARED = 8  # runs: as many colours can be told apart
_EVENTS = 100  # the events of a page
_LINES = 500  # the lines of output
_LONGEST_SHOWN = 2000  # characters of an event's fields
_HISTORY = 100  # events of each kind that the overview shows
_ERRORS = "backslashreplace"  # JSON can have half of a character, which is no UTF-8
_FOLDER = Path(__file__).parent
_STATIC = {
    "dashboard.css": "text/css",
    "dashboard.js": "text/javascript",
    "plotly.js": "text/javascript",
}


class Dashboard:
    """The pages of the dashboard.

    Args:
        runs: the folder that has the run directories.
    """

    def __init__(self, runs: Path) -> None:
        self.list = run_list.RunList(runs)
        self._indexes: OrderedDict[str, EventIndex] = OrderedDict()
        self._lock = threading.Lock()
        self._templates = jinja2.Environment(
            loader=jinja2.FileSystemLoader(_FOLDER / "templates"), autoescape=True, undefined=jinja2.StrictUndefined
        )
        self._templates.filters.update(
            when=shown.when, steps=shown.steps, number=shown.number, scores=shown.scores, nbytes=shown.nbytes,
            duration=shown.duration, command=_command, ms=_ms, clock=_clock, json=_shown_json, left_out=shown.left_out,
            part=lambda text: quote(text, safe="", errors=_ERRORS),
        )  # fmt: skip
        self._templates.globals.update(version=__version__, tabs=TABS, address=address)

    def app(self, access: Access) -> ASGIApp:
        """Return the server's app.

        Args:
            access: the rules for requests.
        """
        routes = [
            Route("/", self.runs),
            Route("/compare", self.compare),
            Route("/data/compare", self.compare_data),
            Route("/static/{name}", static),
            Route("/run/{job}", self.overview),
            Route("/run/{job}/time", self.time),
            Route("/run/{job}/timeline", self.timeline),
            Route("/run/{job}/plan", self.plan),
            Route("/run/{job}/memory", self.memory),
            Route("/run/{job}/events", self.events),
            Route("/run/{job}/output", self.output),
            Route("/run/{job}/why", self.explain, methods=["GET", "POST"]),
            Route("/run/{job}/trace.json", self.trace),
            Route("/run/{job}/picture", self.picture),
            Route("/run/{job}/data/curves", self.curves),
            Route("/run/{job}/data/spans", self.spans),
        ]
        app = Starlette(routes=routes, exception_handlers={HTTPException: self.failed, Exception: self.failed})
        return Guard(app, access, self.login_page)

    def runs(self, request: Request) -> Response:
        """List the runs."""
        query = request.query_params
        every = self.list.runs()
        text, status, sort = query.get("q", ""), query.get("status", ""), query.get("sort", "-started")
        found = run_list.chosen(every, text, status, sort)
        page = min(_whole_number(query, "page", 1), max(1, math.ceil(len(found) / run_list.PAGE)))
        return self._page(
            request, "runs.html",
            runs=found[(page - 1) * run_list.PAGE : page * run_list.PAGE], found=len(found), every=len(every),
            page=page, pages=max(1, math.ceil(len(found) / run_list.PAGE)), text=text, status=status, sort=sort,
            statuses=sorted({run.status for run in every}), folder=self.list.folder.absolute(),
            sorts=(("job", "job"), ("status", "status"), ("started", "started"), ("step", "steps"), ("loss", "loss")),
            is_folder=self.list.folder.is_dir(),
            command=shlex.join(["paceline", "run", "--runs", str(self.list.folder.absolute()), "train.py"]),
        )  # fmt: skip

    def overview(self, request: Request) -> Response:
        """Show a run: its state, curves, checkpoints, failures and recoveries."""
        run, folder = self._run(request)
        index = self._index(folder).read_on(_READ_S)
        recorded = []
        for kind in run_facts.HISTORY_KINDS:
            recorded += index.events(kind, 0, _HISTORY)
        saved = index.events("checkpoint", 0, _HISTORY)
        return self._page(
            request, "overview.html", run=run, tab="overview", speed=speed_of(folder, run), index=index,
            history=run_facts.history(recorded, folder, run), checkpoints=run_facts.checkpoints(folder, saved),
            written=index.count("checkpoint"), slow=_sentence(run, times.recent_splits(folder, run.ranks)),
            end=run_facts.end_of(run), failures=run_facts.failures(folder), texts=index.events("text", 0, 5),
            pictures=index.events("picture", 0, 12),
        )  # fmt: skip

    def time(self, request: Request) -> Response:
        """Show each rank's time by kind of work, and the mesh."""
        run, folder = self._run(request)
        splits = times.recent_splits(folder, run.ranks)
        mesh = run_facts.mesh_of(folder)
        kinds = [kind for kind in times.KINDS if any(split.by_kind[kind] > 0 for split in splits)]
        axes = sorted(set().union(*(split.by_axis for split in splits)))
        return self._page(
            request, "time.html", run=run, tab="time", splits=splits, kinds=kinds, axes=axes,
            slow=_sentence(run, splits), bars=charts.bars(splits),
            mesh=None if mesh is None else str(mesh), rows=[] if mesh is None else run_facts.rows(mesh, splits),
            ranks=0 if mesh is None else mesh.world_size, most=run_facts.MOST_CELLS,
            rates=rates(read_predictions(folder, run.plan), splits, read_memory(folder, run.ranks)),
        )  # fmt: skip

    def timeline(self, request: Request) -> Response:
        """Show the activities of the ranks in a few steps."""
        run, folder = self._run(request)
        detailed = charts.detailed_steps(folder)
        newest = detailed[-1] if detailed else 1
        first = _whole_number(request.query_params, "first", newest)
        last = min(max(_whole_number(request.query_params, "last", first), first), first + charts.MOST_STEPS - 1)
        before = max((step for step in detailed if step < first), default=None)
        after = min((step for step in detailed if step > last), default=None)
        return self._page(
            request, "timeline.html", run=run, tab="timeline", first=first, last=last, before=before, after=after,
            detailed=detailed, most=charts.MOST_STEPS,
        )  # fmt: skip

    def plan(self, request: Request) -> Response:
        """Show the plan, and its traffic."""
        run, folder = self._run(request)
        axes, settings = run_facts.plan_rows(folder)
        index = self._index(folder).read_on(_READ_S)
        ledger = run_facts.ledger(index.events("end", 0, 1))
        predictions = read_predictions(folder, run.plan)
        return self._page(
            request, "plan.html", run=run, tab="plan", axes=axes, settings=settings, ledger=ledger,
            predicted=run_facts.predicted_traffic(predictions), layout=run_facts.layout(predictions),
        )  # fmt: skip

    def memory(self, request: Request) -> Response:
        """Show each rank's memory by kind."""
        run, folder = self._run(request)
        rows = read_memory(folder, run.ranks)
        kinds = [kind for kind in run_facts.MEMORY_KINDS if any(row.by_kind.get(kind) for row in rows)]
        # Of a CPU's rank the rest is the whole process, beside which the others can't be seen.
        drawn = [kind for kind in kinds if kind != "rest" or all(row.device != "cpu" for row in rows)]
        data = {
            "ranks": [row.rank for row in rows],
            "kinds": [{"name": kind, "mib": _mib_of(kind, rows)} for kind in drawn],
        }
        return self._page(
            request, "memory.html", run=run, tab="memory", rows=rows, kinds=kinds, bars=data,
            predictions=read_predictions(folder, run.plan), predicted_kinds=run_facts.PREDICTED_KINDS,
        )  # fmt: skip

    def events(self, request: Request) -> Response:
        """List the events of a kind, or all but the steps."""
        run, folder = self._run(request)
        index = self._index(folder).read_on(_READ_S)
        kind = request.query_params.get("kind") or None
        count = index.count(kind)
        pages = max(1, math.ceil(count / _EVENTS))
        page = min(_whole_number(request.query_params, "page", 1), pages)
        return self._page(
            request, "events.html", run=run, tab="events", kind=kind, kinds=sorted(index.kinds), count=count,
            events=index.events(kind, (page - 1) * _EVENTS, _EVENTS), page=page, pages=pages, index=index,
        )  # fmt: skip

    def output(self, request: Request) -> Response:
        """Show the last lines that the ranks have printed."""
        run, folder = self._run(request)
        rank = request.query_params.get("rank") or None
        lines = last_lines(folder / FILE, _LINES, rank)
        sources = sorted({line.source for line in last_lines(folder / FILE, 10 * _LINES)}, key=_source_key)
        texts = [(line.at, line.source, _as_on_terminal(line.text)) for line in lines]
        return self._page(
            request, "output.html", run=run, tab="output", lines=texts, rank=rank, sources=sources, most=_LINES
        )

    def explain(self, request: Request) -> Response:
        """Ask the ranks where they stand, and show why the job stands still or is slow."""
        run, folder = self._run(request)
        facts = collect(folder) if request.method == "POST" else None
        found = [] if facts is None else causes(facts)
        return self._page(request, "why.html", run=run, tab="why", facts=facts, causes=found)

    def trace(self, request: Request) -> Response:
        """Send the whole timeline as a file for Perfetto."""
        run, folder = self._run(request)
        descriptor, path = tempfile.mkstemp(suffix=".json", prefix="paceline-trace-")
        with open(descriptor, "w"):
            write_trace(make_trace(folder), Path(path))
        remove = BackgroundTask(Path(path).unlink, missing_ok=True)
        return FileResponse(path, filename=f"{run.name}-timeline.json", background=remove)

    def picture(self, request: Request) -> Response:
        """Send a picture that the job has logged."""
        _, folder = self._run(request)
        path = (folder / request.query_params.get("path", "").replace("\0", "")).resolve()
        if folder.resolve() not in path.parents or path.suffix != ".png" or not path.is_file():
            raise HTTPException(404, "this run has no such picture")
        return FileResponse(path, media_type="image/png")

    def curves(self, request: Request) -> Response:
        """Send a run's curves, as far as its events have been read."""
        _, folder = self._run(request)
        query = request.query_params
        index = self._index(folder).read_on(_READ_DATA_S if query.get("again") else _READ_S)
        share = index.share  # before the curves are made: another request may read on meanwhile
        points = min(_whole_number(query, "points", _POINTS), _MOST_POINTS)
        found = charts.curves_of(index, points, _float(query, "first"), _float(query, "last"))
        curves = [{"name": name, **_as_json(curve)} for name, curve in found.items()]
        return _json({"curves": curves, "share": share, "is_complete": share >= 1, "is_cut": index.is_cut}, request)

    def spans(self, request: Request) -> Response:
        """Send the activities of the ranks in some steps."""
        _, folder = self._run(request)
        first = _whole_number(request.query_params, "first", 1)
        last = min(_whole_number(request.query_params, "last", first), first + charts.MOST_STEPS - 1)
        return _json(charts.spans(folder, first, last), request)

    def compare(self, request: Request) -> Response:
        """Put runs side by side."""
        folders = self._compared(request)
        runs = [read_run(folder) for folder in folders]
        details = [read_details(folder, self._index(folder).read_on(_READ_S)) for folder in folders]
        differing = difference([read_plan(folder) for folder in folders]) if folders else {}
        return self._page(
            request, "compare.html", runs=runs, rows=shown.compared(list(map(shown.facts_of, runs, details))),
            differing=differing, most=_COMPARED,
            left=len(set(request.query_params.getlist("run"))) - len(runs),
            query=urlencode([("run", run.name) for run in runs]),
        )  # fmt: skip

    def compare_data(self, request: Request) -> Response:
        """Send the curves of several runs, by their names."""
        points = min(_whole_number(request.query_params, "points", _POINTS), _MOST_POINTS)
        found: dict[str, list[dict[str, Any]]] = {}
        shares = []
        for number, folder in enumerate(self._compared(request)):
            index = self._index(folder).read_on(_READ_DATA_S if request.query_params.get("again") else _READ_S)
            shares.append(index.share)
            for name, curve in charts.curves_of(index, points).items():
                found.setdefault(name, []).append({"run": folder.name, "number": number, **_as_json(curve)})
        share = sum(shares) / len(shares) if shares else 1.0
        drawn = [{"name": name, "runs": runs} for name, runs in found.items()]
        return _json({"charts": drawn, "share": share, "is_complete": min(shares, default=1.0) >= 1}, request)

    def login_page(self, was_wrong: bool) -> Response:
        """Return the page for those without the token: its form asks for the list of runs with it.

        Args:
            was_wrong: True where the request had another token.
        """
        return HTMLResponse(self._templates.get_template("login.html").render(was_wrong=was_wrong), 401)

    def failed(self, request: Request, error: Exception) -> Response:
        """Return the page of an error."""
        status = error.status_code if isinstance(error, HTTPException) else 500
        detail = error.detail if isinstance(error, HTTPException) else "the server has failed"
        if status == 404 and detail == "Not Found":
            detail = "there is no such page"
        return HTMLResponse(self._templates.get_template("error.html").render(status=status, text=detail), status)

    def _page(self, request: Request, template: str, **values: Any) -> Response:
        text = self._templates.get_template(template).render(path=request.scope["path"], **values)
        return _unless_known(HTMLResponse(text.encode("utf-8", _ERRORS)), request)

    def _run(self, request: Request) -> tuple[Run, Path]:
        name = request.path_params["job"]
        folder = self.list.folder_of(name)
        if folder is None:
            raise HTTPException(404, f"there is no run {name[:200]!r} in {self.list.folder}")
        return read_run(folder), folder

    def _compared(self, request: Request) -> list[Path]:
        names = list(dict.fromkeys(request.query_params.getlist("run")))
        folders = [folder for name in names if (folder := self.list.folder_of(name)) is not None]
        return folders[:_COMPARED]

    def _index(self, folder: Path) -> EventIndex:
        with self._lock:
            index = self._indexes.pop(folder.name, None) or EventIndex(folder / "events.jsonl")
            self._indexes[folder.name] = index
            if len(self._indexes) > _INDEXES:
                self._indexes.popitem(last=False)
            return index


async def static(request: Request) -> Response:
    """Send a file of the pages' own."""
    name = request.path_params["name"]
    if name not in _STATIC:
        raise HTTPException(404, "there is no such file")
    path = plotly_file() if name == "plotly.js" else _FOLDER / "static" / name
    return FileResponse(path, media_type=_STATIC[name])


def plotly_file() -> Path:
    """Return the file of plotly.js that the plotly package brings."""
    return Path(str(files("plotly") / "package_data" / "plotly.min.js"))


def address(path: str, /, **query: Any) -> str:
    """Return a path with a query, without the empty parts."""
    parameters = [(name, value) for name, value in query.items() if value not in (None, "")]
    return f"{path}?{urlencode(parameters, errors=_ERRORS)}" if parameters else path


def _json(value: Mapping[str, Any], request: Request) -> Response:
    content = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return _unless_known(Response(content, media_type="application/json"), request)


def _unless_known(response: Response, request: Request) -> Response:
    """Return 304 where the page that asks again has this content already."""
    tag = f'"{hashlib.sha256(response.body).hexdigest()[:32]}"'
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers={"ETag": tag})
    response.headers["ETag"] = tag
    return response


def _as_json(curve: Curve) -> dict[str, Any]:
    """Return a curve for programs; null where nothing is finite. Bounds are left out where they are the mean."""
    value: dict[str, Any] = {
        "step": _numbers(curve.step),
        "mean": _numbers(curve.mean),
        "not_finite": curve.not_finite,
    }
    if curve.low is not curve.mean:
        value |= {"low": _numbers(curve.low), "high": _numbers(curve.high)}
    return value


def _numbers(column: np.ndarray[Any, Any]) -> list[float | None]:
    return [float(f"{value:.7g}") if math.isfinite(value) else None for value in column.tolist()]


def _mib_of(kind: str, rows: Sequence[RankMemory]) -> list[float]:
    """Return the memory of a kind on each rank, in MiB."""
    return [row.by_kind.get(kind, 0) / 2**20 for row in rows]


def _sentence(run: Run, splits: list[times.RankSplit]) -> str | None:
    slow = None if run.has_servers else times.slow_rank(splits)
    return None if slow is None else times.sentence(slow)


def _whole_number(query: Mapping[str, str], name: str, default: int) -> int:
    """Return a whole number from 1 in an address."""
    text = query.get(name, "")
    return max(int(text), 1) if re.fullmatch("[0-9]{1,15}", text) else default


def _float(query: Mapping[str, str], name: str) -> float | None:
    text = query.get(name, "")
    return float(text) if re.fullmatch(r"[0-9]{1,15}(\.[0-9]{1,9})?", text) else None


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f}"


def _clock(at: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at)) if at else "-"
    except (OverflowError, ValueError, OSError):
        return "-"


def _shown_json(event: Mapping[str, Any]) -> str:
    text = json.dumps({name: value for name, value in event.items() if name not in ("event", "at", "step")})
    more = len(text) - _LONGEST_SHOWN
    return text if more <= 0 else f"{text[:_LONGEST_SHOWN]} ... and {more} more characters"


def _as_on_terminal(text: str) -> str:
    """Return the end state of a line on a terminal: a progress bar writes over itself."""
    return without_colours(text.rstrip("\r").rpartition("\r")[2])


def _command(script: Sequence[str]) -> str:
    """Return a run's file without its folder, and its arguments."""
    return " ".join((Path(script[0]).name, *script[1:])) if script else "-"


def _source_key(source: str) -> tuple[bool, int, str]:
    return (not source.isdecimal(), int(source) if source.isdecimal() else 0, source)

"""The forecasting example: files are read or refused, paths are sampled, and any ranks end where one does."""

from __future__ import annotations

import importlib
import json
import lzma
import os
import re
import runpy
import shutil
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from paceline.nouns.errors import DataError, PacelineError, UsageError
from paceline.nouns.plan import Plan

from support.jobs import paceline
from support.ranks import run_ranks

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "forecast"
SHARED = ROOT.parent / "shared" / "data" / "forecast"
FILES = ("series", "windows", "deepar", "scores", "baselines", "picture")
needs_data = pytest.mark.skipif(not SHARED.is_dir(), reason="the original files are not here")


def load() -> dict[str, ModuleType]:
    """The example's files. Other examples have files of the same names, so they leave `sys.modules`."""
    before = {name: sys.modules.pop(name) for name in FILES if name in sys.modules}
    sys.path.insert(0, str(EXAMPLE))
    try:
        return {name: importlib.import_module(name) for name in FILES}
    finally:
        sys.path.remove(str(EXAMPLE))
        for name in FILES:
            sys.modules.pop(name, None)
        sys.modules.update(before)


FORECAST = load()
series, windows, deepar, scores, baselines = (FORECAST[name] for name in FILES[:5])
SMALL = replace(series.TASKS["generated"], horizon=6, context=10, lags=(1, 2, 24))
TINY = ["--steps", "4", "--batch-size", "8", "--hidden", "8", "--context", "10", "--horizon", "6"]
TINY += ["--paths", "5", "--windows", "7", "--precision", "float64"]


def small_panel(likelihood: str = "gaussian", **parts):
    task = replace(SMALL, likelihood=likelihood, **parts)
    return series.generate(task, 0, likelihood == "negative-binomial", series=5, days=9)


# Files


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_bytes(lzma.compress(text.encode()) if name.endswith(".xz") else text.encode())
    return path


def ett(rows: int = 14_400, **cells: str) -> str:
    """A made-up ETTh1.csv; `L7="..."` replaces line 7."""
    lines = ["date,HUFL,OT"]
    for hour in range(rows):
        day, month = hour // 24 % 28 + 1, hour // 24 // 28
        lines.append(f"20{16 + month // 12}-{month % 12 + 1:02d}-{day:02d} {hour % 24:02d}:00:00,1.5,{hour % 24}.25")
    for line, text in cells.items():
        lines[int(line[1:]) - 1] = text
    return "\n".join(lines) + "\n"


def m4(rows: list[list[object]], width: int) -> str:
    header = [f"V{at}" for at in range(1, width + 1)]
    return "\n".join(",".join(f'"{cell}"' for cell in [*row, *[""] * (width - len(row))]) for row in [header, *rows])


WEEKS = [*range(1, 61)]


def carparts(*rows: str) -> str:
    return "Part," + ",".join(f"M{month}" for month in range(51)) + "\n" + "\n".join(rows) + "\n"


@pytest.mark.parametrize("name", ["ETTh1.csv", "ETTh1.csv.xz"])
def test_ett_is_split_as_informers_authors_did(tmp_path, name):
    write(tmp_path, name, ett(14_500))
    panel = series.read_panel(series.TASKS["etth1"], tmp_path, 0)
    assert panel.ends == [8640]
    assert (panel.test[0], panel.test[-1], len(panel.test)) == ((0, 11_520), (0, 14_376), 2857)
    assert panel.values[0][:3].tolist() == [0.25, 1.25, 2.25]
    assert panel.units[0] == pytest.approx(panel.values[0][:8640].std())
    assert panel.covariates[0].shape == (14_400, 4)
    assert panel.covariates[0][6, :1] == pytest.approx(1.0)  # a quarter of the day


@pytest.mark.parametrize("ending", ["", ".xz"])
def test_m4_is_what_follows_the_training_series(tmp_path, ending):
    write(tmp_path, f"Weekly-train.csv{ending}", m4([["W1", *WEEKS], ["W2", *WEEKS[:50]]], 70))
    write(tmp_path, f"Weekly-test.csv{ending}", m4([["W1", *range(13)], ["W2", *range(13)]], 14))
    panel = series.read_panel(series.TASKS["m4-weekly"], tmp_path, 0)
    assert panel.names == ["W1", "W2"]
    assert panel.test == [(0, 60), (1, 50)]
    assert panel.values[1].tolist() == [*WEEKS[:50], *range(13)]
    assert panel.units == [1.0, 1.0]


def test_car_parts_are_those_of_the_paper(tmp_path):
    full = ",".join(["1", "0", "2"] * 17)
    gap, seldom, late = full[:-1], ",".join(["1"] + ["0"] * 49 + ["1"]), ",".join(["0"] * 15 + ["1"] * 36)
    write(tmp_path, "carparts.csv", carparts(f"7,{full}", f"8,{gap}", f"9,{seldom}", f"10,{late}"))
    panel = series.read_panel(series.TASKS["carparts"], tmp_path, 0)
    assert panel.names == ["7"]
    assert panel.test == [(0, 43)]


@needs_data
def test_the_naive_forecasts_score_what_m4_published():
    found = []
    for name in ("m4-hourly", "m4-weekly"):
        panel = series.read_panel(series.TASKS[name], SHARED / "m4", 0)
        assert len(panel.test) == {"m4-hourly": 414, "m4-weekly": 359}[name]
        found += [
            scores.ratios(scores.score_naive(panel, panel.test, p), panel.task) for p in sorted({1, panel.task.period})
        ]
    assert [(round(each["smape"], 3), round(each["mase"], 3)) for each in found] == [
        (43.003, 11.608),
        (13.912, 1.193),
        (9.161, 2.777),
    ]


@needs_data
def test_the_original_files_are_read():
    panel = series.read_panel(series.TASKS["etth1"], SHARED / "ett", 0)
    assert panel.values[0][:2] == pytest.approx([30.531, 27.787])
    assert len(series.read_panel(series.TASKS["carparts"], SHARED / "carparts", 0).test) == 1046


BROKEN = {
    "no file": ("etth1", {}, "needs .*ETTh1.csv .*found: the folder holds nothing.*take that file from https"),
    "no test part": ("m4-weekly", {"Weekly-train.csv": m4([["W1", *WEEKS]], 70)}, "needs .*Weekly-test.csv"),
    "NaN": ("etth1", {"ETTh1.csv": ett(L9="2016-01-01 00:00:00,1,nan")}, "line 9: a number.*found: it holds 'nan'"),
    "empty": ("etth1", {"ETTh1.csv": ett(L9="2016-01-01 00:00:00,1,")}, "line 9: a number in column OT.*holds ''"),
    "a short row": ("etth1", {"ETTh1.csv": ett(L3="2016-01-01 00:00:00,1")}, "line 3: a row of 3 cells.*it has 2"),
    "no date": ("etth1", {"ETTh1.csv": ett(L4="today,1,2")}, "line 4: a date.*it is 'today'"),
    "too few hours": ("etth1", {"ETTh1.csv": ett(100)}, "14400 hours.*it has 100"),
    "no such column": ("etth1", {"ETTh1.csv": ett(L1="date,HUFL,HULL")}, "columns date and OT.*one of HUFL, HULL"),
    "torn": ("etth1", {"ETTh1.csv.xz": "no archive"}, "should be a table"),
    "a short series": (
        "m4-weekly",
        {"Weekly-train.csv": m4([["W1", 1, 2]], 9), "Weekly-test.csv": m4([["W1", *range(13)]], 14)},
        "series W1 should have at least 39 values.*it has 2.*smaller --context",
    ),
    "other series": (
        "m4-weekly",
        {"Weekly-train.csv": m4([["W1", *WEEKS]], 70), "Weekly-test.csv": m4([["W2", *range(13)]], 14)},
        "the same series.*W1, W2 differs",
    ),
    "a short future": (
        "m4-weekly",
        {"Weekly-train.csv": m4([["W1", *WEEKS]], 70), "Weekly-test.csv": m4([["W1", 1, 2]], 14)},
        "W1 of Weekly-test.csv should have 13 values.*it has 2",
    ),
    "fractions": (
        "carparts",
        {"carparts.csv": carparts("7," + ",".join(["1", "0.5", "2"] * 17))},
        "distribution of counts.*value 2 of series 7 is 0.5.*gaussian",
    ),
    "negative": (
        "carparts",
        {"carparts.csv": carparts("7," + ",".join(["1", "2", "-1"] * 17))},
        "value 3 of series 7 is -1",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_files_are_refused(tmp_path, case):
    name, files, says = BROKEN[case]
    for file, text in files.items():
        (tmp_path / file).write_text(text)
    with pytest.raises((DataError, UsageError)) as caught:
        series.read_panel(series.TASKS[name], tmp_path, 0)
    assert re.search(says, str(caught.value), re.DOTALL), caught.value
    assert "\n  fix: " in str(caught.value)


FLAGS = {
    "no such task": (["--task", "eth1"], "--task eth1.*did you mean 'etth1'"),
    "no data": (["--task", "m4-hourly"], "--data is missing.*M4-methods"),
    "data of none": (["--task", "generated", "--data", "."], "it reads no files"),
    "horizon 0": (["--horizon", "0"], "--horizon 0.*at least 1"),
    "M4's horizon": (["--task", "m4-hourly", "--data", ".", "--horizon", "24"], "that of m4-hourly is 48"),
    "a column of none": (["--column", "OT"], "--task generated has no columns"),
    "no likelihood": (["--likelihood", "normal"], "the choices are gaussian, student-t"),
    "one path": (["--paths", "1"], "--paths 1.*at least 2"),
    "learning rate": (["--lr", "0"], "above 0"),
    "no folder": (["--picture", "nowhere/a.png"], "there is no folder nowhere"),
}


@pytest.mark.parametrize("case", FLAGS)
def test_flags_that_do_not_apply_are_refused(case, monkeypatch):
    words, says = FLAGS[case]
    with pytest.raises(UsageError) as caught:
        workload_of(words, monkeypatch)
    assert re.search(says, str(caught.value), re.DOTALL), caught.value


def workload_of(words: list[str], monkeypatch=None) -> dict:
    """What the main file defines, with these words on the command line."""
    if monkeypatch is None:  # on a rank, which ends with the test
        sys.argv = [str(EXAMPLE / "workload.py"), *words]
        sys.path.insert(0, str(EXAMPLE))
    else:
        monkeypatch.setattr(sys, "argv", [str(EXAMPLE / "workload.py"), *words])
        monkeypatch.syspath_prepend(str(EXAMPLE))
        for name in FILES:
            monkeypatch.setitem(sys.modules, name, FORECAST[name])
    return runpy.run_path(str(EXAMPLE / "workload.py"), run_name="workload")


# Windows


def test_a_window_depends_on_the_seed_and_its_position_alone():
    panel = small_panel()
    data = windows.TrainingWindows(panel, 300, 3)
    places = [data.place(position) for position in range(300)]
    assert [windows.TrainingWindows(panel, 300, 3).place(position) for position in reversed(range(300))] == places[::-1]
    assert [windows.TrainingWindows(panel, 300, 4).place(position) for position in range(300)] != places
    assert len({*places}) > 200
    assert {number for number, _ in places} == {*range(5)}


def test_no_window_of_the_training_has_a_value_of_the_test_part():
    panel = small_panel()
    last = [start + SMALL.horizon for _, start in map(windows.TrainingWindows(panel, 3000, 0).place, range(3000))]
    assert max(last) == panel.ends[0]
    assert min(start for _, start in panel.test) == panel.ends[0]


def test_inputs_are_of_the_past_alone():
    panel = small_panel()
    number, start = panel.test[0]
    before = windows.window(panel, number, start)
    panel.values[number][start:] += 1000.0
    after = windows.window(panel, number, start)
    until = SMALL.context + 1  # the first forecast step is made from the last value of the context
    assert torch.equal(before["inputs"][:until], after["inputs"][:until])
    assert not torch.equal(before["inputs"][until:], after["inputs"][until:])
    assert torch.equal(before["scale"], after["scale"])


def test_positions_before_the_series_do_not_count():
    panel = small_panel()
    found = windows.window(panel, 0, 6)
    assert found["counts"].tolist() == [0.0] * 4 + [1.0] * 12
    assert found["target"][4:].tolist() == pytest.approx(panel.values[0][:12].tolist())
    assert found["inputs"][:5, :4].abs().sum() == 0  # no value, and the mark that there is none
    assert found["scale"] == pytest.approx(1 + np.abs(panel.values[0][:6]).mean())
    assert windows.ForecastWindows(panel, [(0, 6)])[0]["counts"].tolist() == [0.0] * 10 + [1.0] * 6


# Likelihoods and paths


@pytest.mark.parametrize("kind", deepar.LIKELIHOODS)
def test_the_likelihood_is_torchs(kind):
    torch.manual_seed(0)
    raw = torch.randn(4, 7, 3 if kind == "student-t" else 2, dtype=torch.float64)
    scale = torch.tensor([1.0, 2.0, 9.0, 100.0], dtype=torch.float64)
    mean, spread, *more = deepar.parameters_of(raw, scale[:, None], kind)
    target = (10 * torch.randn(4, 7, dtype=torch.float64)).abs().round()
    if kind == "gaussian":
        expected = torch.distributions.Normal(mean, spread)
    elif kind == "student-t":
        expected = torch.distributions.StudentT(more[0], mean, spread)
    else:
        expected = torch.distributions.NegativeBinomial(1 / spread, logits=(mean * spread).log())
    found = deepar.negative_log_likelihood(raw, target, scale, kind)
    torch.testing.assert_close(found, -expected.log_prob(target), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("kind", "parameters", "mean", "variance"),
    [
        ("gaussian", (3.0, 2.0), 3.0, 4.0),
        ("student-t", (3.0, 2.0, 9.0), 3.0, 4.0 * 9 / 7),
        ("negative-binomial", (3.0, 0.5), 3.0, 3.0 + 0.5 * 9),
    ],
)
def test_what_is_drawn_has_the_distributions_moments(kind, parameters, mean, variance):
    rows = [np.full(200_000, value) for value in parameters]
    drawn = deepar.draw(np.random.default_rng(0), rows, kind)
    assert drawn.mean() == pytest.approx(mean, rel=0.02)
    assert drawn.var() == pytest.approx(variance, rel=0.03)


def small_model(panel):
    torch.manual_seed(1)
    return deepar.DeepAR(windows.width(panel), 8, 2, panel.task.likelihood).double().eval()


def test_steps_one_by_one_are_the_whole_window():
    panel = small_panel()
    model, inputs = small_model(panel), windows.window(panel, *panel.test[0])["inputs"][None].double()
    state, found = None, []
    for step in range(inputs.shape[1]):
        raw, state = model.advance(inputs[:, step : step + 1], state)
        found.append(raw)
    torch.testing.assert_close(torch.cat(found, 1), model(inputs), rtol=0, atol=1e-14)


@pytest.mark.parametrize("kind", deepar.LIKELIHOODS)
def test_paths_do_not_depend_on_the_windows_beside_them(kind):
    panel = small_panel(kind)
    model, chosen = small_model(panel), panel.test[:5]
    together = deepar.sample_paths(model, panel, chosen, 4, 7)
    assert together.shape == (5, 4, 6)
    for at, one in enumerate(chosen):
        np.testing.assert_allclose(deepar.sample_paths(model, panel, [one], 4, 7)[0], together[at], rtol=1e-12)
    assert not np.array_equal(deepar.sample_paths(model, panel, chosen, 4, 8), together)
    assert len(np.unique(together[0], axis=0)) > 1


def test_each_drawn_value_is_an_input_of_the_next_steps():
    """With almost no noise, the path is the one made step by step from teacher-forced windows of it."""
    panel = small_panel()
    model, (number, start) = small_model(panel), panel.test[0]
    with torch.no_grad():
        model.head.weight[1] = 0.0
        model.head.bias[1] = -100.0  # softplus: the deviation is the least there is
    path = deepar.sample_paths(model, panel, [(number, start)], 2, 0)[0, 0]
    panel.values[number][start : start + 6] = path
    part = windows.window(panel, number, start)
    scale = part["scale"][None, None].double()
    mean = deepar.parameters_of(model(part["inputs"][None].double()), scale, "gaussian")[0][0, SMALL.context :]
    np.testing.assert_allclose(path, mean.detach().numpy(), atol=1e-3 * float(scale))
    assert np.ptp(path) > 0


# Scores


def test_crps_is_that_of_every_pair():
    random = np.random.default_rng(0)
    paths, truth = random.standard_normal((9, 4)), random.standard_normal(4)
    pairs = np.abs(paths[:, None] - paths[None]).sum((0, 1)) / (9 * 8)
    np.testing.assert_allclose(scores.crps(paths, truth), np.abs(paths - truth).mean(0) - pairs / 2, rtol=1e-12)


def test_scores_of_a_window():
    panel = small_panel()
    number, start = panel.test[0]
    truth = panel.values[number][start : start + 6]
    offsets = np.linspace(-10, 10, 21)[:, None]
    shift = np.array([0, 0, 0, 8.0, 0, 99.0])
    found = scores.score_paths(panel, number, start, truth + offsets + shift)
    ratio = {name: over / under for name, (over, under) in found.items()}
    assert ratio["coverage_50"] == pytest.approx(4 / 6)
    assert ratio["coverage_90"] == pytest.approx(5 / 6)
    assert ratio["mse"] == pytest.approx((8**2 + 99**2) / 6 / panel.units[number] ** 2)
    assert ratio["mae"] == pytest.approx((8 + 99) / 6 / panel.units[number])
    assert ratio["quantile_loss_0.5"] == pytest.approx((8 + 99) / np.abs(truth).sum())
    above = truth - np.quantile(truth + offsets + shift, 0.9, axis=0)
    pinball = np.where(above > 0, 0.9 * above, -0.1 * above)
    assert ratio["quantile_loss_0.9"] == pytest.approx(2 * pinball.sum() / np.abs(truth).sum())
    train = panel.values[number][: panel.ends[number]]
    assert ratio["mase"] == pytest.approx((8 + 99) / 6 / np.abs(train[24:] - train[:-24]).mean())


@pytest.mark.slow
def test_the_baselines_see_a_season():
    pytest.importorskip("statsmodels", reason="--baselines needs statsmodels")
    baselines.check_installed()
    panel = small_panel(horizon=24)
    found = baselines.score_baselines(panel, panel.test[:2])
    naive = scores.ratios(scores.score_naive(panel, panel.test[:2], 1), panel.task)
    for total in found.values():
        assert scores.ratios(total, panel.task)["mse"] < 0.5 * naive["mse"]
    line = np.arange(60.0)
    np.testing.assert_allclose(baselines.trend_and_fourier(line, 1, 3), [60, 61, 62], atol=1e-6)


# Ranks


def train(rank: int, plan: str, words: list[str]) -> tuple[dict, dict, list[float]]:
    """Scores, parameters and losses on this rank under `plan`."""
    os.environ["PACELINE_PLAN"] = json.dumps(asdict(Plan.parse(plan)))
    names = workload_of(words)
    import paceline as package

    job = package.distribute(names["workload"])
    losses = [job.step(batch) for batch in job.batches()]
    found, model = names["forecast"](job, names["panel"], names["arguments"])
    every = names["series"].thin(names["panel"].test, 7)
    whole = names["scores"].ratios(
        names["score_model"](model, names["panel"], every, names["arguments"]), names["panel"].task
    )
    assert found["DeepAR"] == pytest.approx(whole, rel=1e-9), "each window once, over all ranks"
    found["DeepAR"]["nll"] = job.evaluate()["loss"]
    job.close()
    return found, {name: value.numpy() for name, value in model.state_dict().items()}, losses


@pytest.fixture(scope="module")
def alone():
    return run_ranks(1, train, "replicate=1", TINY)[0]


def check_same(found, alone):
    for mine, other in zip(found[0].values(), alone[0].values(), strict=True):
        assert mine == pytest.approx(other, rel=1e-8)
    for name, value in alone[1].items():
        np.testing.assert_allclose(found[1][name], value, rtol=0, atol=1e-9, err_msg=name)
    assert found[2] == pytest.approx(alone[2], rel=1e-10)


MORE = ("replicate=2", "replicate=4", "shard=2,zero=1", "replicate=2,shard=2", "replicate=2,pipeline=2")
CELLS = [
    *("replicate=2", "shard=2", "pipeline=2"),
    *(pytest.param(plan, marks=pytest.mark.integration) for plan in MORE[1:]),
]


@pytest.mark.parametrize("plan", CELLS)
def test_ranks_end_where_one_does(alone, plan):
    answers = run_ranks(Plan.parse(plan).world_size, train, plan, TINY)
    for found in answers:
        check_same(found, alone)


@pytest.mark.integration
@pytest.mark.parametrize("kind", deepar.LIKELIHOODS[1:])
def test_other_likelihoods_end_where_one_rank_does(kind):
    words = [*TINY, "--likelihood", kind]
    (alone,) = run_ranks(1, train, "replicate=1", words)
    for found in run_ranks(2, train, "shard=2", words):
        check_same(found, alone)


def refuse(rank: int, words: list[str]) -> str:
    try:
        train(rank, "tensor=2", words)
    except PacelineError as error:
        return str(error)
    return ""


def test_tensor_says_why_it_splits_nothing():
    for found in run_ranks(2, refuse, TINY):
        assert re.search(r"aten.lstm.input, which uses layers.*, has no rule by which weights are split", found), found


@pytest.mark.slow
def test_it_learns_the_season_and_how_sure_it_is():
    words = ["--steps", "50", "--batch-size", "32", "--windows", "7", "--paths", "50", "--lr", "5e-3"]
    ((found, _, losses),) = run_ranks(1, train, "replicate=1", words)
    assert np.mean(losses[-5:]) < losses[0] - 1
    assert found["DeepAR"]["mse"] < 0.3 * found["naive"]["mse"]
    assert 0.3 < found["DeepAR"]["coverage_50"] < 0.7 < found["DeepAR"]["coverage_90"] < 1


# Whole jobs


@pytest.mark.slow
def test_a_plain_run_writes_result_and_picture(tmp_path):
    words = [*TINY, "--output", "result.json", "--picture", "fan.png", "--likelihood", "negative-binomial"]
    done = paceline(tmp_path, "run", "-n", "2", EXAMPLE / "workload.py", *words)
    assert done.code == 0, done.err
    assert done.out.count("40 generated series of 840 hours: 4 steps") == 1
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["data"], result["steps"]) == ("40 generated series of 840 hours", 4)
    assert {"mse", "crps", "coverage_50", "coverage_90", "nll"} <= {*result["scores"]}
    assert {*result["others"]} == {"naive", "seasonal naive"}
    assert result["seconds"] > 0
    assert (tmp_path / "fan.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param("replicate=2", marks=pytest.mark.slow),
        pytest.param("shard=2", marks=pytest.mark.integration),
        pytest.param("pipeline=2", marks=pytest.mark.integration),
    ],
)
@pytest.mark.complete  # loops that are verified: test_loops.py, test_racer.py
def test_verify_agrees(tmp_path, plan):
    words = [word for word in TINY if word not in ("--precision", "float64")]
    done = paceline(tmp_path, "verify", "--plan", plan, EXAMPLE / "workload.py", "--", *words)
    assert done.code == 0, done.out + done.err
    assert re.search(r"^step float64 +ok ", done.out, re.MULTILINE), done.out


@pytest.mark.integration
def test_workers_of_servers_end_where_one_rank_does(tmp_path):
    found = {}
    for plan in ("replicate=1", "replicate=2,server=1"):
        words = [*TINY, "--output", f"{plan}.json"]
        done = paceline(tmp_path, "run", "--plan", plan, EXAMPLE / "workload.py", *words)
        assert done.code == 0, done.err
        found[plan] = json.loads((tmp_path / f"{plan}.json").read_text())["scores"]
    assert found["replicate=2,server=1"] == pytest.approx(found["replicate=1"], rel=1e-8)


KILL = """        job.step(batch)
        if job.step_number == int(os.environ.get("KILL_AT", "-1")):
            os.kill(os.getpid(), 9)
"""


@pytest.mark.integration
@pytest.mark.complete  # loops that are killed: test_loops.py, test_distil.py
def test_a_killed_job_goes_on(tmp_path):
    folder = tmp_path / "forecast"
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("__pycache__", "runs", "*.png", "*.md"))
    main = folder / "workload.py"
    text = main.read_text()
    assert text.count("        job.step(batch)\n") == 1
    main.write_text(
        text.replace("        job.step(batch)\n", KILL).replace("import json\n", "import json\nimport os\n")
    )
    words = [*TINY, "--steps", "9", "--output"]
    every = ("--plan", "shard=2", "--checkpoint-every", "2")
    whole = paceline(tmp_path, "run", "--job", "a", *every, main, *words, "a.json")
    assert whole.code == 0, whole.err
    killed = paceline(tmp_path, "run", "--job", "b", *every, main, *words, "b.json", KILL_AT="7")
    assert killed.code == 1
    assert not (tmp_path / "b.json").exists()
    again = paceline(tmp_path, "run", "--job", "b", "--plan", "shard=2", "--resume", main, *words, "b.json")
    assert again.code == 0, again.err
    assert re.search(r"goes on at step-0000000[246]", again.err)
    first, second = (json.loads((tmp_path / name).read_text()) for name in ("a.json", "b.json"))
    assert first["scores"] == second["scores"]

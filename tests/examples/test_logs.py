"""The example of logs: readers, templates, thresholds, and the same end on any number of ranks under other plans."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import lzma
import os
import random
import re
import runpy
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest

from paceline.checkpoint.export import plan_export, write_export
from paceline.nouns.errors import DataError, UsageError
from paceline.nouns.plan import Plan

from support.jobs import losses, paceline
from support.ranks import run_ranks

torch = pytest.importorskip("torch")
load_file = pytest.importorskip("safetensors.torch").load_file

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "logs"
SHARED = ROOT.parent / "shared" / "data" / "logs"


def load(name: str) -> ModuleType:
    """A file of the example. Its files import each other by their names, which other examples may have too."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


NAMES = ("files", "templates", "sessions", "models", "detection")
_before = {name: sys.modules.get(name) for name in NAMES}
files, templates, sessions, models, detection = map(load, NAMES)
for _name, _module in _before.items():
    sys.modules.pop(_name) if _module is None else sys.modules.update({_name: _module})
OPTIONS = sessions.Options()


def lines_of(rows) -> str:
    return "".join(" ".join(map(str, row.keys)) + "\n" for row in rows)


def write_data(folder: Path) -> None:
    """Small files of three tasks."""
    draw = random.Random(0)
    folder.mkdir()
    (folder / "hdfs_train.txt").write_text(lines_of(sessions.made_up_sessions(60, 0.0, draw)))
    (folder / "hdfs_test_abnormal.txt").write_text(lines_of(sessions.made_up_sessions(21, 1.0, draw)))
    both = sessions.made_up_sessions(120, 0.3, draw)
    records = (
        {"split": "train" if at % 4 else "test", "label": int(row.is_anomaly), "events": row.keys}
        for at, row in enumerate(both)
    )
    (folder / "sessions.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    traces = (f"t\t{'attack' if row.is_anomaly else 'training'}\t\t{' '.join(map(str, row.keys))}\n" for row in both)
    (folder / "traces.tsv").write_text("trace\tpart\tattack\tsyscalls\n" + "".join(traces))


@pytest.fixture
def data(tmp_path):
    write_data(tmp_path / "data")
    return tmp_path / "data"


# Reading


@pytest.mark.parametrize(
    ("task", "name", "content", "first"),
    [
        ("hdfs-next", "hdfs_train", "5 22 5\n" * 20, (5, 22, 5)),
        ("hdfs-next", "hdfs_train.txt", "5 22 5\r\n\n" * 20, (5, 22, 5)),
        ("hdfs-next", "hdfs_train.xz", "5 22 5\n" * 20, (5, 22, 5)),
        ("hdfs", "sessions.jsonl", '{"split": "train", "label": 0, "events": [3, 0]}\n' * 9, (3, 0)),
        ("hdfs", "sessions.jsonl.xz", '{"split": "train", "label": 0, "events": [3, 0]}\n' * 9, (3, 0)),
        ("adfa", "traces.tsv", "trace\tpart\tattack\tsyscalls\n" + "a\ttraining\t\t6 11 45\n" * 9, (6, 11, 45)),
        ("adfa", "traces.tsv.xz", "a\ttraining\t\t6 11 45\n" * 9, (6, 11, 45)),
    ],
)
def test_sessions_are_read_plain_and_packed(tmp_path, task, name, content, first):
    path = tmp_path / name
    path.write_bytes(lzma.compress(content.encode()) if name.endswith(".xz") else content.encode())
    (tmp_path / "hdfs_test_abnormal.txt").write_text("1 2\n3\n")
    read = sessions.find_task(task).read(tmp_path, OPTIONS)
    assert read.train[0] == sessions.Session(first, False)
    anomalies = [row.keys for row in read.test if row.is_anomaly]
    assert anomalies == ([(1, 2), (3,)] if task == "hdfs-next" else [])


def test_logs_parts_are_disjoint_and_use_normal_test_sessions(data):
    next_key = sessions.find_task("hdfs-next")
    held_out = next_key.read(data, OPTIONS)
    assert (len(held_out.train), len(held_out.threshold), len(held_out.test)) == (42, 6, 12 + 21)
    (data / "hdfs_test_normal").write_text("1 2\n" * 5)
    whole = next_key.read(data, OPTIONS)
    assert (len(whole.train), len(whole.threshold), len(whole.test)) == (52, 8, 5 + 21)
    tests = [sessions.find_task("adfa").read(data, sessions.Options(fold=fold)).test for fold in range(5)]
    rows = [row for test in tests for row in test]
    assert len(rows) == 120
    first = sessions.read_adfa(data, OPTIONS)
    once = [*first.train, *first.threshold, *first.test]
    assert sorted(row.keys for row in rows) == sorted(row.keys for row in once)


NEXT, BOTH = "hdfs_train.txt", "sessions.jsonl"
RECORD = '{{"split": "train", "label": {}, "events": [{}]}}\n'


@pytest.mark.parametrize(
    ("task", "name", "content", "says"),
    [
        ("hdfs-next", NEXT, "5 22\n5 x22\n", r"line 2: event ids.*\n  found: one is 'x22'\n  fix: mend that line"),
        ("hdfs-next", NEXT, "5 -1\n", r"line 1: event ids.*\n  found: one is '-1'"),
        ("hdfs-next", NEXT, "5 2.5\n", r"found: one is '2.5'"),
        ("hdfs-next", NEXT, b"5 \xff\n", r"should be text in UTF-8\n  found: byte 3 "),
        ("hdfs-next", NEXT, "", r"training set needs normal sessions\n  found: none of its 0 sessions"),
        ("hdfs", BOTH, RECORD.format(1, 3) * 20, r"training set needs normal sessions\n  found: none of its 17"),
        ("hdfs", BOTH, RECORD.format(0, 3) * 20, r"normal sessions\n|anomalous sessions\n  found: none"),
        ("hdfs", BOTH, '{"split": "train", "label": 0}\n', r"line 1: a JSON object with split, label and events"),
        ("hdfs", BOTH, "5 22\n", r"line 1: a JSON object"),
        ("hdfs", BOTH, RECORD.format(2, 3), r"label 0 or 1\n  found: they are 'train' and 2"),
        ("hdfs", BOTH, RECORD.format(0, '"a"'), r"line 1: event ids.*\n  found: one is 'a'"),
        ("adfa", "traces.tsv", "a\ttraining\t6 11\n", r"line 1: trace, part, attack.*\n  found: it has 3 columns"),
        ("adfa", "traces.tsv", "a\ttraining\t\t\n", r"line 1: event ids\n  found: there is none"),
    ],
)
def test_bad_input_is_named(data, task, name, content, says):
    path = data / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=says):
        sessions.load(sessions.find_task(task), data, OPTIONS, 0)


def test_logs_training_without_anomalies_is_refused_if_needed():
    normal, both = [sessions.Session((1,))] * 9, [sessions.Session((1,)), sessions.Session((2,), True)]
    data = sessions.parts_of("x", normal, both, next_key=False)
    with pytest.raises(DataError, match="the training set needs anomalous sessions\n  found: none of its 7 sessions"):
        sessions.check(data, sessions.find_task("hdfs"))
    sessions.check(data, sessions.find_task("hdfs-next"))


def test_missing_files_say_where_to_get_them(tmp_path):
    for task in sessions.TASKS.values():
        with pytest.raises(UsageError, match=r"there is no such folder\n  fix: (take|make) .*(http|deep-loglizer)"):
            task.read(tmp_path / "nowhere", OPTIONS)
        (tmp_path / task.name).mkdir()
        with pytest.raises(UsageError, match="the folder holds nothing"):
            task.read(tmp_path / task.name, OPTIONS)
    (tmp_path / "torn.xz").write_bytes(lzma.compress(b"5 22\n" * 99)[:-9])
    with pytest.raises(DataError, match=r"torn\.xz should be xz-compressed"):
        files.read_text(tmp_path / "torn.xz")


def play(rank: int, words: list[str], plan: str = "") -> None:
    """The example's file as a rank runs it, under a plan."""
    if plan:
        os.environ["PACELINE_PLAN"] = json.dumps(dataclasses.asdict(Plan.parse(plan)))
    sys.argv = [str(EXAMPLE / "workload.py"), *words]
    sys.path.insert(0, str(EXAMPLE))
    runpy.run_path(sys.argv[0], run_name="__main__")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--task hdfs-nex", r"--task hdfs-nex\n.*\n  fix: did you mean 'hdfs-next'"),
        ("--task hdfs-next --linear", r"--linear with --task hdfs-next\n  found: it applies to hdfs, adfa alone"),
        ("--task hdfs --fold 1", "it applies to adfa alone"),
        ("--task adfa --fold 5", "--fold 5\n  found: there are 5 folds\n  fix: write 0 to 4"),
        ("--task lines --log Foo", "its format is not known"),
        ("--epochs 2 --steps 3", "both say when training ends"),
        ("--window 999", r"--window 999\n  found: it is longer than every session: the longest has \d+ keys"),
        ("--task lines --window 4000", r"--window 4000\n  found: there are only \d+ lines"),
        ("--window 0", "--window 0\n  found: it should be at least 2"),
        ("--picture nowhere/x.png", "there is no folder nowhere"),
    ],
)
def test_flags_are_checked_before_training(words, says, monkeypatch):
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in (*NAMES, "workload"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(UsageError, match=says):
        play(0, words.split())


# Templates


def test_drain_finds_the_templates_of_made_up_lines():
    lines = list(enumerate(sessions.made_up_lines(random.Random(0)), start=1))
    form = templates.Format(line=r"(?P<label>\S+) \d+ (?P<content>.*)", masks=(r"blk_\d+",))
    numbers, alerts, drain = templates.parse_lines(lines, form, "lines")
    found = {" ".join(group.tokens) for group in drain.groups}
    assert "receiving block <*> from peer <*>" in found
    assert "fatal: parity error at address <*>" in found
    assert len(found) == 10
    fatal = next(group.number for group in drain.groups if group.tokens[0] == "fatal:")
    assert [number == fatal for number in numbers] == alerts


def test_a_line_in_another_format_is_named():
    with pytest.raises(DataError, match=r"some\.log, line 7: .*\n  found: it is 'no log'"):
        templates.parse_lines([(7, "no log")], templates.FORMATS["HDFS"], "some.log")


def test_logs_grouping_accuracy_counts_lines_of_exact_groups():
    assert templates.grouping_accuracy([0, 0, 1, 1, 2], ["a", "a", "b", "b", "b"]) == 0.4


@pytest.mark.skipif(not (SHARED / "loghub").is_dir(), reason="loghub's samples are not here")
@pytest.mark.parametrize("name", ["Apache", "BGL", "HDFS", "Hadoop"])
def test_drain_groups_loghubs_lines_as_accurately_as_published(name):
    numbers, _, _ = templates.parse(name, SHARED / "loghub")
    rows = files.read_csv(files.present(SHARED / "loghub", f"{name}_2k.log_structured.csv", ""))
    accuracy = templates.grouping_accuracy(numbers, [row["EventId"] for row in rows])
    assert accuracy == pytest.approx(templates.FORMATS[name].published, abs=0.002)


@pytest.mark.skipif(not (SHARED / "loghub").is_dir(), reason="loghub's samples are not here")
def test_a_log_without_labels_is_not_trained_on():
    with pytest.raises(DataError, match=r"--log HDFS should have labelled lines(.|\n)*take --log BGL"):
        sessions.read_lines(SHARED / "loghub", sessions.Options(log="HDFS"))
    assert len(sessions.read_lines(SHARED / "loghub", OPTIONS).test) == 50


# Models and thresholds


def samples(rows, keys, window=64):
    return models.Sessions(rows, [2 + row.is_anomaly for row in rows], keys, window)


def made_up(count=8):
    rows = sessions.made_up_sessions(count, 0.3, random.Random(1))
    return rows, models.Keys(rows)


def test_padding_changes_neither_loss_nor_scores():
    rows, keys = made_up()
    rows = [*rows, sessions.Session(rows[0].keys * 3)]  # so that the others are padded further
    torch.manual_seed(0)
    for model, loss in (
        (models.NextKey(len(keys)), models.next_key_loss),
        (models.Classifier(len(keys), 80), models.anomaly_loss),
    ):
        model = model.double().eval()
        data = samples(rows, keys, 79)
        together = models.collate([data[at] for at in range(len(rows))])
        alone = [models.collate([data[at]]) for at in range(len(rows))]
        assert len({batch["inputs"].shape[1] for batch in alone}) > 1
        total, weight = loss(model, together)
        each = [loss(model, batch) for batch in alone]
        assert total.item() == pytest.approx(sum(one.item() for one, _ in each), rel=1e-12)
        assert int(weight) == sum(int(number) for _, number in each)
        if loss is models.next_key_loss:
            assert int(weight) == sum(len(row.keys) + 1 for row in rows)
            ranks = models.worst_rank(model(together["inputs"]), together["targets"])
            ones = [models.worst_rank(model(batch["inputs"]), batch["targets"]) for batch in alone]
            assert ranks.tolist() == torch.cat(ones).tolist()


def test_a_key_that_training_has_not_met_is_an_anomaly():
    logits = torch.zeros(2, 3, 6)
    logits[:, :, 4] = 1.0
    targets = torch.tensor([[4, 5, models.PAD], [4, models.UNKNOWN, models.PAD]])
    assert models.worst_rank(logits, targets).tolist() == [1, 6]


def test_a_cut_session_has_no_end():
    rows, keys = made_up()
    batch = models.collate([samples(rows, keys, 3)[0]])
    assert models.END not in batch["targets"].tolist()[0]
    assert models.END in models.collate([samples(rows, keys)[0]])["targets"].tolist()[0]


def test_hidden_keys_are_unknown_and_drawn_anew():
    rows, keys = made_up()
    data = models.Sessions(rows, [0] * len(rows), keys, 64, hidden=0.5)
    whole = samples(rows, keys)[0]["keys"]
    torch.manual_seed(0)
    drawn = [data[0]["keys"] for _ in range(200)]
    hidden = torch.stack([one == models.UNKNOWN for one in drawn])
    assert 0.4 < hidden.double().mean().item() < 0.6
    assert all(torch.equal(one[one != models.UNKNOWN], whole[one != models.UNKNOWN]) for one in drawn)


def test_grams_are_the_different_ones_in_their_order():
    keys = models.Keys([sessions.Session((1, 2, 1, 2, 1, 3))] * 2, gram=3)
    row = sessions.Session((1, 2, 1, 2, 1, 3))
    assert keys.tokens(row) == [(1, 2, 1), (2, 1, 2), (2, 1, 3)]
    assert keys.encode(sessions.Session((9, 9, 9, 1, 2, 1)))[-1] == models._FIRST_KEY
    assert keys.tokens(sessions.Session((7,))) == [(7, 7, 7)]


def test_thresholds_are_of_the_counts():
    assert detection.threshold_of_normal([500, 400, 98, 2, 0], 0.002) == 3
    assert detection.threshold_of_normal([500, 400, 98, 2, 0], 0.0) == 4
    assert detection.threshold_of_normal([10, 0, 0], 0.5) == 1
    assert detection.threshold_of_both([5] * 20 + [0] * 44, [0] * 50 + [5] * 14) == 35
    assert detection.threshold_of_both([9] * 64, [0] * 30 + [9] + [0] * 33) <= 30
    one = detection.quality([6, 2], [1, 3], 1)
    assert (one.precision, one.recall, one.f1, one.false_alarm_rate) == (0.6, 0.75, pytest.approx(2 / 3), 0.25)
    assert detection.quality([3], [0], 1) == detection.Quality(0.0, 0.0, 0.0, 0.0)


def test_the_linear_reference_counts_keys():
    pytest.importorskip("sklearn")
    rows = [sessions.Session((1, 2)), sessions.Session((1, 9), True)] * 20
    data = sessions.parts_of("x", rows, rows[:10], next_key=False)
    assert detection.linear_reference(data, models.Keys(rows)).f1 == 1.0
    assert detection.unseen_pair_reference(data).recall == 0.0


@pytest.mark.skipif(not (SHARED / "hdfs_sessions").is_dir(), reason="the HDFS sessions are not here")
def test_the_linear_reference_of_hdfs_is_the_published_one():
    pytest.importorskip("sklearn")
    data = sessions.read_hdfs(SHARED / "hdfs_sessions", OPTIONS)
    one = detection.linear_reference(data, models.Keys(data.train))
    assert (one.precision, round(one.recall, 3), round(one.f1, 3)) == (1.0, 0.526, 0.690)


# Whole jobs

SAME = ("--batch-size", "8", "--precision", "float64", "--steps", "5")
USUAL = ("replicate=2", "shard=2,zero=1", "tensor=2")
MORE = ("shard=2", "pipeline=2", "replicate=4", "replicate=2,shard=2", "replicate=2,tensor=2")


def train(rank: int, words: list[str], plan: str, saved: str) -> None:
    """The example's file as a rank runs it; a checkpoint of what it ends with."""
    import paceline as package

    jobs, plain = [], package.distribute

    def distribute(workload):
        jobs.append(plain(workload))
        return jobs[0]

    package.distribute = distribute
    play(rank, words, plan)
    jobs[0].save(saved)
    jobs[0].close()


def result_of(folder: Path, plan: str, *words: str | Path) -> dict:
    """The result of one run with the parameters at its end, on ranks of the tests' fork server."""
    name = plan.replace("=", "-")
    output, saved = folder / f"{name}.json", folder / name
    run_ranks(Plan.parse(plan).world_size, train, [*map(str, words), *SAME, "--output", str(output)], plan, str(saved))
    write_export(plan_export(saved, "hf", lambda text: None), folder / f"{name}-whole")
    return json.loads(output.read_text()) | {"tensors": load_file(folder / f"{name}-whole" / "model.safetensors")}


def check_same(one: dict, other: dict) -> None:
    assert other["scores"] == one["scores"]
    assert other["steps"] == one["steps"] == 5
    assert other["tensors"].keys() == one["tensors"].keys()
    for name, tensor in one["tensors"].items():
        torch.testing.assert_close(other["tensors"][name], tensor, rtol=0, atol=1e-9, msg=name)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What one rank ends with, and the folder of the data; each task once."""
    folder, found = tmp_path_factory.mktemp("alone"), {}
    write_data(folder / "data")

    def of(task: str) -> tuple[dict, tuple[str, ...]]:
        words = ("--task", task, "--data", str(folder / "data"))
        if task not in found:
            (folder / task).mkdir()
            found[task] = result_of(folder / task, "replicate=1", *words)
        return found[task], words

    return of


CELLS = [
    *(pytest.param("hdfs-next", plan, marks=pytest.mark.slow) for plan in USUAL),
    *(pytest.param("hdfs-next", plan, marks=pytest.mark.integration) for plan in MORE),
    *(pytest.param("hdfs", plan, marks=pytest.mark.integration) for plan in (*USUAL, *MORE)),
    *(pytest.param("adfa", plan, marks=pytest.mark.integration) for plan in ("replicate=2", "tensor=2")),
]


@pytest.mark.parametrize(("task", "plan"), CELLS)
def test_ranks_end_where_one_does(tmp_path, alone, task, plan):
    one, words = alone(task)
    check_same(one, result_of(tmp_path, plan, *words))


VERIFIED = [
    pytest.param("hdfs-next", "replicate=2", marks=pytest.mark.slow),
    pytest.param("hdfs-next", "tensor=2", marks=pytest.mark.complete),
    pytest.param("hdfs", "shard=2", marks=pytest.mark.complete),
    pytest.param("hdfs", "pipeline=2", marks=pytest.mark.complete),
]


@pytest.mark.parametrize(("task", "plan"), VERIFIED)
@pytest.mark.complete  # loops that are verified: test_loops.py, test_racer.py
def test_verify_agrees(tmp_path, data, task, plan):
    words = ("--", "--task", task, "--data", data, "--batch-size", "8", "--steps", "5")
    ended = paceline(tmp_path, "verify", "--plan", plan, EXAMPLE / "workload.py", *words)
    assert ended.code == 0, ended.out + ended.err
    assert "step float64  ok" in ended.out


KILL = """        job.step(batch)
        if job.step_number == int(os.environ.get("KILL_AT", "-1")):
            os.kill(os.getpid(), 9)
"""


@pytest.mark.integration
def test_a_killed_job_goes_on_and_ends_as_if_nothing_had_been(tmp_path, data):
    text = (EXAMPLE / "workload.py").read_text()
    assert text.count("        job.step(batch)\n") == 1
    text = text.replace("        job.step(batch)\n", KILL).replace("import json\n", "import json\nimport os\n")
    for path in EXAMPLE.glob("*.py"):
        shutil.copy(path, tmp_path)
    (tmp_path / "workload.py").write_text(text)

    def run(job: str, *flags: str, **environment: str):
        words = ("--task", "hdfs-next", "--data", data, *SAME[:4], "--steps", "12", "--output", f"{job}.json")
        return paceline(tmp_path, "run", "--job", job, *flags, tmp_path / "workload.py", *words, **environment)

    assert run("whole", "-n", "2").code == 0
    torn = run("torn", "-n", "2", "--checkpoint-every", "3", KILL_AT="8")
    assert torn.code == 1
    assert not (tmp_path / "torn.json").exists()
    resumed = run("torn", "--plan", "shard=2", "--resume")
    assert resumed.code == 0, resumed.err
    # Checkpoints are written in the background: that of step 6 may not have been complete.
    assert re.search("goes on at step-0000000[36]", resumed.err), resumed.err
    whole, torn = (json.loads((tmp_path / f"{job}.json").read_text()) for job in ("whole", "torn"))
    assert torn["scores"] == whole["scores"]
    assert losses(tmp_path / "runs" / "torn") == pytest.approx(losses(tmp_path / "runs" / "whole"), rel=1e-9)


def test_it_runs_alone_on_raw_lines_that_it_makes_up_and_draws(tmp_path):
    pytest.importorskip("matplotlib")
    output, picture = tmp_path / "result.json", tmp_path / "picture.png"
    words = ["--task", "lines", "--steps", "60", "--output", str(output), "--picture", str(picture)]
    run_ranks(1, play, words)
    result = json.loads(output.read_text())
    assert result["data"].startswith("made-up log")
    assert result["steps"] == 60
    assert result["scores"]["recall"] == 1.0  # alerts are of a template that training has not met
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.integration
def test_the_lstm_finds_made_up_anomalies(tmp_path):
    output = tmp_path / "result.json"
    run_ranks(2, play, ["--task", "hdfs-next", "--epochs", "6", "--output", str(output)])
    assert json.loads(output.read_text())["scores"]["f1"] > 0.9

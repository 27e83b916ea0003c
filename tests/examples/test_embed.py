"""The embedding example: rows are read or named, N ranks end where one does, and the index finds the nearest."""

from __future__ import annotations

import importlib
import json
import lzma
import os
import re
import runpy
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from paceline.nouns.errors import DataError, UsageError

from support.jobs import paceline
from support.ranks import preload, run_ranks

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")
pytest.importorskip("usearch")
pytest.importorskip("torchmetrics")
preload("paceline.train.loop_job", "torchmetrics")
ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "embed"
SHARED = ROOT.parent / "shared" / "data" / "glue" / "STS-B"
FILES = ("sentences", "encoder", "vectors", "figure", "workload")
COUNTS = {"train": 45, "dev": 13, "test": 12}
SMALL = ("--batch-size", "11", "--epochs", "2", "--width", "4", "--precision", "float64")
STEPS = 8


@contextmanager
def on_path():
    """The example's files importable under their own names, which other examples use too."""
    before = {name: sys.modules.pop(name, None) for name in FILES}
    sys.path.insert(0, str(EXAMPLE))
    try:
        yield
    finally:
        sys.path.remove(str(EXAMPLE))
        for name, module in before.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module


def load() -> tuple[ModuleType, ...]:
    with on_path():
        return tuple(importlib.import_module(name) for name in FILES)


sentences, encoder, vectors, figure, workload = load()


def row_of(pair: Any, more: str = "") -> str:
    return f"main-made\tfile\t2026\t0001\t{pair.score:.3f}\t{pair.first}\t{pair.second}{more}\n"


@pytest.fixture
def data(tmp_path):
    """A folder of few pairs in STS-B's format."""
    folder = tmp_path / "sts"
    folder.mkdir()
    for part, count in COUNTS.items():
        (folder / f"sts-{part}.csv").write_text("".join(map(row_of, sentences.make_up(count, part))))
    return folder


# Reading


@pytest.mark.parametrize(
    ("line", "pair"),
    [
        ("a\tb\tc\t1\t4.250\tA.\tB.\n", ("A.", "B.", 4.25)),
        ("a\tb\tc\t1\t0\tA.\tB.\tlicence\tmore\r\n", ("A.", "B.", 0)),
        ('a\tb\tc\t1\t5\tHe said "no.\tB\u2028b\n', ('He said "no.', "B\u2028b", 5)),
    ],
)
@pytest.mark.parametrize("end", ["", ".xz"])
def test_a_row_is_read_as_it_stands(tmp_path, line, pair, end):
    for part in sentences.PARTS:
        content = line.encode()
        (tmp_path / f"sts-{part}.csv{end}").write_bytes(lzma.compress(content) if end else content)
    name, parts = sentences.read_pairs(tmp_path)
    assert name == "STS-B"
    assert parts == {part: [pair] for part in sentences.PARTS}


@pytest.mark.skipif(not SHARED.is_dir(), reason="the real STS-B is not here")
def test_the_real_pairs():
    _, parts = sentences.read_pairs(SHARED)
    assert {part: len(pairs) for part, pairs in parts.items()} == {"train": 5749, "dev": 1500, "test": 1379}


# What sts-dev.csv holds (None: it is missing), and what the error says: asked, found, fix.
BROKEN = {
    "missing": (None, "should hold sts-dev.csv (or sts-dev.csv.xz)", "it holds sts-test.csv", "ixa2.si.ehu.eus"),
    "few columns": (b"a\tb\tc\t1\t4\tA.\n", "sts-dev.csv, line 1: a row of 7 columns", "it has 6", "mend that line"),
    "no score": (b"a\tb\tc\t1\tx\tA.\tB.\n", "line 1: a score from 0 to 5", "'x'", "mend that line"),
    "nan": (b"a\tb\tc\t1\tnan\tA.\tB.\n", "line 1: a score from 0 to 5", "'nan'", "mend that line"),
    "too high": (b"a\tb\tc\t1\t5.1\tA.\tB.\n", "line 1: a score from 0 to 5", "'5.1'", "mend that line"),
    "no sentence": (b"a\tb\tc\t1\t5\tA.\t \n", "line 1: two sentences", "one is empty", "mend that line"),
    "no UTF-8": (b"a\tb\tc\t1\t5\tA\xff.\tB\n", "sts-dev.csv can't be read", "utf-8", "download it anew"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_is_named(case, data):
    content, asked, found, fix = BROKEN[case]
    (data / "sts-dev.csv").unlink()
    if content is not None:
        (data / "sts-dev.csv").write_bytes(content)
    with pytest.raises((DataError, UsageError)) as caught:
        sentences.read_pairs(data)
    assert asked in caught.value.asked
    assert found in caught.value.found
    assert fix in caught.value.fix


REFUSED = {
    "no such folder": (["--data", "nowhere"], "--data nowhere", "no such folder", "ixa2.si.ehu.eus"),
    "one sample": (["--batch-size", "1"], "--batch-size 1", "at least 2", "2 or more"),
    "a batch larger than the data": (["--batch-size", "99"], "--batch-size 99", "45 training pairs", "smaller batch"),
    "cold": (["--temperature", "0"], "--temperature 0.0", "above 0", "--temperature 0.05"),
    "no weight": (["--negatives", "nan"], "--negatives nan", "0 or more", "--negatives 0.1"),
    "a full folder": (["--index", "."], "can't export to .", "something else", "name a new folder"),
    "no folder": (["--output", "no/o.json"], "--output no/o.json", "there is no folder no", "make the folder"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_flag_is_refused_before_training(case, data, monkeypatch):
    words, asked, found, fix = REFUSED[case]
    monkeypatch.chdir(data)
    monkeypatch.setattr(sys, "argv", ["workload.py", "--data", str(data), *words])
    with on_path(), pytest.raises(UsageError) as caught:
        runpy.run_path(str(EXAMPLE / "workload.py"), run_name="__main__")
    assert asked in caught.value.asked
    assert found in caught.value.found
    assert fix in caught.value.fix


# The model, the loss and the index


def test_features_are_words_and_their_parts():
    one, two = sentences.features_of("A cat!"), sentences.features_of("a CAT !")
    assert one == two
    assert len(one) == 1 + 1 + 1 + 3 + 1  # a, <a>, cat, <ca cat at>, !
    assert min(one) > 0
    assert max(one) < sentences.BUCKETS
    assert sentences.features_of(" ") == [1]
    assert len(sentences.features_of("long words " * 500)) == sentences.LENGTH


def test_padding_has_no_weight():
    torch.manual_seed(0)
    model = encoder.Encoder(8).double()
    features = sentences.padded(sentences.features_of("a cat"))[None]
    with torch.no_grad():
        before = model(features)
        model.vectors.weight[0] = 9
        torch.testing.assert_close(model(features), before, rtol=0, atol=0)
        torch.testing.assert_close(model(features[:, :10]), before, rtol=0, atol=1e-14)


def test_the_loss_is_that_of_the_whole_batch_and_gradients_flow_to_the_candidates():
    class OneRank:
        data_rank = 0

        def all_gather(self, tensor, grad=False):
            return tensor if grad else tensor.detach()

    torch.manual_seed(0)
    model = encoder.Encoder(8).double()
    pairs = sentences.Pairs(sentences.make_up(9, "a"))
    features = torch.stack([pairs[row][0] for row in range(9)])
    scores = torch.tensor(pairs.scores, dtype=torch.float64)
    is_high = scores >= 0.8
    assert 0 < is_high.sum() < 9
    parameters = [*model.parameters()]
    here = workload.loss_of(OneRank(), model, (features, scores), 0.1, 0.5)
    first, second = model(features[:, 0]), model(features[:, 1])
    chances = (first @ second.T / 0.1).log_softmax(1).diagonal()
    loss = ((first * second).sum(1) - scores).pow(2).mean() - 0.5 * chances[is_high].mean()
    torch.testing.assert_close(here, loss, rtol=0, atol=1e-12)
    gradients = [torch.autograd.grad(one, parameters) for one in (here, loss)]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-12)


def test_the_index_finds_what_brute_force_finds():
    torch.manual_seed(0)
    embedded = torch.nn.functional.normalize(torch.randn(300, 16), dim=1)
    index = vectors.build(embedded)
    assert vectors.recall(index, embedded, embedded[:50], 10) > 0.95
    worse = torch.nn.functional.normalize(torch.randn(300, 16), dim=1)
    assert vectors.recall(index, worse, worse[:50], 10) < 0.2


def test_a_folder_that_is_no_index_is_named(tmp_path, capsys, monkeypatch):
    words = [sys.executable, EXAMPLE / "search.py", tmp_path, "a query"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 2
    assert "it has no index.usearch, sentences.txt, model.safetensors" in done.stderr
    assert "fix: write one with `python workload.py --index" in done.stderr


# Whole jobs


def play(rank: int, words: list[str], plan: str) -> list[np.ndarray]:
    """The example's file as a rank runs it; the parameters at the end."""
    import paceline
    from paceline.nouns.plan import Plan

    os.environ["PACELINE_PLAN"] = json.dumps(asdict(Plan.parse(plan)))
    sys.argv = [str(EXAMPLE / "workload.py"), *words]
    sys.path.insert(0, str(EXAMPLE))
    jobs, prepare = [], paceline.prepare

    def watched(*objects, **options):
        prepared = prepare(*objects, **options)
        jobs.append(prepared[0])
        return prepared

    paceline.prepare = watched
    runpy.run_path(sys.argv[0], run_name="__main__")
    (job,) = jobs
    assert job.step_number == STEPS
    return [job.parallel.whole(parameter).detach().numpy().copy() for parameter in job.model.parameters()]


def train(folder: Path, data: Path, plan: str) -> tuple[list[np.ndarray], dict]:
    """The parameters that all ranks end with, and the result."""
    from paceline.nouns.plan import Plan

    output = folder / f"{plan}.json"
    words = ["--data", str(data), *SMALL, "--output", str(output), "--index", str(folder / plan)]
    by_rank = run_ranks(Plan.parse(plan).world_size, play, words, plan)
    for other in by_rank[1:]:
        assert all(np.array_equal(*pair) for pair in zip(by_rank[0], other, strict=True))
    return by_rank[0], json.loads(output.read_text())


def check_plan(folder: Path, data: Path, plans: tuple[str, ...]) -> None:
    """Each plan ends with the parameters, scores and index of one rank."""
    alone, result = train(folder, data, "replicate=1")
    assert result["steps"] == STEPS
    assert result["data"] == "STS-B, 45 training and 12 test pairs"
    searched = vectors.Search(folder / "replicate=1").nearest("A small cat", 5)
    assert len(searched) == 5
    for plan in plans:
        parameters, other = train(folder, data, plan)
        for here, there in zip(parameters, alone, strict=True):
            np.testing.assert_allclose(here, there, rtol=0, atol=1e-9, err_msg=plan)
        assert other["scores"] == pytest.approx(result["scores"], abs=1e-5), plan
        found = vectors.Search(folder / plan).nearest("A small cat", 5)
        assert [text for _, text in found] == [text for _, text in searched]


@pytest.mark.slow
def test_two_ranks_end_as_one_does_and_write_the_same_index(tmp_path, data):
    check_plan(tmp_path, data, ("replicate=2", "shard=2,zero=1", "shard=2"))


@pytest.mark.integration
def test_more_ranks_end_as_one_does(tmp_path, data):
    check_plan(tmp_path, data, ("replicate=4", "tensor=2", "replicate=2,shard=2"))


def small(folder: Path, data: Path, more: str = "") -> Path:
    """The example as a file with arguments of its own: `paceline verify` hands none on."""
    file = folder / "small.py"
    first, line, rest = (EXAMPLE / "workload.py").read_text().partition("from __future__ import annotations\n")
    words = ["--data", str(data), *SMALL]
    begin = f"import sys\nsys.argv[1:] = {words!r} + sys.argv[1:]\nsys.path.insert(0, {str(EXAMPLE)!r})\n"
    file.write_text(f"{first}{line}{begin}{more}{rest}")
    return file


VERIFIED = [
    pytest.param("replicate=2", marks=pytest.mark.slow),
    *(pytest.param(plan, marks=pytest.mark.integration) for plan in ("shard=2", "tensor=2")),
]


@pytest.mark.parametrize("plan", VERIFIED)
def test_verify_finds_the_steps_of_two_ranks_those_of_one(tmp_path, data, plan):
    ended = paceline(tmp_path, "verify", "--plan", plan, small(tmp_path, data))
    assert ended.code == 0, ended.out + ended.err
    assert re.search(r"^step float64 +ok ", ended.out, re.MULTILINE), ended.out


# Ends as kill -9 does, after its fifth step, once.
KILL = """
import os, signal
from paceline.train.loop_job import LoopJob
plain_end_step = LoopJob.end_step
def end_step(job):
    plain_end_step(job)
    if job.step_number == int(os.environ.get("KILL_AT", -1)):
        os.kill(os.getpid(), signal.SIGKILL)
LoopJob.end_step = end_step
"""


@pytest.mark.integration
def test_a_killed_job_goes_on_where_it_was(tmp_path, data):
    file = small(tmp_path, data, KILL)
    for name in ("whole", "killed"):
        flags = ("-n", "2", "--job", name)
        words = (file, "--index", tmp_path / name)
        if name == "killed":
            killed = paceline(tmp_path, "run", *flags, "--checkpoint-every", "2", *words, KILL_AT="5")
            assert killed.code == 1, killed.err
            flags += ("--resume",)
        ended = paceline(tmp_path, "run", *flags, *words)
        assert ended.code == 0, ended.err
    assert "goes on at step-0000000" in ended.err
    models = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "killed")]
    assert models[0] == models[1]

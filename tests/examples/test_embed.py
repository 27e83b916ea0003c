"""The embedding example: rows are read or named, N ranks end where one does, and the index finds the nearest."""

from __future__ import annotations

import hashlib
import json
import lzma
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.nouns.errors import DataError, UsageError

from support.jobs import paceline
from support.ranks import preload, run_ranks
from support.trainings import KILL, check_plans, check_verified, load, play, run_main, with_words

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")
pytest.importorskip("usearch")
pytest.importorskip("torchmetrics")
preload("paceline.train.loop_job", "torchmetrics")
ROOT = Path(__file__).parents[2]
SHARED = ROOT.parent / "shared" / "data" / "glue" / "STS-B"
COUNTS = {"train": 45, "dev": 13, "test": 12}
SMALL = ("--batch-size", "11", "--epochs", "2", "--width", "4", "--precision", "float64")
STEPS = 8
sentences, encoder, vectors, figure, search, workload = load(
    "embed", "sentences", "encoder", "vectors", "figure", "search", "workload"
)


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
    "nothing left": (["--drop", "1"], "--drop 1.0", "a share below 1", "--drop 0.2"),
    "no steps": (["--steps", "0"], "--steps 0", "at least 1", "--steps 1 or more"),
    "no rate": (["--lr", "0"], "--lr 0.0", "above 0", "--lr 0.001"),
    "a full folder": (["--index", "."], "--index .", "something else", "name a new folder"),
    "no folder": (["--output", "no/o.json"], "--output no/o.json", "there is no folder no", "make the folder"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_flag_is_refused_before_training(case, data, monkeypatch):
    words, asked, found, fix = REFUSED[case]
    monkeypatch.chdir(data)
    with pytest.raises(UsageError) as caught:
        run_main("embed", ["--data", data, *words])
    assert asked in caught.value.asked
    assert found in caught.value.found
    assert fix in caught.value.fix


def test_embed_refuses_test_pairs_without_a_new_sentence():
    pairs = sentences.make_up(9, "a")
    with pytest.raises(DataError, match="test pairs with new sentences\n  found: all of them are in training"):
        workload.Report({"train": pairs, "dev": [], "test": pairs[3:]}, encoder.Encoder(4))


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


def test_embed_loss_and_gradients_are_those_of_the_whole_batch():
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


def test_features_are_left_out_by_chance_but_never_all():
    torch.manual_seed(0)
    pairs = sentences.make_up(300, "a")
    whole, some = sentences.Pairs(pairs), sentences.Pairs(pairs, drop=0.3)
    kept = {True: 0, False: 0}
    for row in range(len(whole)):
        (before, score), (after, same) = whole[row], some[row]
        assert score == same
        assert torch.equal(before[:, 0], after[:, 0])
        assert bool(((after == before) | (after == 0)).all())
        for is_kept in (after == before)[:, 1:][before[:, 1:] > 0].tolist():
            kept[is_kept] += 1
    assert kept[False] / sum(kept.values()) == pytest.approx(0.3, abs=0.01)
    assert not torch.equal(some[0][0], some[0][0])


def test_the_untrained_cosine_is_that_of_words_in_common():
    torch.manual_seed(0)
    texts = ["A dog runs.", "A dog sleeps.", "The moon is bright tonight."]
    model = encoder.Encoder(256, sentences.rarity(texts))
    dog, other_dog, moon = vectors.encode(model, texts)
    assert dog.norm() == pytest.approx(1, abs=1e-5)
    assert dog @ other_dog > 0.3
    assert abs(dog @ moon) < 0.3


def test_spearman_is_scipys_with_ties():
    stats = pytest.importorskip("scipy.stats")
    cosines, scores = [0.1, 0.1 + 1e-9, 0.5, 0.2, 0.2, 0.9], [0, 1, 3, 2, 2, 5]
    pairs = [sentences.Pair("a", "b", score) for score in scores]
    asked = stats.spearmanr([round(cosine, 6) for cosine in cosines], scores).statistic
    assert workload.spearman(pairs, torch.tensor(cosines, dtype=torch.float64)) == pytest.approx(asked, abs=1e-6)


def test_the_index_finds_what_brute_force_finds():
    torch.manual_seed(0)
    embedded = torch.nn.functional.normalize(torch.randn(300, 16), dim=1)
    queries = torch.nn.functional.normalize(torch.randn(50, 16), dim=1)
    index = vectors.build(embedded)
    assert vectors.recall(index, embedded, queries, 10) > 0.95
    others = torch.nn.functional.normalize(torch.randn(300, 16), dim=1)
    assert vectors.recall(index, others, queries, 10) < 0.2
    # Fifteen that are equally near: any ten of them are right.
    assert vectors.recall(vectors.build(embedded[:1].expand(15, -1)), embedded[:1].expand(15, -1), queries, 10) == 1
    # Fewer than are asked for.
    assert vectors.recall(vectors.build(embedded[:3]), embedded[:3], queries, 10) == 1


TEXTS = ["A man plays a guitar.", "Two  spaces,\u2028one \rline", "El niño canta."]


def write_index(folder: Path, seed: int = 0) -> Path:
    from safetensors.torch import save_file

    folder.mkdir()
    torch.manual_seed(seed)
    model = encoder.Encoder(8)
    save_file(model.state_dict(), folder / vectors.MODEL)
    vectors.write(folder, vectors.build(vectors.encode(model, TEXTS)), TEXTS)
    return folder


def test_a_search_finds_the_sentence_itself_as_it_was_written(tmp_path):
    found = vectors.Search(write_index(tmp_path / "index"))
    assert found.texts == TEXTS
    assert found.index.expansion_search == vectors.EXPANSION
    for text in TEXTS:
        (cosine, best), *others = found.nearest(text, 10)
        assert best == text
        assert cosine == pytest.approx(1, abs=1e-5)
        assert len(others) == 2


def cut(name: str, end: int | None):
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:end])


def put(name: str, content: bytes):
    return lambda folder: (folder / name).write_bytes(content)


def resum(name: str, content: bytes):
    """Another content, and its checksum in the manifest."""

    def spoil(folder: Path) -> None:
        (folder / name).write_bytes(content)
        manifest = json.loads((folder / vectors.MANIFEST).read_text())
        manifest["sha256"][name] = hashlib.sha256(content).hexdigest()
        (folder / vectors.MANIFEST).write_text(json.dumps(manifest))

    return spoil


def of_another_model(folder: Path) -> None:
    other = write_index(folder.with_name("other"), seed=1)
    (other / vectors.MODEL).replace(folder / vectors.MODEL)


# How the folder is spoilt, the exit code, and what the error says: asked and found.
SPOILT = {
    "no folder": (lambda folder: folder.rename(folder.with_name("x")), 2, "should be an index", "no such folder"),
    "no file": (lambda folder: (folder / vectors.INDEX).unlink(), 2, "should be an index", "no index.usearch"),
    "another model": (of_another_model, 1, "the model that made its index", "model.safetensors is another one"),
    "torn index": (cut(vectors.INDEX, -9), 1, "index.usearch is damaged", "SHA-256"),
    "other sentences": (put(vectors.TEXTS, b"a\nb\nc\n"), 1, "sentences.txt is damaged", "SHA-256"),
    "no manifest": (put(vectors.MANIFEST, b"[1"), 1, "manifest.json can't be read", "not what workload.py"),
    "a newer manifest": (
        put(vectors.MANIFEST, b'{"version": 2, "sha256": {}}'),
        1,
        "of version 1",
        "its version is 2",
    ),
    "no index": (resum(vectors.INDEX, b"hello" * 30), 1, "can't be read as an index", "Not a dense USearch index"),
    "no model": (resum(vectors.MODEL, b"hello" * 30), 1, "can't be read as an index", "eader"),
    "fewer sentences": (resum(vectors.TEXTS, b"a\nb\n"), 1, "should be an index", "has 3 of 8 numbers"),
}


@pytest.mark.parametrize("case", SPOILT)
def test_a_spoilt_index_is_one_error(case, tmp_path, capsys, monkeypatch):
    spoil, code, asked, found = SPOILT[case]
    folder = write_index(tmp_path / "index")
    spoil(folder)
    monkeypatch.setattr(sys, "argv", ["search.py", str(folder), "a query"])
    assert search.main() == code
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert len(lines) == 3
    assert asked in lines[0]
    assert found in lines[1]
    assert lines[2] == f"  fix: write it anew: paceline run workload.py --index {folder}"


@pytest.mark.parametrize(
    ("words", "told"), [(["a", "--count", "0"], "--count 0"), ([" "], "a query\n  found: it is empty")]
)
def test_a_query_is_refused(words, told, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["search.py", "index", *words])
    assert search.main() == 2
    assert told in capsys.readouterr().err


def test_a_search_prints_an_aligned_table(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["search.py", str(write_index(tmp_path / "index")), TEXTS[0], "--count", "1"])
    assert search.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [" no  similarity  sentence", "  1       1.000  A man plays a guitar."]
    long = search.table([(0.5, "word " * 20), (-0.25, "short")], width=60).splitlines()
    assert all(len(line) <= 60 for line in long)
    assert [line.index("word") for line in long[1:-1]] == [17] * 3
    assert long[-1] == "  2      -0.250  short"


def test_the_figure_is_small(tmp_path):
    pytest.importorskip("matplotlib")
    given = [0.0, 0.4, 2.5, 5.0, 4.9, 2.6]
    cosines = {"before training": [0.1, 0.2, 0.3, 0.9, 0.8, 0.5], "after": [0.0, 0.1, 0.5, 1.0, 0.9, 0.6]}
    figure.draw(tmp_path / "figure.png", "made-up", given, cosines)
    from PIL import Image

    assert (tmp_path / "figure.png").stat().st_size < 60_000
    with Image.open(tmp_path / "figure.png") as picture:
        assert picture.size == (630, 324)


# Whole jobs


def check_plan(folder: Path, data: Path, plans: tuple[str, ...]) -> None:
    """Each plan ends with the parameters, scores and index of one rank."""
    words = ("--data", data, *SMALL, "--index", folder / "PLAN")
    result = check_plans(folder, "embed", words, plans, scores_within=1e-5)
    assert result["steps"] == STEPS
    assert result["data"] == "STS-B, 45 training and 12 test pairs"
    searched = vectors.Search(folder / "replicate=1").nearest("A small cat", 5)
    assert len(searched) == 5
    for plan in plans:
        found = vectors.Search(folder / plan).nearest("A small cat", 5)
        assert [text for _, text in found] == [text for _, text in searched]


@pytest.mark.slow
def test_two_ranks_end_as_one_does_and_write_the_same_index(tmp_path, data):
    check_plan(tmp_path, data, ("replicate=2", "shard=2,zero=1", "shard=2"))


@pytest.mark.integration
@pytest.mark.complete  # other plans end as one rank does above
def test_more_ranks_end_as_one_does(tmp_path, data):
    check_plan(tmp_path, data, ("replicate=4", "tensor=2", "replicate=2,shard=2"))


VERIFIED = [
    pytest.param("replicate=2", marks=pytest.mark.slow),
    *(pytest.param(plan, marks=pytest.mark.integration) for plan in ("shard=2", "tensor=2")),
]


@pytest.mark.parametrize("plan", VERIFIED)
@pytest.mark.complete  # loops that are verified: test_loops.py, test_racer.py
def test_verify_finds_the_steps_of_two_ranks_those_of_one(tmp_path, data, plan):
    check_verified(tmp_path, "embed", ("--data", data, *SMALL), plan)


@pytest.mark.integration
@pytest.mark.complete  # loops that are killed: test_loops.py, test_distil.py
def test_a_killed_job_goes_on_where_it_was(tmp_path, data):
    file = with_words(tmp_path, "embed", ("--data", data, *SMALL), KILL)
    for name in ("whole", "killed"):
        flags = ("--plan", "shard=2", "--job", name)
        words = (file, "--index", tmp_path / name)
        if name == "killed":
            killed = paceline(tmp_path, "run", *flags, "--checkpoint-every", "2", *words, KILL_AT="5")
            assert killed.code == 1, killed.err
            flags += ("--resume",)
        ended = paceline(tmp_path, "run", *flags, *words)
        assert ended.code == 0, ended.err
    assert re.search("goes on at step-0000000[24]", ended.err)
    for file in (vectors.MODEL, vectors.INDEX, vectors.TEXTS, vectors.MANIFEST):
        assert (tmp_path / "whole" / file).read_bytes() == (tmp_path / "killed" / file).read_bytes()


@pytest.mark.slow
def test_a_batch_smaller_than_the_ranks_is_refused(tmp_path, data):
    words = ["--data", str(data), *SMALL, "--batch-size", "2"]
    with pytest.raises(AssertionError, match="3 ranks share it, and each needs a sample of its own\n  fix: write 3 or"):
        run_ranks(3, play, "embed", words, "replicate=3")

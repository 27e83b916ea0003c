"""The GLUE example: rows are read or named, and the metrics are those of all ranks' counts."""

from __future__ import annotations

import importlib.util
import json
import lzma
import os
import random
import runpy
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from paceline.nouns.errors import DataError, UsageError

from support.jobs import Ended, paceline
from support.ranks import preload, run_ranks

preload("torchmetrics.classification")
ROOT = Path(__file__).parent.parent.parent
EXAMPLE = ROOT / "examples" / "glue"
SHARED = ROOT.parent / "shared" / "data"
WORDS = "a the dog cat bird saw heard fed not never often old small red"
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS.split(), "."]
TRAIN, DEV = 64, 37  # 37: the ranks' shares of the last batch differ
SAME = ("--batch-size", "8", "--epochs", "6", "--lr", "1e-3", "--precision", "float64")


def load(name: str) -> ModuleType:
    """A file of the example, under a name of its own: other examples have files of the same name."""
    spec = importlib.util.spec_from_file_location(f"glue_{name}", EXAMPLE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


tasks = load("tasks")


def sentence(row: int) -> str:
    """A made-up sentence of 4 to 9 words, another for every row."""
    return " ".join(random.Random(row).choices(WORDS.split(), k=4 + row % 6)) + " ."


def label_of(row: int) -> int:
    """Whether the sentence is negated: something to learn; one in seven labels is wrong, so that not all is right."""
    return int(bool({"not", "never"} & {*sentence(row).split()}) != (row % 7 == 3))


def cola_row(row: int) -> str:
    return f"xx{row:02d}\t{label_of(row)}\t\t{sentence(row)}\n"


def sts_row(row: int) -> str:
    first, second = sentence(row), sentence(row * 3 + 1)
    shared = len({*first.split()} & {*second.split()}) / len({*first.split()} | {*second.split()})
    return f"made-up\tfile\t2026\t{row}\t{5 * shared:.3f}\t{first}\t{second}\n"


@pytest.fixture
def data(tmp_path):
    """A folder of two made-up tasks and their vocabulary."""
    folder = tmp_path / "data"
    for task, row, names in (
        ("CoLA", cola_row, ("train.tsv", "dev.tsv")),
        ("STS-B", sts_row, ("sts-train.csv", "sts-dev.csv")),
    ):
        (folder / task).mkdir(parents=True)
        (folder / task / names[0]).write_text("".join(map(row, range(TRAIN))))
        (folder / task / names[1]).write_text("".join(map(row, range(TRAIN, TRAIN + DEV))))
    (folder / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n")
    return folder


def run(folder: Path, ranks: int, *words: str | Path, timeout: float = 240) -> Ended:
    """The example on `ranks` ranks. transformers loads torch's compiler, which makes its cache folder at once."""
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "compiler")}
    return paceline(folder, "run", "-n", str(ranks), EXAMPLE / "workload.py", *words, timeout=timeout, **cache)


def play(rank: int, words: list[str]) -> None:
    """The example's file as a rank runs it."""
    sys.argv = [str(EXAMPLE / "workload.py"), *words]
    sys.path.insert(0, str(EXAMPLE))
    runpy.run_path(sys.argv[0], run_name="__main__")


def result_of(folder: Path, ranks: int, *words: str | Path) -> tuple[dict, list[list[float]]]:
    """The result's JSON and the predictions' rows of one run.

    On ranks of the tests' fork server, which has imported transformers; `paceline run` would do so in every job.
    """
    output, predictions = folder / f"{ranks}.json", folder / f"{ranks}.tsv"
    run_ranks(ranks, play, [*map(str, words), "--output", str(output), "--predictions", str(predictions)])
    return json.loads(output.read_text()), rows_of(predictions)


def rows_of(predictions: Path) -> list[list[float]]:
    """The numbers of the predictions' file."""
    return [[float(cell) for cell in line.split("\t")] for line in predictions.read_text().splitlines()[1:]]


# Reading


def write(folder: Path, task: str, name: str, content: str | bytes) -> Path:
    path = folder / task / name
    path.parent.mkdir(parents=True, exist_ok=True)
    content = content.encode() if isinstance(content, str) else content
    path.write_bytes(lzma.compress(content) if name.endswith(".xz") else content)
    return path


PAIRS = "index\tsentence1\tsentence2\tlabel\n"


@pytest.mark.parametrize(
    ("task", "name", "content", "first"),
    [
        ("CoLA", "train.tsv", 'gj04\t1\t\tHe said "no.\n', (('He said "no.',), 1)),
        ("CoLA", "train.tsv", "gj04\t0\t*\tThe last line has no end.", (("The last line has no end.",), 0)),
        ("CoLA", "train.tsv.xz", "gj04\t1\t\tIt is packed.\r\n", (("It is packed.",), 1)),
        ("CoLA", "train.tsv", "gj04\t1\t\tOne\u2028sentence\x85still.\n", (("One\u2028sentence\x85still.",), 1)),
        ("SST-2", "train.tsv", "sentence\tlabel\na fine film \t1\n", (("a fine film ",), 1)),
        (
            "MRPC",
            "train.tsv",
            '\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n1\t7\t8\t"A b.\tA "b".\n',
            (('"A b.', 'A "b".'), 1),
        ),
        ("RTE", "train.tsv", PAIRS + "0\tA b.\tA.\tnot_entailment\n", (("A b.", "A."), 1)),
        ("RTE", "train.tsv", PAIRS + "0\tA b.\tA.\tentailment\n", (("A b.", "A."), 0)),
        ("STS-B", "sts-train.csv", "g\tf\ty\t1\t4.250\tA.\tB.\tlicence\tmore\n", (("A.", "B."), 4.25)),
        ("STS-B", "train.tsv", "index\tsentence1\tsentence2\tscore\n0\tA.\tB.\t5\n", (("A.", "B."), 5.0)),
    ],
)
def test_a_row_is_read_as_it_stands(tmp_path, task, name, content, first):
    task = tasks.find_task(task)
    write(tmp_path, task.name, name, content)
    write(tmp_path, task.name, name.replace("train", "dev"), content)
    train, dev = tasks.read_task(task, tmp_path)
    assert [(example.texts, example.label) for example in train] == [first]
    assert dev == train


@pytest.mark.parametrize(
    ("task", "content", "line", "found"),
    [
        ("CoLA", "gj04\t1\t\tFine.\ngj04\t1\tNot fine.\n", 2, "found: it has 3\n"),
        ("CoLA", "gj04\t1\t\tFine.\n\ngj04\t1\t\tFine.\n", 2, "found: it has 1\n"),
        ("CoLA", "gj04\t2\t\tWhich label?\n", 1, "column 2 holds '2'"),
        ("CoLA", b"gj04\t1\t\tFine.\ngj04\t1\t\tNo UTF-8: \xff\n", 2, "byte 19 is no part of it"),
        ("SST-2", "sentence\tlabel\nfine \t1\na tab\ttoo many \t0\n", 3, "found: it has 3\n"),
        ("SST-2", "fine \t1\n", 1, "sentence, label is not among its columns"),
        ("SST-2", "", 1, "sentence, label is not among its columns"),
        ("RTE", PAIRS + "0\tA.\tB.\tmaybe\n", 2, "column 4 holds 'maybe'"),
        ("MRPC", "Quality\t#1 ID\n1\t7\n", 1, "#1 String, #2 String is not among its columns"),
        ("STS-B", "index\tsentence1\tsentence2\tscore\n0\tA.\tB.\t5.1\n", 2, "column 4 holds '5.1'"),
        ("STS-B", "index\tsentence1\tsentence2\tscore\n0\tA.\tB.\tnan\n", 2, "column 4 holds 'nan'"),
        ("STS-B", "index\tsentence1\tsentence2\tscore\n0\tA.\tB.\t\n", 2, "column 4 holds ''"),
    ],
)
def test_a_broken_row_is_named_by_file_and_line(tmp_path, task, content, line, found):
    path = write(tmp_path, task, "train.tsv", content)
    write(tmp_path, task, "dev.tsv", content)
    with pytest.raises(DataError) as caught:
        tasks.read_task(tasks.find_task(task), tmp_path)
    assert str(caught.value).startswith(f"{path}, line {line}: ")
    assert found in str(caught.value)


def test_a_torn_archive_is_named(tmp_path):
    path = write(tmp_path, "CoLA", "train.tsv.xz", cola_row(1) * 50)
    path.write_bytes(path.read_bytes()[:-20])
    write(tmp_path, "CoLA", "dev.tsv", cola_row(2))
    with pytest.raises(DataError, match=r"train\.tsv\.xz should be xz-compressed"):
        tasks.read_task(tasks.find_task("CoLA"), tmp_path)


def test_the_limit_leaves_the_dev_set_whole(data):
    train, dev = tasks.read_task(tasks.find_task("CoLA"), data, limit_train=5)
    assert (len(train), len(dev)) == (5, DEV)


@pytest.mark.parametrize("spelling", ["STS-B", "sts-b", "stsb"])
def test_a_task_is_found_in_each_spelling(spelling):
    assert tasks.find_task(spelling).name == "STS-B"


def test_an_unknown_task_says_what_was_meant():
    with pytest.raises(UsageError, match="did you mean 'CoLA'"):
        tasks.find_task("CoAL")
    with pytest.raises(UsageError, match="write one of these"):
        tasks.find_task("squad")


def test_missing_files_say_what_is_there(tmp_path, data):
    cola = tasks.find_task("CoLA")
    with pytest.raises(UsageError, match=r"there is no such folder\n  fix: take CoLA from"):
        tasks.read_task(cola, tmp_path / "nowhere")
    with pytest.raises(UsageError, match=rf"own folder\n  fix: write --data {data}"):
        tasks.read_task(cola, data / "CoLA")
    with pytest.raises(UsageError, match="it has no folder QNLI"):
        tasks.read_task(tasks.find_task("QNLI"), data)
    write(data, "QNLI", "dev.tsv.xz", "index\tquestion\tsentence\tlabel\n")
    with pytest.raises(
        UsageError, match=r"needs .*train.tsv \(or train.tsv.xz\)\n  found: the folder holds dev.tsv.xz"
    ):
        tasks.read_task(tasks.find_task("QNLI"), data)


def test_without_data_the_hub_is_asked(monkeypatch):
    def load_dataset(name, task):
        assert (name, task) == ("nyu-mll/glue", "mrpc")
        rows = [{"sentence1": "A.", "sentence2": "B.", "label": 1, "idx": 0}]
        return {"train": rows * 3, "validation": rows}

    mrpc = tasks.find_task("MRPC")
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    train, dev = tasks.read_task(mrpc, None, limit_train=2)
    assert [*train, *dev] == [tasks.Example(("A.", "B."), 1)] * 3

    def unreachable(name, task):
        raise ConnectionError("Couldn't reach the hub\nand more")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=unreachable))
    with pytest.raises(UsageError, match=r"ConnectionError: Couldn't reach the hub\)\n  fix: pass --data DIR"):
        tasks.read_task(mrpc, None)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UsageError, match=r"`datasets` is not installed\n  fix: pass --data DIR"):
        tasks.read_task(mrpc, None)


# The model and the metrics


def test_padding_does_not_change_the_logits(data):
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    encoder = load("encoder")
    tokenizer = encoder.open_tokenizer(data / "vocab.txt", None, 16)
    rows = encoder.Encoded(tokenizer, [("a dog .", "the cat"), (sentence(5), sentence(11))], [0, 1])
    torch.manual_seed(0)
    model = encoder.make_model(None, encoder.open_config(None, 2, 0.0, len(VOCABULARY))).double().eval()
    collate = encoder.pad_with(0, has_segments=True)
    both = encoder.logits_of(model, collate([rows[0], rows[1]]))
    assert collate([rows[0], rows[1]])["inputs"]["attention_mask"].sum(1).tolist() == [8, 16]
    for row in (0, 1):
        torch.testing.assert_close(
            both[row : row + 1], encoder.logits_of(model, collate([rows[row]])), rtol=0, atol=1e-14
        )


def test_a_vocabulary_that_is_none_and_a_model_that_is_none(data, tmp_path):
    encoder = load("encoder")
    (tmp_path / "words.txt").write_text("one\ntwo\n")
    with pytest.raises(UsageError, match=r"it lacks \[PAD\], \[UNK\], \[CLS\], \[SEP\]"):
        encoder.open_tokenizer(tmp_path / "words.txt", None, 16)
    with pytest.raises(UsageError, match="neither --tokenizer nor --model is given"):
        encoder.open_tokenizer(None, None, 16)
    with pytest.raises(UsageError, match="there is no such folder"):
        encoder.check_checkpoint(tmp_path / "bert-base-uncased")
    with pytest.raises(UsageError, match="it has no config"):
        encoder.check_checkpoint(data)
    tokenizer, config = encoder.open_tokenizer(data / "vocab.txt", None, 16), encoder.open_config(None, 2, 0.0, 5)
    with pytest.raises(UsageError, match="a tokenizer of 20 tokens\n  found: the model knows 5"):
        encoder.check_fits(config, tokenizer, 16)
    with pytest.raises(UsageError, match="write --max-length 512 or less"):
        encoder.check_fits(config, tokenizer, 513)


@pytest.mark.parametrize("guesses", [[1, 1, 1, 1], [0, 0, 0, 0], [1, 0, 0, 1], [0, 1, 1, 0], [1, 1, 0, 1]])
@pytest.mark.parametrize("labels", [[1, 1, 0, 1], [1, 1, 1, 1], [1, 0, 0, 1]])
def test_matthews_correlation_is_scikit_learns(guesses, labels):
    torch = pytest.importorskip("torch")
    measures = pytest.importorskip("sklearn.metrics")
    metric = load("scores").MatthewsCorrelation()
    metric.update(torch.tensor(guesses), torch.tensor(labels))
    with pytest.warns() if len({*guesses, *labels}) == 1 else pytest.MonkeyPatch.context():
        expected = measures.matthews_corrcoef(labels, guesses)
    assert float(metric.compute()) == pytest.approx(expected, abs=1e-12)


def check_classes(result: dict, rows: list[list[float]]) -> None:
    """Hold the reported metrics against scikit-learn's, of the predictions of all ranks."""
    measures = pytest.importorskip("sklearn.metrics")
    assert [row for row, _, _ in rows] == list(range(len(rows)))
    labels, guesses = [label for _, label, _ in rows], [guess for _, _, guess in rows]
    dev = result["dev"]
    assert dev["samples"] == len(rows)
    assert dev["confusion"]["rows"] == measures.confusion_matrix(labels, guesses, labels=[0, 1]).tolist()
    expected = {
        "accuracy": measures.accuracy_score(labels, guesses),
        "precision": measures.precision_score(labels, guesses, zero_division=0),
        "recall": measures.recall_score(labels, guesses),
        "f1": measures.f1_score(labels, guesses),
        "matthews": measures.matthews_corrcoef(labels, guesses),
    }
    assert {name: dev[name] for name in expected} == pytest.approx(expected, abs=1e-6)


# Whole jobs


@pytest.mark.slow
def test_one_rank_and_two_report_the_same(data, tmp_path):
    words = ("--task", "CoLA", "--data", data, "--tokenizer", data / "vocab.txt", *SAME)
    one, rows_of_one = result_of(tmp_path, 1, *words)
    two, rows_of_two = result_of(tmp_path, 2, *words)
    assert (one["ranks"], two["ranks"], one["steps"], two["steps"]) == (1, 2, 48, 48)
    assert [int(label) for _, label, _ in rows_of_one] == [label_of(TRAIN + row) for row in range(DEV)]
    assert rows_of_one == rows_of_two
    assert one["dev"].pop("loss") == pytest.approx(two["dev"].pop("loss"), rel=1e-10)
    assert one["dev"] == two["dev"]
    (true_0, false_1), (false_0, true_1) = two["dev"]["confusion"]["rows"]
    assert min(true_0, true_1) > 0 < false_0 + false_1, "it has learned something, but not all"
    check_classes(two, rows_of_two)


@pytest.mark.slow
def test_a_regression_alone_and_on_two_ranks(data, tmp_path):
    stats = pytest.importorskip("scipy.stats")
    words = ["--task", "STS-B", "--data", data, "--tokenizer", data / "vocab.txt", *SAME]
    alone = [sys.executable, EXAMPLE / "workload.py", *words, "--output", tmp_path / "alone.json"]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}  # several would wait for each other where cores are few
    done = subprocess.run(alone, cwd=tmp_path, capture_output=True, text=True, timeout=240, env=one_thread)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("STS-B: 48 steps on 1 rank")
    one = json.loads((tmp_path / "alone.json").read_text())
    two, rows = result_of(tmp_path, 2, *words)
    _, labels, guesses = zip(*rows, strict=True)
    dev = two["dev"]
    assert {**dev, "spearman": 0} == pytest.approx({**one["dev"], "spearman": 0}, rel=1e-9)
    assert dev["spearman"] == pytest.approx(one["dev"]["spearman"], abs=1e-6)  # torchmetrics ranks in float32
    assert dev["pearson"] == pytest.approx(stats.pearsonr(labels, guesses)[0], abs=1e-9)
    assert dev["spearman"] == pytest.approx(stats.spearmanr(labels, guesses)[0], abs=1e-5)


@pytest.mark.slow
def test_a_broken_row_ends_the_job_before_it_trains(data, tmp_path):
    path = data / "CoLA" / "dev.tsv"
    path.write_text(path.read_text() + "xx99\t1\tno sentence\n")
    done = run(tmp_path, 2, "--task", "CoLA", "--data", data, "--tokenizer", data / "vocab.txt")
    assert done.code == 1
    assert f"{path}, line {DEV + 1}: a row of 4 columns separated by tabs\n  found: it has 3\n" in done.err
    assert "fix: mend that line or take it out" in done.err
    assert "Traceback" not in done.err
    assert "step 1/" not in done.err


@pytest.mark.slow
def test_a_checkpoint_of_transformers_is_fine_tuned(data, tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=len(VOCABULARY), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    folder = tmp_path / "checkpoint"
    transformers.BertForMaskedLM(config).save_pretrained(folder)
    (folder / "vocab.txt").write_text((data / "vocab.txt").read_text())
    words = ("--task", "CoLA", "--data", data, "--model", folder, "--batch-size", "8", "--steps", "4")
    output, predictions = tmp_path / "result.json", tmp_path / "predictions.tsv"
    done = run(tmp_path, 2, *words, "--output", output, "--predictions", predictions)
    assert done.code == 0, done.err
    result, rows = json.loads(output.read_text()), rows_of(predictions)
    assert (result["steps"], result["ranks"]) == (4, 2)
    check_classes(result, rows)


@pytest.mark.slow
@pytest.mark.skipif(not (SHARED / "glue" / "CoLA").is_dir(), reason="the real CoLA is not here")
@pytest.mark.complete  # the same of made-up rows above
def test_real_cola(tmp_path):
    words = ["--task", "CoLA", "--data", SHARED / "glue", "--limit-train", "256", "--epochs", "1"]
    words += ["--precision", "float64", "--max-length", "32"]
    words += ["--tokenizer", SHARED / "tokenizers" / "bert-base-uncased-vocab.txt", "--lr", "1e-3"]
    one, rows_of_one = result_of(tmp_path, 1, *words)
    two, rows_of_two = result_of(tmp_path, 2, *words)
    assert two["dev"]["samples"] == 1043
    assert rows_of_one == rows_of_two
    assert one["dev"].pop("loss") == pytest.approx(two["dev"].pop("loss"), rel=1e-10)
    assert one["dev"] == two["dev"]
    check_classes(two, rows_of_two)

"""The demo's parts: the text, the BERT against transformers' own, and the whole command."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.cli.main import main
from paceline.demo import corpus as corpus_module
from paceline.demo.bert import Bert
from paceline.demo.corpus import (
    CLS,
    LENGTH,
    MASK,
    MASKED,
    MASKED_HELD_OUT,
    PAD,
    SEP,
    VOCABULARY,
    held_out_files,
    open_tokenizer,
    prepare,
    read_corpus,
)
from paceline.demo.demo_workload import (
    EVALUATED,
    IGNORED,
    SIZES,
    MaskedSequences,
    guess,
    save_for_transformers,
)
from paceline.demo.lines import LINES, LONGEST, SHORTEST, Line, choose_lines, first_line, read_lines, write_lines
from paceline.demo.report import draw_curve, filled_in, next_commands, summary, table, terminal_curve
from paceline.nouns.errors import DataError

from support.jobs import paceline

WORKLOAD = Path(corpus_module.__file__).with_name("demo_workload.py")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    return folder, prepare(folder)


def test_the_text_is_the_standard_librarys_and_held_out_by_file(text):
    folder, corpus = text
    train, held_out = np.load(folder / "train.npy"), np.load(folder / "held_out.npy")
    assert train.shape == (corpus.sequences, LENGTH)
    assert corpus.sequences > 10_000
    assert 0.02 < corpus.held_out_files / corpus.files < 0.25
    assert (train[:, 0] == CLS).all()
    assert (train[:, -1] == SEP).all()
    assert max(train.max(), held_out.max()) < VOCABULARY
    assert prepare(folder) == corpus


def test_text_of_other_sizes_is_made_again(tmp_path, monkeypatch):
    """An earlier version's folder has numbers that this vocabulary lacks."""
    monkeypatch.setattr(
        corpus_module, "_texts", lambda: (["def names(of): return of\n" * 40], ["names = names\n" * 40])
    )
    made = prepare(tmp_path)
    facts = json.loads((tmp_path / "corpus.json").read_text())
    for change in ({"vocabulary": 4096}, {"length": 32}, {"vocabulary": None, "length": None}):
        old = {key: value for key, value in {**facts, "files": 99, **change}.items() if value is not None}
        (tmp_path / "corpus.json").write_text(json.dumps(old))
        assert prepare(tmp_path) == read_corpus(tmp_path) == made
    (tmp_path / "corpus.json").write_text("{")
    with pytest.raises(DataError, match="it is made again"):
        prepare(tmp_path)


def test_evaluation_takes_sequences_of_every_held_out_file(text):
    folder, corpus = text
    rows, taken = np.load(folder / "held_out.npy"), MaskedSequences(folder / "held_out.npy", limit=EVALUATED).rows
    every = corpus.held_out_sequences // EVALUATED
    assert every >= 2
    assert len(taken) == EVALUATED
    assert (taken == rows[: EVALUATED * every : every]).all()


@pytest.mark.parametrize(("share", "hidden"), [(MASKED, 13), (MASKED_HELD_OUT, 10)])
def test_demo_hides_the_asked_share_of_tokens_but_no_special_one(text, share, hidden):
    folder, _ = text
    data = MaskedSequences(folder / "train.npy", share)
    torch.manual_seed(0)
    rows = [data[index] for index in range(400)]
    assert {int((row["labels"] != IGNORED).sum()) for row in rows} == {hidden}
    for row, tokens in zip(rows, data.rows, strict=False):
        was = torch.from_numpy(tokens.astype("int64"))
        places, counts = row["chosen"], row["labels"] != IGNORED
        assert len(set(places.tolist())) == len(places)
        assert torch.equal(was[places][counts], row["labels"][counts])
        assert not torch.isin(was[places][counts], torch.tensor([CLS, SEP, PAD])).any()
        assert (row["input_ids"][places[counts]] == MASK).all()  # none is left to be seen
        kept = torch.ones(len(was), dtype=torch.bool)
        kept[places[counts]] = False
        assert torch.equal(row["input_ids"][kept], was[kept])


FILE = '''"""Of names(not_in_a_function)."""
outside = names(in_no_function_at_all)
def function(names):
    """Sort the names in this docstring(names)."""
    short(names)
    return [sorted(names_of_many_files_and_folders, key=names)]
    sorted_of_names(in_two_rows,
        names)
    # a comment is no statement, even with (names)
    a, b, c, d, e, f = 1, 2, 3, 4, 5
    found = sorted(names)  + [1, 2, 3]
    later = sorted(names)  + [1, 2, 3]
'''


def test_the_line_of_a_file_is_chosen_by_the_rule(text):
    """The statements before it are outside a function, too short, too long, in two rows, or without a word."""
    tokenizer = open_tokenizer(text[0])
    line = first_line("a.py", FILE, tokenizer)
    assert (line.left, line.hidden, line.right) == ("found = sorted(", "names", ")  + [1, 2, 3]")
    assert tokenizer.id_to_token(line.answer) == "names"
    assert line.ids.count(MASK) == 1
    assert line.ids[line.place] == MASK
    for none in ("", "def broken(:\n", "def f():\n    a = 1, 2, 3, 4, 5, 6, 7, 8, 9, 10\n"):
        assert first_line("a.py", none, tokenizer) is None


def test_demo_lines_are_held_out_and_tokenized_as_in_training(text):
    tokenizer = open_tokenizer(text[0])
    lines = choose_lines(text[0])
    files = {path.name: path for path in held_out_files()}
    assert len(lines) == LINES
    assert lines == choose_lines(text[0])
    training_texts, _ = corpus_module._texts()
    for line in lines:
        whole = line.left + line.hidden + line.right
        assert SHORTEST <= len(whole) <= LONGEST
        contents = [path.read_text() for path in held_out_files() if path.name == line.file]
        assert any(whole in map(str.strip, content.split("\n")) for content in contents)
        assert line.file in files
        assert not any(content in training_texts for content in contents)
        assert len(line.ids) == LENGTH
        assert (line.ids[0], line.ids[-1], line.ids[line.place]) == (CLS, SEP, MASK)
        body = [*line.ids]
        body[line.place] = line.answer
        trained_on = [tokenizer.encode(content, add_special_tokens=False).ids for content in contents]
        assert any(str(body[1:-1])[1:-1] in str(ids) for ids in trained_on)
        assert tokenizer.id_to_token(line.answer) == line.hidden.lower()


def test_guesses_are_the_models_for_the_hidden_place(tmp_path):
    lines = [Line("a.py", "a", "b", "c", [CLS, 7, MASK, SEP], 2, 9), Line("b.py", "a", "b", "c", [CLS, MASK, 8], 1, 9)]
    write_lines(lines, tmp_path / "lines.json")
    assert read_lines(tmp_path / "lines.json") == lines

    def model(ids, chosen):
        scores = torch.zeros(1, 20)
        scores[0, int(ids.sum() + 10 * chosen.sum()) % 20] = 1
        return scores

    guess(model, tmp_path / "lines.json", tmp_path / "guesses.json")
    expected = [(CLS + 7 + MASK + SEP + 20) % 20, (CLS + MASK + 8 + 10) % 20]
    assert json.loads((tmp_path / "guesses.json").read_text()) == expected
    (tmp_path / "lines.json").write_text("[{}]")
    with pytest.raises(DataError, match=r"lines\.json"):
        read_lines(tmp_path / "lines.json")


def test_the_bert_starts_near_sighted():
    """Near positions are alike, and a token first attends to its like: what a small model learns slowly else."""
    torch.manual_seed(0)
    model = Bert(SIZES)
    positions = model.bert["embeddings"].position_embeddings.weight.detach()
    alike = torch.nn.functional.cosine_similarity(positions[20:21], positions)
    assert alike[20] == pytest.approx(1)
    assert min(alike[19], alike[21]) > 0.9 > 0.8 > alike[40:].max()
    assert float(positions.std()) == pytest.approx(SIZES.initializer_range, rel=0.3)
    for layer in model.bert["encoder"]["layer"]:
        attention = layer.attention["self"]
        assert torch.equal(attention.key.weight, attention.query.weight)
        assert attention.key.weight is not attention.query.weight


def test_the_bert_is_transformers_bert(text, tmp_path):
    import transformers  # here: it takes seconds

    torch.manual_seed(0)
    model = Bert(SIZES).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    save_for_transformers(model, text[0], tmp_path / "model")
    theirs, info = transformers.BertForMaskedLM.from_pretrained(
        tmp_path / "model", local_files_only=True, output_loading_info=True
    )
    assert not info["missing_keys"] - {"cls.predictions.decoder.weight", "cls.predictions.decoder.bias"}, info
    assert not info["unexpected_keys"], info
    ids = torch.randint(5, VOCABULARY, (3, 20))
    with torch.no_grad():
        torch.testing.assert_close(
            model(ids).view(3, 20, -1), theirs.eval()(input_ids=ids).logits, rtol=1e-4, atol=1e-4
        )
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model", local_files_only=True)
    assert tokenizer("def main():")["input_ids"][0] == CLS


def test_the_curve_and_the_table_line_up():
    assert terminal_curve([3.0, 2.0, 1.0]) == "3.00 █▅▁ 1.00"
    rows = summary({"loss": 8.0}, {"loss": 5.0, "accuracy": 0.2, "baseline": 0.1}, {1: 10.0, 2: 18.0}, "the")
    lines = table(rows).splitlines()
    assert "samples/s, 2 processes  18.0  (1.80 times one process)" in lines[-1]
    assert len({line.index(value) for line, (_, value) in zip(lines, rows, strict=True)}) == 1


LINE = Line("a.py", "found = sorted(", "names", ", key=len)", [], 0, 0)


@pytest.mark.parametrize(
    ("encoding", "row"),
    [
        ("utf-8", "  found = sorted(\u00abnames\u00bb, key=len)  [UNK]   names \u2713"),
        ("ascii", "  found = sorted(<<names>>, key=len)  [UNK]   names yes"),
        (None, "  found = sorted(<<names>>, key=len)  [UNK]   names yes"),
    ],
)
def test_lines_are_shown_with_what_was_filled_in(encoding, row):
    head, first, second = filled_in([LINE, LINE], ["[UNK]", "."], ["names", "name"], ["names"] * 2, encoding).split(
        "\n"
    )
    assert first == row
    assert second.split()[-2:] == [".", "name"]
    assert head.index("after") == first.index("names ", 24) == second.rindex("name")


def test_demo_narrow_terminal_shows_code_around_the_hidden_token(monkeypatch):
    lines = [
        Line("a.py", "x" * 40, "names", "", [], 0, 0),
        Line("b.py", "", "names", "y" * 41, [], 0, 0),
        Line("c.py", "x" * 20, "names", "y" * 20, [], 0, 0),
    ]
    for columns, dots in (("60", [1, 1, 2]), ("20", [1, 1, 2]), ("80", [0, 0, 0])):
        monkeypatch.setenv("COLUMNS", columns)
        rows = filled_in(lines, ["before"] * 3, ["surrounding"] * 3, ["names"] * 3, "utf-8").split("\n")
        assert [row.count("...") for row in rows[1:]] == dots
        assert all("\u00abnames\u00bb" in row and "surrounding" in row for row in rows[1:])
        assert max(map(len, rows)) <= max(60, int(columns))


@pytest.mark.integration
@pytest.mark.parametrize("number", [0, 1])
def test_the_next_commands_end_well(text, monkeypatch, tmp_path, number):
    monkeypatch.setattr(sys, "argv", ["/usr/bin/paceline"])
    monkeypatch.chdir(tmp_path)  # the commands name files as seen from here
    shutil.copytree(text[0], tmp_path / "demo-text")
    words = shlex.split(next_commands("demo-text", WORKLOAD)[number])[1:]
    ended = paceline(tmp_path, *words, timeout=600)
    assert ended.code == 0, ended.err
    assert ("step float64  ok" if words[0] == "verify" else "peak of live tensors") in ended.out


def test_the_next_commands_have_an_example_that_is_there(text, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["/usr/bin/paceline"])
    *_, examples = map(shlex.split, next_commands(str(text[0]), WORKLOAD))
    assert examples[0] == "/usr/bin/paceline"  # not `paceline`: that is another one here, or none
    assert main(examples[1:]) == 0
    assert (tmp_path / "train.py").exists()


def test_the_next_commands_start_paceline_as_it_was_started(monkeypatch, tmp_path):
    program = tmp_path / "bin" / "paceline"
    program.parent.mkdir()
    program.write_text("")
    program.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(program)])
    monkeypatch.setenv("PATH", "/nowhere")
    assert next_commands("text", WORKLOAD)[2] == "bin/paceline examples copy train"
    monkeypatch.setenv("PATH", str(program.parent))
    assert next_commands("text", WORKLOAD)[2] == "paceline examples copy train"
    monkeypatch.setattr(sys, "argv", ["/x/paceline/__main__.py"])
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    assert next_commands("text", WORKLOAD)[2] == "bin/python -m paceline examples copy train"


def test_no_matplotlib_is_no_picture(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert draw_curve([], [], tmp_path / "loss.png") is False


@pytest.mark.slow
def test_the_whole_demo(text, tmp_path):
    shutil.copytree(text[0], tmp_path / "runs" / "demo-text")
    ended = paceline(tmp_path, "demo", "--steps", "12", "--batch-size", "8", "--json", timeout=240)
    assert ended.code == 0, ended.err
    result = json.loads(ended.out)
    assert result["steps"] == 12
    assert result["loss_last"] < result["loss_first"]
    assert 0.02 < result["baseline_accuracy"] < 0.1
    assert set(result["samples_per_s"]) == {"1", "2"}
    for path in (result["picture"], result["model"] + "/model.safetensors", result["run_dir"] + "/result.json"):
        assert (tmp_path / path).stat().st_size > 100
    assert len(result["lines"]) == LINES
    assert any(line["before"] != line["after"] for line in result["lines"])
    model = check_saved_model(tmp_path / result["model"], tmp_path / result["run_dir"] / "lines.json")
    assert model == [line["after"] for line in result["lines"]]
    for words in (
        "held-out loss, after",
        "step 12: ",
        "held-out code",
        *result["next"],
    ):
        assert words in ended.err


def check_saved_model(folder, lines):
    """Return what transformers' own model fills in for the lines."""
    import transformers  # here: it takes seconds

    model = transformers.BertForMaskedLM.from_pretrained(folder, local_files_only=True).eval()
    tokens = (folder / "vocab.txt").read_text().split("\n")
    with torch.no_grad():
        rows = [(model(input_ids=torch.tensor([line.ids])).logits[0, line.place]) for line in read_lines(lines)]
    return [tokens[int(row.argmax())] for row in rows]


def test_no_tokenizers_is_one_error():
    hidden = "import sys; sys.modules['tokenizers'] = None\n"
    code = hidden + "from paceline.demo.corpus import _tokenizer\n_tokenizer([])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "pip install 'paceline[demo]'" in done.stderr

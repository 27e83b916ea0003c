"""The example of contracts: sources are read or named, near duplicates are never on both sides, N ranks end as one."""

from __future__ import annotations

import json
import lzma
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.nouns.errors import DataError, UsageError

from support.jobs import paceline
from support.ranks import preload, run_ranks
from support.trainings import EXAMPLES, check_killed, check_plans, check_verified, load, play, run_main

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")
preload("paceline.train.loop_job")
ROOT = Path(__file__).parents[2]
SHARED = ROOT.parent / "shared" / "data" / "solidity"
STEPS = 4
SMALL = ("--folds", "2", "--batch-size", "7", "--steps", str(STEPS), "--width", "8", "--length", "48")
SMALL = (*SMALL, "--precision", "float64")
solidity, contracts, model, scores, picture, workload = load(
    "contracts", "solidity", "contracts", "model", "scores", "picture", "workload"
)
Contract = contracts.Contract
MADE_UP = contracts.made_up(0)


def record(row: Contract, of: str) -> dict:
    return {"set": of, "name": row.name, "label": int(row.is_reentrant), "source": row.source}


def bug(row: Contract) -> dict:
    category = "reentrancy" if row.is_reentrant else "arithmetic"
    return {"path": row.name, "category": category, "pragma": "0.4.2", "vulnerabilities": [], "source": row.source}


def lines(records) -> bytes:
    return "".join(json.dumps(each) + "\n" for each in records).encode()


def write_data(folder: Path) -> Path:
    """The files of both data sets, of a few made-up contracts."""
    for name in ("reentrancy-benchmarks", "smartbugs-curated"):
        (folder / name).mkdir(parents=True)
    train, test = MADE_UP.train[:48:2], MADE_UP.tests["unseen templates"][:16:2]
    rows = [*(record(row, "aggregated") for row in train), *(record(row, "RSD") for row in test)]
    (folder / "reentrancy-benchmarks" / "contracts.jsonl").write_bytes(lines(rows))
    bugs = lines(bug(row) for row in [*test[:3], *train[:3]])
    (folder / "smartbugs-curated" / "contracts.jsonl.xz").write_bytes(lzma.compress(bugs))
    return folder


@pytest.fixture
def data(tmp_path):
    return write_data(tmp_path / "data")


# Reading


def test_both_data_sets_are_read(data):
    read = contracts.load(data, 0)
    assert (read.name, len(read.train), sum(row.is_reentrant for row in read.train)) == ("aggregated", 24, 6)
    assert {name: len(rows) for name, rows in read.tests.items()} == {"RSD": 8, "SmartBugs": 6}
    # What is in two sets is in one group.
    assert [row.group for row in read.tests["SmartBugs"][3:]] == [row.group for row in read.train[:3]]


def test_clones_are_read(tmp_path):
    source = "contract C { function f() public { msg.sender.transfer(1); } }"
    for name in (
        "reentrancy-benchmarks/benchmarks/aggregated-benchmark/src/reentrant/a.sol",
        "reentrancy-benchmarks/benchmarks/aggregated-benchmark/src/safe/b.sol",
        "reentrancy-benchmarks/benchmarks/RSD/src/00_Basic_ree1.sol",
        "reentrancy-benchmarks/benchmarks/RSD/src/00_Basic_safe1.sol",
        "smartbugs-curated/dataset/reentrancy/c.sol",
        "smartbugs-curated/dataset/arithmetic/d.sol",
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    read = contracts.read(tmp_path)
    assert [(row.name, row.is_reentrant) for row in read.train] == [("a.sol", True), ("b.sol", False)]
    for rows in read.tests.values():
        assert sorted(row.is_reentrant for row in rows) == [False, True]


@pytest.mark.skipif(not SHARED.is_dir(), reason="the real contracts are not here")
def test_the_real_contracts():
    read = contracts.load(SHARED, 0)
    sets = {"aggregated": read.train, **read.tests}
    counts = {name: (len(rows), sum(row.is_reentrant for row in rows)) for name, rows in sets.items()}
    assert counts == {"aggregated": (432, 120), "RSD": (143, 71), "SmartBugs": (143, 31)}
    groups = {row.group for row in read.train}
    assert len(groups) == 174
    assert sum(row.group in groups for row in read.tests["RSD"]) == 0
    assert sum(row.group in groups for row in read.tests["SmartBugs"]) == 31
    folds = contracts.folds_of(read.train, 5)
    assert all(80 <= folds.count(fold) <= 100 for fold in range(5))


ROW = {"set": "RSD", "name": "a", "label": 1, "source": "contract C {}"}
BUG = {"path": "a", "category": "reentrancy", "source": "contract C {}"}
RD, SB = "reentrancy-benchmarks/contracts.jsonl", "smartbugs-curated/contracts.jsonl.xz"
# A file's content, and what the error says: asked, found, fix.
BROKEN = {
    "no first set": (RD, None, "clone or contracts.jsonl (or .xz) in reentrancy-ben", "neither", "github.com/matteo"),
    "no second set": (
        SB,
        None,
        "clone or contracts.jsonl (or .xz) in smartbugs-cur",
        "neither",
        "github.com/smartbugs",
    ),
    "no JSON": (RD, b"contract C {}\n", "line 1: a JSON object", "Expecting value", "mend that line"),
    "a list": (RD, b"[]\n", "line 1: a JSON object", "indices", "mend that line"),
    "an odd label": (RD, lines([ROW, ROW | {"label": 2}]), "line 2", "label is 2, not 0 or 1", "mend that line"),
    "an odd set": (RD, lines([ROW | {"set": "x"}]), "line 1", "set is 'x'", "mend that line"),
    "no source": (RD, lines([{"set": "RSD", "name": "a", "label": 1}]), "line 1", "lacks 'source'", "mend that line"),
    "a number": (RD, lines([ROW | {"source": 3}]), "line 1", "source is no text", "mend that line"),
    "comments": (RD, lines([ROW | {"source": "// C"}]), "line 1", "no token", "mend that line"),
    "not text": (RD, b"\xff\n", "UTF-8", "invalid start byte", "github.com/matteo"),
    "one class": (
        RD,
        lines([ROW | {"set": "aggregated"}]),
        "aggregated needs reentrant and safe",
        "1 of its 1",
        "anew",
    ),
    "torn": (SB, lzma.compress(lines([BUG]))[:-9], "compressed as its name says", "ended", "github.com/smartbugs"),
    "no category": (SB, lzma.compress(b'{"path": "", "source": ""}'), "line 1", "lacks 'category'", "mend that line"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_is_named(case, data):
    name, content, asked, found, fix = BROKEN[case]
    (data / name).unlink()
    if content is not None:
        (data / name).write_bytes(content)
    with pytest.raises((DataError, UsageError)) as caught:
        contracts.load(data, 0)
    assert asked in caught.value.asked
    assert found in caught.value.found
    assert fix in caught.value.fix


# What is asked for on the command line, and what the error says: asked, found, fix.
REFUSED = {
    "no such folder": (["--data", "nowhere"], "--data nowhere", "no folder nowhere", "github.com/matteo-rizzo"),
    "no such fold": (["--fold", "5"], "--fold 5", "there are 5 folds", "write 0 to 4"),
    "one fold": (["--folds", "1"], "--folds 1", "at least 2", "--folds 2 or more"),
    "too many folds": (["--folds", "9"], "--folds 9", "6 groups", "--folds 6 or less"),
    "a batch larger than the data": (["--batch-size", "99"], "--batch-size 99", "24 training", "smaller batch"),
    "no steps": (["--steps", "0"], "--steps 0", "at least 1", "--steps 1 or more"),
    "steps and epochs": (["--steps", "1", "--epochs", "1"], "--epochs and --steps", "both", "leave one"),
    "an odd width": (["--width", "6"], "--width 6", "4 heads", "multiple of 4"),
    "all hidden": (["--hidden", "1"], "--hidden 1.0", "a share", "from 0 to 0.9"),
    "no rate": (["--lr", "nan"], "--lr nan", "above 0", "--lr 2e-3"),
    "no folder": (["--output", "no/o.json"], "--output no/o.json", "there is no folder no", "make the folder"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_flag_is_refused_before_training(case, data, monkeypatch):
    words, asked, found, fix = REFUSED[case]
    with pytest.raises(UsageError) as caught:
        run_main("contracts", ["--data", data, *words])
    assert asked in caught.value.asked
    assert found in caught.value.found
    assert fix in caught.value.fix


def test_made_up_contracts_are_not_regrouped(monkeypatch):
    with pytest.raises(UsageError, match=r"--groups exact\n  found: made-up .*\n  fix: leave it out, or hand"):
        run_main("contracts", ["--groups", "exact"])


def test_without_scikit_learn_its_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.setitem(sys.modules, "sklearn.feature_extraction.text", None)
    with pytest.raises(UsageError, match=r"--linear\n.*not installed\n  fix: pip install scikit-learn"):
        scores.linear_parts()


# Tokens and chunks

SOURCE = """// a comment
contract Bank { /* and
another */ mapping(address => uint256) saved; string name = "a // b";
    modifier once() { require(!busy); busy = true; _; busy = false; }
    function pay(uint amount) public once {
        (bool ok, ) = msg.sender.call{value: amount}("");
        saved[msg.sender] -= amount;
    }
    function see() public view returns (uint) { return saved[msg.sender] + 0x1F; }
}
"""


def test_tokens_are_solidity_without_comments():
    tokens = solidity.read_tokens(SOURCE)
    texts = [token.text for token in tokens]
    assert texts[:12] == [
        "contract",
        "Bank",
        "{",
        "mapping",
        "(",
        "address",
        "=>",
        "uint256",
        ")",
        "saved",
        ";",
        "string",
    ]
    assert '"a // b"' in texts
    assert "0x1F" in texts
    assert "comment" not in " ".join(texts)
    source = SOURCE.splitlines()
    assert all(text in source[line - 1] for text, line in tokens)


def test_functions_are_cut_and_nothing_is_lost():
    tokens = solidity.read_tokens(SOURCE)
    parts = solidity.functions_of(tokens)
    assert [token for part in parts for token in part] == tokens
    assert len(parts) == 5
    assert [solidity.has_external_call(part) for part in parts] == [False, False, True, False, False]


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("a.call(b)", True),
        ("a.call.value(1)()", True),
        ("a.call{value: 1}(b)", True),
        ("a.b{value: 1}()", True),
        ("a.send(1)", True),
        ("a.transfer(1)", True),
        ("a.delegatecall(b)", True),
        ("require(msg.value > 1)", False),
        ("call(a)", False),
        ("a.add(b)", False),
    ],
)
def test_external_calls(text, calls):
    assert solidity.has_external_call(solidity.read_tokens(text)) == calls


def test_chunks_overlap_and_have_every_call():
    tokens = solidity.read_tokens(SOURCE)
    (only,) = solidity.chunks_of(tokens, 128)
    assert only[1].text == "pay"
    whole = solidity.chunks_of(tokens, 128, calls_only=False)
    assert [token for chunk in whole for token in chunk] == tokens
    pieces = solidity.chunks_of(only, 16)
    assert all(len(piece) <= 16 for piece in pieces)
    assert [piece[:8] for piece in pieces[1:]] == [piece[8:] for piece in pieces[:-1]]
    assert {token for piece in pieces for token in piece} == {*only}
    safe = solidity.read_tokens("contract C { uint a; }")
    assert solidity.chunks_of(safe, 4) == [safe[:4]]


def test_renaming_changes_nothing_and_order_does():
    renamed = re.sub(r"\bsaved\b", "b", re.sub(r"\bamount\b", "x", SOURCE)).replace("pay", "f")
    one, other = (solidity.chunks_of(solidity.read_tokens(text), 128)[0] for text in (SOURCE, renamed))
    assert one != other
    assert solidity.encode(one) == solidity.encode(other)
    assert max(solidity.encode(one)) < solidity.VOCABULARY
    assert solidity.UNKNOWN not in solidity.encode(one)
    lines = SOURCE.splitlines(keepends=True)
    lines[5], lines[6] = lines[6], lines[5]
    swapped = solidity.chunks_of(solidity.read_tokens("".join(lines)), 128)[0]
    assert solidity.encode(swapped) != solidity.encode(one)


# Near duplicates and folds


def test_near_duplicates_are_in_one_group():
    body = "contract C { uint a; function f(uint b) public { a = a * 3 + b; } function g() public { a = 1; } "
    rows = [
        body + "}",
        "// copied\n" + body.replace("a", "aa").replace("C", "D") + "}",  # other names
        "library L { function add(uint a, uint b) internal returns (uint) { return a + b; } }",
        "contract E { function w(uint n) public { msg.sender.transfer(n); } bool d; bool e; string s = 'x'; }",
        "interface F { } contract G { modifier m { _; } function v(uint k) public { msg.sender.transfer(k); } }",
    ]
    rows = [Contract(str(at), source, False) for at, source in enumerate([*rows, rows[0] + "// copied"])]
    assert contracts.groups_of(rows) == [0, 0, 2, 3, 3, 0]
    assert contracts.groups_of(rows, exact=True) == [0, 1, 2, 3, 4, 0]


def test_a_group_is_in_one_fold_and_folds_have_both_classes():
    folds = contracts.folds_of(MADE_UP.train, 5)
    assert len({(row.group, fold) for row, fold in zip(MADE_UP.train, folds, strict=True)}) == 40
    for fold in range(5):
        labels = [row.is_reentrant for row, of in zip(MADE_UP.train, folds, strict=True) if of == fold]
        assert (len(labels), sum(labels)) == (64, 16)


def test_made_up_templates_are_in_one_set_and_drawn_by_the_seed():
    train, test = ({row.group for row in rows} for rows in (MADE_UP.train, MADE_UP.tests["unseen templates"]))
    assert not train & test
    assert contracts.made_up(0) == MADE_UP
    assert contracts.made_up(1) != MADE_UP
    first = MADE_UP.train[0]
    copies = [row for row in MADE_UP.train if row.name.rsplit("-", 1)[0] == first.name.rsplit("-", 1)[0]]
    assert len(copies) == contracts.COPIES
    assert len({row.source for row in copies}) == contracts.COPIES


def test_contract_is_judged_by_models_not_trained_on_its_group():
    rows = [Contract("a", "", True, 1), Contract("b", "", False, 2), Contract("c", "", True, 9)]
    logits = np.array([[1.0, 10.0], [2.0, 20.0], [3.0, 30.0]])
    both = scores.held_out(rows, logits, {1: 0, 2: 1}, [0, 1])
    assert both.logits.tolist() == [1.0, 20.0, 16.5]
    one = scores.held_out(rows, logits[:, 1:], {1: 0, 2: 1}, [1])
    assert (one.logits.tolist(), one.groups.tolist()) == ([20.0, 30.0], [2, 9])


# Model, loss and scores


def batch_of(rows, weights=None):
    weights = torch.ones(len(rows), 1) if weights is None else weights
    return model.collate([*model.Contracts(rows, weights, 48)])


def test_the_odds_of_a_contract_are_the_sum_of_its_chunks():
    chunks = torch.tensor([1.0, -2.0, 0.5, 9.0])
    found = model.logits_of_contracts(chunks, torch.tensor([0, 0, 1, -1]), 2)
    odds = chunks.exp()
    torch.testing.assert_close(found, torch.stack([odds[0] + odds[1], odds[2]]).log())


def test_padding_and_other_contracts_do_not_change_a_logit():
    torch.manual_seed(0)
    encoder = model.Encoder(48, 8).double()
    rows = MADE_UP.train[:5]
    batch = batch_of(rows)
    assert batch["chunks"].shape[0] % 16 == 0
    together = model.logits_of_contracts(encoder(batch["chunks"]), batch["owners"], 5)
    alone = [encoder(model.tensor_of(model.chunks_of(row, 48), 48)).logsumexp(0) for row in rows]
    torch.testing.assert_close(together, torch.stack(alone), rtol=0, atol=1e-12)
    tokens = batch["chunks"][:1].clone()
    tokens[:, 30:] = solidity.PAD
    before = encoder(tokens)
    with torch.no_grad():
        encoder.places[30:] += torch.randn(18, 8)
    torch.testing.assert_close(encoder(tokens), before, rtol=0, atol=1e-12)


def test_both_classes_count_equally_and_a_test_fold_does_not():
    rows = [Contract(str(at), "", at < 3) for at in range(12)]
    folds = [at % 3 for at in range(12)]
    weights = model.weights_of(rows, folds, [0, 2])
    for column, fold in enumerate((0, 2)):
        here = weights[:, column]
        is_train = torch.tensor(folds) != fold
        assert here[~is_train].eq(0).all()
        assert here[:3].sum() == pytest.approx(here[3:].sum())
        assert here[is_train].mean() == pytest.approx(1)


def test_contract_loss_is_the_mean_however_a_batch_is_split():
    torch.manual_seed(0)
    encoders = [model.Encoder(48, 8).double(), model.Encoder(48, 8).double()]
    rows = MADE_UP.train[:6]
    weights = torch.rand(6, 2).double()
    whole = model.loss_of(encoders, batch_of(rows, weights))
    parts = [model.loss_of(encoders, batch_of(rows[at : at + 2], weights[at : at + 2])) for at in (0, 2, 4)]
    torch.testing.assert_close(whole, torch.stack(parts).mean(), rtol=0, atol=1e-12)


def test_hidden_tokens_and_chunks_are_drawn_anew():
    (row,) = [
        replace(MADE_UP.train[0], source=SOURCE.replace("see() public view returns (uint) {", "see() { a.send(1);"))
    ]
    whole = model.Contracts([row], torch.ones(1, 1), 32)[0]["chunks"]
    assert len(whole) >= 3
    drawn = model.Contracts([row], torch.ones(1, 1), 32, most=2, hidden=0.5)
    torch.manual_seed(0)
    seen = [drawn[0]["chunks"] for _ in range(100)]
    assert {tuple(each.shape) for each in seen} == {(2, 32)}
    real = torch.stack([each[each != solidity.PAD].eq(solidity.UNKNOWN).double().mean() for each in seen])
    assert 0.4 < real.mean() < 0.6


def scored(labels, logits, groups=None):
    groups = list(range(len(labels))) if groups is None else groups
    return scores.Scored(np.array(labels, dtype=bool), np.array(logits, dtype=float), np.array(groups))


def test_measures():
    one = scores.quality(scored([1, 1, 1, 0, 0, 0], [2, 1, -1, 1, -2, -3]))
    assert (one.accuracy, one.precision, one.recall) == (4 / 6, 2 / 3, 2 / 3)
    assert one.f1 == pytest.approx(2 / 3)
    assert one.auc == pytest.approx(7.5 / 9)
    nothing = scores.quality(scored([1, 0], [-1, -1]))
    assert (nothing.precision, nothing.f1, nothing.auc) == (0, 0, 0.5)
    false, true = scores.roc(scored([1, 1, 1, 0, 0, 0], [2, 1, -1, 1, -2, -3]))
    assert (3 * true).tolist() == pytest.approx([0, 1, 2, 3, 3, 3])
    assert (3 * false).tolist() == pytest.approx([0, 0, 1, 1, 2, 3])


def test_intervals_widen_where_contracts_are_copies():
    draw = np.random.default_rng(0)
    labels = draw.integers(2, size=200)
    logits = labels - 0.5 + draw.normal(size=200)
    apart = scores.intervals(scored(labels, logits))
    together = scores.intervals(
        scored(np.repeat(labels[:20], 10), np.repeat(logits[:20], 10), np.repeat(range(20), 10))
    )
    assert apart["f1"][0] < scores.quality(scored(labels, logits)).f1 < apart["f1"][1]
    assert together["f1"][1] - together["f1"][0] > 2 * (apart["f1"][1] - apart["f1"][0])
    assert scores.intervals(scored(labels, logits)) == apart


def test_the_references_judge_what_they_were_not_trained_on():
    pytest.importorskip("sklearn")
    assert [scores.has_low_level_call(Contract("", text, True)) for text in ("a.call(b)", "a.send(1)")] == [True, False]
    words = [("a.call.value(1)();", True), ("x += 1; y = 2;", False)]
    # The labels of the second half are the other way round, so that it shows which half taught a model.
    rows = [Contract(str(at), text * (2 + at), kind ^ (at > 1), at) for at in range(4) for text, kind in words]
    folds = [at // 4 for at in range(8)]
    logits = scores.linear_logits(contracts.Data("", rows, {}), folds, [0, 1], rows)
    has_call = np.array([kind for _ in range(4) for _, kind in words])
    assert ((logits[:, 0] > 0) == ~has_call).all()
    assert ((logits[:, 1] > 0) == has_call).all()


def test_the_figure_shades_the_line_that_matters(tmp_path):
    pytest.importorskip("matplotlib")
    row = Contract("a", SOURCE, True)
    minus = solidity.encode([solidity.Token("-=", 1)])[0]
    shown = picture.shown_of(row, [0], 128)
    assert list(shown.lines) == [2, 3, 4, 5, 6, 7, 8, 9, 10]
    occluded = picture.occlude(shown, lambda chunks: 3.0 * (chunks == minus).any(1).numpy()[:, None], 128)
    assert {line: fall for line, fall in occluded.falls.items() if fall} == {7: 3.0}
    assert occluded.logit == 3.0
    judged = {"aggregated": scored([1, 1, 0, 0], [1, -1, 0, -2]), "RSD": scored([1, 0], [0, 1])}
    picture.draw(tmp_path / "figure.png", occluded, judged)
    assert 5_000 < (tmp_path / "figure.png").stat().st_size < 60_000


def test_it_learns_the_order_of_call_and_update(one_thread):
    torch.manual_seed(0)
    rows = [row for row in MADE_UP.train if "guarded" not in row.name and row.name.endswith("0.sol")]
    weights = model.weights_of(rows, [row.group % 5 for row in rows], [0])
    encoder = model.Encoder(64, 16)
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=1e-2)
    loader = torch.utils.data.DataLoader(
        model.Contracts(rows, weights, 64), batch_size=8, shuffle=True, collate_fn=model.collate
    )
    for _ in range(8):
        for batch in loader:
            optimizer.zero_grad()
            model.loss_of([encoder], batch).backward()
            optimizer.step()
    unseen = [row for row in rows if row.group % 5 == 0]
    batch = model.collate([*model.Contracts(unseen, torch.ones(len(unseen), 1), 64)])
    with torch.no_grad():
        logits = model.logits_of_contracts(encoder(batch["chunks"]), batch["owners"], len(unseen))
    assert ((logits > 0) == batch["labels"].bool()).double().mean() > 0.9


@pytest.fixture
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# Whole jobs


def check_plan(folder: Path, data: Path, plans: tuple[str, ...]) -> None:
    """Each plan ends with the parameters and scores of one rank."""
    result = check_plans(folder, "contracts", ("--data", data, *SMALL), plans)
    assert result["steps"] == STEPS
    assert result["data"].startswith("aggregated, 24 contracts in ")
    assert result["judged"] == {"aggregated": 24, "RSD": 8, "SmartBugs": 6}
    assert all(0 <= score <= 1 for score in result["scores"].values())


@pytest.mark.slow
def test_two_ranks_end_as_one_does(tmp_path, data):
    check_plan(tmp_path, data, ("replicate=2", "shard=2,zero=1", "shard=2"))


@pytest.mark.integration
@pytest.mark.complete  # other plans end as one rank does above
def test_more_ranks_end_as_one_does(tmp_path, data):
    check_plan(tmp_path, data, ("replicate=4", "tensor=2", "shard=2,zero=2", "replicate=2,shard=2"))


@pytest.mark.slow
def test_a_batch_smaller_than_the_ranks_is_refused(tmp_path, data):
    words = ["--data", str(data), *SMALL, "--batch-size", "2"]
    with pytest.raises(
        AssertionError, match="3 ranks share it, and each needs a contract of its own\n  fix: write 3 or"
    ):
        run_ranks(3, play, "contracts", words, "replicate=3")


VERIFIED = [
    pytest.param("replicate=2", marks=pytest.mark.slow),
    *(pytest.param(plan, marks=pytest.mark.integration) for plan in ("shard=2", "tensor=2")),
]


@pytest.mark.parametrize("plan", VERIFIED)
@pytest.mark.complete  # loops that are verified: test_loops.py, test_racer.py
def test_verify_finds_the_steps_of_two_ranks_those_of_one(tmp_path, data, plan):
    check_verified(tmp_path, "contracts", ("--data", data, *SMALL), plan)


@pytest.mark.integration
@pytest.mark.parametrize("plan", ["pipeline=2", "server=1"])
def test_plans_that_need_a_declared_loss_are_refused(tmp_path, data, plan):
    ended = paceline(tmp_path, "run", "--plan", plan, EXAMPLES / "contracts" / "workload.py", "--data", data, *SMALL)
    assert ended.code == 2, ended.out + ended.err
    assert "fix:" in ended.err


@pytest.mark.integration
@pytest.mark.complete  # loops that are killed: test_loops.py, test_distil.py
def test_a_killed_job_goes_on_where_it_was(tmp_path, data):
    check_killed(tmp_path, "contracts", ("--data", data, *SMALL, "--steps", "12"), every=3, kill_at=11)

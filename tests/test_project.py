"""Rules of the project that no linter knows."""

import ast
import importlib.util
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import paceline
from paceline.nouns import module_names
from paceline.nouns.mesh import AXES

from support.durations import is_there, read_durations

SOURCE = Path(paceline.__file__).parent
ROOT = Path(__file__).parent.parent
FILES = sorted(SOURCE.rglob("*.py"))
BENCHMARKS = sorted((ROOT / "benchmarks" / "compare").rglob("*.py"))
VAGUE = {"utils", "util", "helpers", "common", "misc", "base", "core", "manager", "types"}


@pytest.mark.parametrize("file", [*FILES, *BENCHMARKS], ids=lambda f: str(f.relative_to(ROOT)))
def test_a_file_says_what_it_is_for(file):
    assert ast.get_docstring(ast.parse(file.read_text())), "the first line says what the file is for"
    assert file.stem not in VAGUE, "name the file for what it does"


PACKAGES = sorted(str(p.parent.relative_to(SOURCE)) for p in SOURCE.rglob("*/__init__.py"))


@pytest.mark.parametrize("package", PACKAGES)
def test_package_has_docstring_no_code_and_an_architecture_line(package):
    body = ast.parse((SOURCE / package / "__init__.py").read_text()).body
    if package.startswith("horovod"):  # scripts import Horovod's names from where Horovod has them
        body = [node for node in body if not isinstance(node, ast.ImportFrom | ast.Assign)]
    assert [type(node) for node in body] == [ast.Expr], "import from the file that defines the thing"
    assert f"`{package}/`" in (ROOT / "ARCHITECTURE.md").read_text(), "every package has its line in ARCHITECTURE.md"


def test_every_module_stands_in_the_architecture():
    lines = (ROOT / "ARCHITECTURE.md").read_text().splitlines()
    rows = {
        row.split("`")[1].rstrip("/"): set(re.findall(r"`(\w+)`", row.split("|")[3]))
        for row in lines
        if row.startswith("| `")
    }
    for package in PACKAGES:
        there = {path.stem for path in (SOURCE / package).glob("*.py")} - {"__init__"}
        assert there - rows[package] == set(), f"{package}/ has modules that its line does not name"
        assert rows[package] - there == set(), f"the line of {package}/ names modules that are not there"


DRAWINGS = re.findall(r"```\n(.*?)```", (ROOT / "ARCHITECTURE.md").read_text(), re.DOTALL)


def test_the_drawing_of_packages_has_every_package():
    words = set(re.findall(r"\w+", DRAWINGS[0]))
    assert {package for package in PACKAGES if "/" not in package} - words == set()


def test_the_drawings_name_modules_that_are_there():
    there = [f"/{path.relative_to(SOURCE).with_suffix('').as_posix()}" for path in FILES]
    named = re.findall(r"(?<![\w/.])[a-z_]+(?:/[a-z_]+)+", "".join(DRAWINGS))
    assert len(named) > 30
    assert [name for name in named if not any(path.endswith((f"/{name}", f"/{name}/__init__")) for path in there)] == []


# A user's file calls it; `plan` and `verify` answer in its place.
PATCHED_OF_OURS = {("profile/profile_loop.py", "paceline"), ("verify/ranks/loop_run.py", "paceline")}


def patched_names(tree):
    """The module or class that each call of `patched` changes, in words."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "patched" and node.args:
            yield ast.unparse(node.args[0]), {keyword.arg for keyword in node.keywords}


def test_only_the_public_prepare_is_patched_of_our_own():
    found = set()
    for file in FILES:
        tree = ast.parse(file.read_text())
        ours = {"self", "paceline"}
        for node in ast.walk(tree):
            # What `torch_private` hands on is torch's.
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "paceline":
                if node.module.split(".")[1:2] != ["torch_private"]:
                    ours |= {name.asname or name.name for name in node.names}
            elif isinstance(node, ast.ClassDef):
                ours.add(node.name)
        for owner, names in patched_names(tree):
            if owner.split(".")[0] in ours:
                assert names == {"prepare"}
                found.add((file.relative_to(SOURCE).as_posix(), owner))
    assert found == PATCHED_OF_OURS


def strategy_of(axis):
    """A strategy of one file, `AXIS_strategy.py` of its package, or `AXIS_layout.py` where it splits graphs."""
    of_graphs = SOURCE / "graph" / axis
    if of_graphs.is_dir():
        return of_graphs / f"{axis}_layout.py"
    package = SOURCE / "parallel" / axis
    return package / f"{axis}_strategy.py" if package.is_dir() else package.with_suffix(".py")


NAMED = {name: value for name, value in vars(module_names).items() if name.isupper()}


@pytest.mark.parametrize("module", NAMED.values())
def test_a_module_that_a_string_names_is_there(module):
    assert importlib.util.find_spec(module) is not None


def test_module_names_stand_in_one_table():
    table = Path(module_names.__file__)
    strings = {
        file: [
            node.value
            for node in ast.walk(ast.parse(file.read_text()))
            if isinstance(node, ast.Constant) and re.fullmatch(r"paceline(\.\w+)+", str(node.value))
        ]
        for file in FILES
    }
    # `paceline` itself loads its public names when they are first used.
    assert {file for file, found in strings.items() if found} == {table, SOURCE / "__init__.py"}


@pytest.mark.parametrize("axis", AXES)
def test_an_axis_has_a_strategy_and_a_test(axis):
    assert strategy_of(axis).is_file()
    assert (ROOT / "tests" / "parallel" / f"test_{axis}.py").is_file()


@pytest.mark.parametrize("axis", AXES)
def test_a_strategy_says_what_it_needs_promises_and_sends(axis):
    docstring = ast.get_docstring(ast.parse(strategy_of(axis).read_text()))
    assert all(word in docstring for word in ("Needs:", "Promises:", "Traffic"))


@pytest.mark.parametrize(
    "command",
    [
        ["--help"],
        ["plan", "--help"],
        ["run", "--help"],
        ["submit", "slurm", "--help"],
        ["submit", "kubernetes", "--help"],
        ["demo", "--help"],
        ["examples"],
        ["runs", "--help"],
        ["export", "--help"],
        ["doctor", "--help"],
        ["explain", "--help"],
    ],
)
def test_help_starts_without_torch_and_at_once(command):
    code = (
        "import resource, sys\n"
        "from paceline.cli.main import main\n"
        f"try: main({command!r})\n"
        "except SystemExit as end: assert end.code == 0\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules, 'heavy imports'\n"
        "used = resource.getrusage(resource.RUSAGE_SELF)\n"
        "assert used.ru_utime + used.ru_stime < 0.5, used\n"
    )
    for _ in range(3):  # a core that others use too takes longer for the same
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        if done.returncode == 0:
            break
    assert done.returncode == 0, done.stderr


def test_every_dependency_has_its_reason():
    declared = re.findall(r'^\s+"([a-z-]+)[\[>=]', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    design = (ROOT / "docs" / "design.md").read_text()
    missing = [name for name in {*declared} - {"paceline"} if f"`{name}`" not in design]
    assert not missing, f"docs/design.md gives no reason for {missing}"


def test_nothing_is_unpickled():
    hits = [
        f
        for f in [*FILES, *BENCHMARKS]
        if re.search(r"\b(pickle\.|torch\.load\(|cloudpickle|shell=True)", f.read_text())
    ]
    # A function for own children, by inherited memory; the other two name the package in words.
    sent = {SOURCE / name for name in ("run/sent_function.py", "run/notebook.py", "demo/example_files.py")}
    assert set(hits) == sent
    assert "cloudpickle" not in re.sub(r'"""(.|\n)*?"""', "", (SOURCE / "run" / "notebook.py").read_text())


def test_the_page_of_promises_names_tests_that_are_there():
    named = re.findall(r"`((?:tests|benchmarks)/[\w/]+\.py)`", (ROOT / "docs" / "testing.md").read_text())
    assert len(named) > 30
    assert [path for path in named if not (ROOT / path).is_file()] == []


def test_product_has_no_mocks_and_no_overwritten_methods():
    """`nouns/patching.py` is for other libraries' functions alone."""
    for path in sorted((ROOT / "src").rglob("*.py")):
        text = path.read_text()
        assert "unittest" not in text, path
        # torch's own classes, while a model is captured or measured; the `forward` of batch norm, and of a loop's
        # model that is split: the loop goes on calling the module that it has. The `step` that torch's scheduler has
        # overwritten already. How a DTensor is shown, by which a number of a part would be taken for the whole. FSDP2's
        # backward hooks, which no public setter keeps from ending a forward pass. How Lightning's precision plugin
        # clips: a Strategy has no method for that.
        known = {
            "dtensor_rules.py": 1,
            "fsdp.py": 2,
            "kept_values.py": 1,
            "control_flow_trace.py": 2,
            "batch_norm.py": 1,
            "split_forward.py": 1,
            "low_precision_states.py": 1,
            "main.py": 1,
            "lightning.py": 2,
        }
        allowed = known.get(path.name, 0)
        assert text.count("type: ignore[method-assign") <= allowed, path


def test_servers_are_a_strategy_and_not_a_condition():
    """Whether the plan has servers is asked where their part of a strategy stands, and nowhere else."""
    asks = re.compile(
        r"(if|elif|and|or|not|while|assert) (not )?((self|job|request|wanted|plan)\.)*plan\.server\b(?!s)"
    )
    theirs = {
        "parallel/engine/declared.py",
        "profile/describe.py",
        "run/start/start_servers.py",
        "cli/server_command.py",
    }
    theirs |= {"launch/kubernetes/pods.py"}  # of the servers' pods
    found = set()
    for path in sorted((ROOT / "src" / "paceline").rglob("*.py")):
        name = path.relative_to(ROOT / "src" / "paceline").as_posix()
        if not name.startswith("server/") and asks.search(path.read_text()):
            found.add(name)
    assert found == theirs


def test_every_test_that_was_measured_is_there():
    assert [name for name in read_durations() if not is_there(name)] == []


# Files of the kernel, those that Python or Paceline's own package has, and those in folders that were just made.
NOT_OF_OTHERS = ("demo/", "verify/", "doctor/probe/", "nouns/control_group.py")
OWN_OPEN = {"self", "self.groups"}  # objects with a method `open` that is about no file


def reads(tree):
    """The lines where a file is opened to be read or appended to, but not by `open(path, mode, opener=regular)`."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Name):
            called, modes = node.func.id, node.args[1:2]
        elif isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) not in OWN_OPEN:
            called, modes = node.func.attr, node.args[:1]
        else:
            continue
        is_read = all(isinstance(mode, ast.Constant) and str(mode.value)[:1] in "ra" for mode in modes)
        is_by_opener = any(keyword.arg == "opener" for keyword in node.keywords)
        is_whole = called in ("read_text", "read_bytes") and isinstance(node.func, ast.Attribute)
        if is_whole or (called == "open" and is_read and not is_by_opener):
            yield node.lineno


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(SOURCE)))
def test_files_of_others_are_opened_where_a_fifo_is_refused(file):
    if str(file.relative_to(SOURCE)).startswith(NOT_OF_OTHERS):
        return
    lines = file.read_text().splitlines()
    found = [lines[number - 1].strip() for number in reads(ast.parse(file.read_text()))]
    found = [line for line in found if "/proc" not in line and "_PROCESSES" not in line]
    assert found == [], "write open(path, mode, opener=regular), or take a function of nouns/reading.py"


# Objects of torch, Python and numpy, which are changed by their attributes.
OF_OTHERS = ("module.", "parameter.", "small.grad", "value.bit_generator", "target.bit_generator", "member.", "sys.")
OF_OTHERS += ("torch.", "cut.loader.", "loader.worker_init_fn", "make.__name__", "paceline.")
OF_OTHERS += ("error.",)  # an error gets what its place knows
# What one class of train/ still writes to an object of another. An entry may go, and none may come.
WRITTEN_FROM_OUTSIDE = {
    "data.py": {"self.progress.place"},
    "first_step.py": {"draws.samples"},
    "job.py": {"self.parallel.change_gradients"},
    # In a process of its own it stands for the rank's job.
    "loop_alone.py": {"self.job.step_number", "self.draws.samples"},
    "loop_job.py": {
        "api.world().has_copies",
        "cut.passes",
        "cut.epoch",
        "self.cut.is_idle",
        "self.parallel.placed.spare",
    },
    "parallelize.py": {
        "placed.notices",
        "placed.offloaded",
        "sharded.notices",
        "sharded.offloaded",
        "split.precision",
        "split.shared",
    },
    "sinks.py": {"sink.has_begun"},
    "taken_batches.py": {"batch.is_trained"},
    "times_file.py": {"TIMES.spans"},
}


def written(tree):
    """The attributes that the code of a file assigns to, but those of `self`."""
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if not isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
            continue
        for target in targets:
            for part in ast.walk(target):
                if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store):
                    owner = ast.unparse(part.value)
                    if owner not in ("self", "cls"):
                        yield f"{owner}.{part.attr}"


@pytest.mark.parametrize("file", sorted((SOURCE / "train").glob("*.py")), ids=lambda file: file.name)
def test_an_objects_attributes_are_assigned_by_its_own_class(file):
    found = {name for name in written(ast.parse(file.read_text())) if not name.startswith(OF_OTHERS)}
    assert found == WRITTEN_FROM_OUTSIDE.get(file.name, set()), "call a method of the object's class"


MOST_METHODS = 35
# Larger classes, with the number of their methods, which may only become smaller.
LARGER: dict[str, int] = {}


@pytest.mark.parametrize("package", ["train", "parallel"])
def test_a_class_has_few_methods(package):
    found = {}
    for file in sorted((SOURCE / package).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                found[node.name] = sum(isinstance(each, ast.FunctionDef) for each in methods_of(node))
    assert found
    for name, count in found.items():
        assert count <= LARGER.get(name, MOST_METHODS), f"{name} has {count} methods: give some to a class of their own"


def methods_of(node):
    """The statements of a class, with those under an `if`."""
    for each in node.body:
        yield from each.body if isinstance(each, ast.If) else [each]


def test_no_two_modules_have_one_name():
    stems = Counter(path.stem for path in FILES if path.name != "__init__.py")
    assert [stem for stem, count in stems.items() if count > 1] == []


def test_names_of_tests_are_short_enough_for_pytest_k():
    names = [
        name for path in (ROOT / "tests").rglob("*.py") for name in re.findall(r"def (test_\w+)\(", path.read_text())
    ]
    assert len(names) > 2000
    assert [name for name in names if len(name) > 60] == []

"""An error about a setting says where the value comes from: the flag, the key of the cluster file, or a variable."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest

from paceline.cli.main import main
from paceline.nouns.errors import UsageError
from paceline.run.cluster_file import ClusterFile
from paceline.run.job_settings import JOB, TABLES

FILE = "import paceline\nworkload = paceline.Workload(**{})\n"
SSH = ["run", "--on", "ssh", "-H", "h1:2"]
MPI = ["run", "--on", "mpi", "-n", "2"]
RAY = ["run", "--on", "ray", "-n", "2"]
SLURM = ["submit", "slurm", "-n", "2"]
PODS = ["submit", "kubernetes", "-n", "2"]
SERVERS = ["submit", "kubernetes", "--plan", "replicate=2,server=2"]
# Of every key: a value that is refused, the command, and the settings that such a job needs beside it.
REFUSED = {
    "ssh": {
        "program": ("/nowhere/ssh", SSH, {}),
        "options": (["a\nb"], SSH, {}),
        "python": ("-x", SSH, {}),
        "interface": ("-x", SSH, {}),
    },
    "mpi": {"mpirun": ("/nowhere/mpirun", MPI, {}), "options": (["a\nb"], MPI, {})},
    "ray": {
        "address": ("", RAY, {}),
        "cpus_per_rank": (-1, RAY, {"gpus_per_rank": 1}),
        "gpus_per_rank": (-1, RAY, {"cpus_per_rank": 2}),
        "strategy": ("NEAR", RAY, {}),
    },
    "slurm": {
        "partition": ("a b", SLURM, {}),
        "account": ("a b", SLURM, {"partition": "a"}),
        "qos": ("a#b", SLURM, {"partition": "a", "account": "a"}),
        "time": ("soon", SLURM, {"signal": 1}),
        "gpus_per_node": (-1, SLURM, {"cpus_per_task": 1}),
        "cpus_per_task": (-1, SLURM, {"gpus_per_node": 2}),
        "signal": (-1, SLURM, {"time": "1:00:00"}),
        "sbatch_option": (["nice"], SLURM, {"qos": "nice"}),
        "interface": ("-x", SLURM, {}),
        "python": ("-x", SLURM, {}),
    },
    "kubernetes": {
        "image": ("a b", PODS, {}),
        "kind": ("pod", PODS, {}),
        "namespace": ("A_", PODS, {"runs_claim": "a"}),
        "context": ("a\nb", PODS, {}),
        "runs_claim": ("A_", PODS, {"namespace": "a"}),
        "max_restarts": (-1, PODS, {"user": 1}),
        "runtime": ("A_", PODS, {"kind": "trainjob"}),
        "gang": ("slurm", PODS, {}),
        "queue": ("ml", PODS, {}),
        "placeholder_timeout": (0, PODS, {"gang": "yunikorn", "queue": "root.ml"}),
        "pod_group_api": ("v9", PODS, {"gang": "native"}),
        "priority_class": ("A_", PODS, {}),
        "scheduler": ("A_", PODS, {}),
        "cpu": ("x", PODS, {"namespace": "x"}),
        "memory": ("x", PODS, {}),
        "shm": ("x", PODS, {}),
        "gpus": (-1, PODS, {}),
        "accelerator": ("gpu", PODS, {"gpus": 2}),
        "server_cpu": ("x", SERVERS, {}),
        "server_memory": ("x", SERVERS, {}),
        "user": (0, PODS, {"max_restarts": 1}),
        "service_account": ("A_", PODS, {}),
        "node_selector": (["x"], PODS, {}),
        "toleration": (["=x"], PODS, {}),
        "image_pull_secret": (["A_"], PODS, {}),
        "egress": (["x"], PODS, {}),
    },
}
NEEDED = {"image": "i", "cpu": "1", "memory": "4Gi"}
CASES = [(table, key) for table, keys in TABLES.items() for key in keys]


def test_every_key_has_a_value_that_is_refused():
    assert {table: set(keys) for table, keys in REFUSED.items()} == {table: set(keys) for table, keys in TABLES.items()}


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys):
    """The error of a command with settings in a cluster file, and others as flags."""
    (tmp_path / "train.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("subprocess.Popen", refuse_to_start)

    def run(command, table, in_file, as_flags):
        lines = [f"{key} = {json.dumps(value)}" for key, value in in_file.items()]
        Path("cluster.toml").write_text("\n".join([f"[{table}]", *lines]))
        at = 2 if command[0] == "submit" else 1
        words = [*command[:at], "--cluster", "cluster.toml", *command[at:]]
        for key, value in as_flags.items():
            for text in value if isinstance(value, list) else [value]:
                words.append(f"--{key.replace('_', '-')}={text}")
        assert main([*words, "train.py"]) == 2
        error = capsys.readouterr().err
        assert re.fullmatch(r"paceline [a-z ]+: error: .+\n  found: .+\n  fix: .+\n", error), error
        return error

    return run


def refuse_to_start(*_, **__):
    raise AssertionError("a process was started")


def keys_named(error):
    return re.findall(r"\[(\w+)\] (\w+) in cluster\.toml", error)


def flags_named(error):
    """The flags that an error names as the source of a value."""
    return re.findall(r"flag (--[a-z-]+)", error)


def beside(table, key, more):
    needed = NEEDED if table == "kubernetes" else {}
    return {name: value for name, value in {**needed, **more}.items() if name != key}


@pytest.mark.parametrize(("table", "key"), CASES)
def test_a_value_of_the_file_is_named_by_its_key(table, key, refused):
    value, command, more = REFUSED[table][key]
    has_flags = command[0] == "submit"  # the others' keys have no flags
    others = beside(table, key, more)
    error = refused(command, table, {**({} if has_flags else others), key: value}, others if has_flags else {})
    assert keys_named(error) == [(table, key)], error
    assert flags_named(error) == []


@pytest.mark.parametrize(("table", "key"), [(table, key) for table, key in CASES if table in ("slurm", "kubernetes")])
def test_a_value_of_a_flag_is_named_by_the_flag(table, key, refused):
    value, command, more = REFUSED[table][key]
    error = refused(command, table, beside(table, key, more), {key: value})
    flag = f"--{key.replace('_', '-')}"
    assert flags_named(error) == [flag] or f"error: {flag} " in error, error
    assert set(flags_named(error)) <= {flag}
    assert keys_named(error) == []


@pytest.mark.parametrize("key", ["python", "interface"])
@pytest.mark.parametrize("command", [SSH, MPI, RAY], ids=lambda words: words[2])
def test_a_flag_of_run_is_named_without_a_key_of_the_file(command, key, refused):
    error = refused(command, command[2], {}, {key: "-x"})
    assert flags_named(error) == [f"--{key}"]
    assert keys_named(error) == []


def test_two_values_that_contradict_each_other_are_both_named(refused):
    error = refused(SLURM, "slurm", {"time": "5"}, {"signal": 300})
    assert "([slurm] time in cluster.toml, flag --signal)" in error
    error = refused(PODS, "kubernetes", {**NEEDED, "memory": "512Mi"}, {})
    assert "([kubernetes] memory in cluster.toml)" in error, "the size of /dev/shm is the default"


def test_the_gpus_of_a_node_are_named_as_they_were_asked_for(refused):
    assert keys_named(refused(SLURM, "slurm", {"gpus_per_node": 1}, {})) == [("slurm", "gpus_per_node")]
    assert keys_named(refused(SLURM, "slurm", {"sbatch_option": ["--gres=gpu:1"]}, {})) == [("slurm", "sbatch_option")]
    assert keys_named(refused(PODS, "kubernetes", {**NEEDED, "gpus": 1}, {})) == [("kubernetes", "gpus")]


def test_the_words_of_an_error_do_not_matter():
    settings = ClusterFile(Path("c.toml"), {"slurm": {"time": "5", "qos": "5"}}).settings("slurm", {})
    with pytest.raises(UsageError) as caught, settings.naming_sources():
        raise UsageError("'5', time=5 and --time 5", "it is wrong", "write another", settings=("qos", "signal"))
    assert caught.value.found == "it is wrong ([slurm] qos in c.toml)"


def test_a_variable_is_named(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "h1")
    settings = ClusterFile().settings("ray", {})
    with pytest.raises(UsageError) as caught, settings.naming_sources():
        raise UsageError("Ray's cluster at h1", "nobody answers", "start it", settings=("address",))
    assert caught.value.found == "nobody answers (variable RAY_ADDRESS)"


# --- the table of settings


def test_the_default_in_a_description_is_the_settings():
    names = {"its current one", "as many as --plan has, or 1", "the file's and the time", "this one", "never", "--cpu"}
    names |= {"the cluster's", "the first mpirun or mpiexec in PATH"}
    for setting in [*JOB.values(), *(setting for table in TABLES.values() for setting in table.values())]:
        for written in re.findall(r"\(default:? ([^;)]+)", setting.help):
            if setting.default not in (None, ""):
                is_number = setting.kind in (int, float)
                assert written == (f"{setting.default:g}" if is_number else str(setting.default)) or written in names
            else:
                assert written in names | {"100", "3", "60", "local"}, setting.name


def test_docs_have_the_table_of_the_keys():
    root = Path(__file__).parents[2]
    spec = importlib.util.spec_from_file_location("settings_table", root / "scripts/settings_table.py")
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    page = made.PAGE.read_text()
    assert made.page_with_table(page) == page, "run scripts/settings_table.py"
    for table, key in CASES:
        assert f"| `[{table}]` | `{key}` |" in page

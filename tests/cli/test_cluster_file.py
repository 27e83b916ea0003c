"""The cluster file: a flag wins over it, it wins over the default; bad input is one error before anything starts."""

from __future__ import annotations

import json
import re

import pytest

from paceline.cli.main import main
from paceline.nouns.errors import UsageError
from paceline.nouns.plan import Plan
from paceline.run.cluster_file import MOST_BYTES, ClusterFile, displayed, read_cluster_file
from paceline.run.job_settings import TABLES

FILE = "import paceline\nworkload = paceline.Workload(**{})\n"
WHOLE = """
[ssh]
program = "false"
options = ["-F", "/nowhere/config"]
python = "/opt/python"
interface = "eth1"
[mpi]
options = ["--mca", "btl", "self"]
[ray]
address = "h1:6379"
cpus_per_rank = 0.5
gpus_per_rank = 1
strategy = "SPREAD"
[slurm]
partition = "gpu"
time = "2:00:00"
gpus_per_node = 4
sbatch_option = ["--exclusive", "--mem=0"]
[kubernetes]
image = "registry.example/bert:1"
cpu = "4"
memory = "8Gi"
gang = "kueue"
queue = "ml"
toleration = ["gpu=yes:NoSchedule"]
"""
IMAGE = '[kubernetes]\nimage = "i"\ncpu = "1"\nmemory = "2Gi"\n'
SSH = ["run", "--on", "ssh", "-H", "h1:2"]
RAY = ["run", "--on", "ray"]
SLURM = ["submit", "slurm"]
PODS = ["submit", "kubernetes"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text(FILE)
    (tmp_path / "cluster.toml").write_text(WHOLE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return tmp_path


def dry_run(capsys, *words):
    """What a command with the cluster file would send."""
    at = 2 if words[0] == "submit" else 1
    code = main([*words[:at], "--dry-run", "--cluster", "cluster.toml", *words[at:], "train.py"])
    printed = capsys.readouterr()
    assert code == 0, printed.err
    return printed.out


# --- what it changes


def test_ssh(folder, capsys):
    out = dry_run(capsys, *SSH)
    assert "false -F /nowhere/config -T" in out
    assert "/opt/python -m paceline.run.supervise.agent" in out
    assert '"interface": "eth1"' in out
    out = dry_run(capsys, *SSH, "--python", "/usr/python", "--interface", "eth2")
    assert "/usr/python -m" in out
    assert '"interface": "eth2"' in out
    assert "eth1" not in out
    assert "false -F /nowhere/config" in out, "what no flag says stays the file's"


def test_mpirun(folder, capsys, monkeypatch):
    program = folder / "other-mpirun"
    program.write_text("#!/bin/sh\necho 'mpirun (Open MPI) 5.0'\n")
    program.chmod(0o755)
    (folder / "cluster.toml").write_text(f"{WHOLE}\n".replace("[mpi]", f'[mpi]\nmpirun = "{program}"'))
    out = dry_run(capsys, "run", "--on", "mpi", "-n", "2")
    assert f"{program} -np 2" in out
    assert "--mca btl self" in out


def test_ray(folder, capsys, monkeypatch):
    job = json.loads(dry_run(capsys, *RAY, "-n", "2"))
    assert (job["address"], job["strategy"]) == ("h1:6379", "SPREAD")
    assert job["bundles"] == [{"CPU": 0.5, "GPU": 1.0}] * 2


def test_cluster_file_without_address_uses_the_ray_variable(folder, capsys, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    assert json.loads(dry_run(capsys, *RAY, "-n", "2"))["address"] == "h1:6379"
    (folder / "cluster.toml").write_text("")
    assert json.loads(dry_run(capsys, *RAY, "-n", "2"))["address"] == "auto"
    monkeypatch.delenv("RAY_ADDRESS")
    assert json.loads(dry_run(capsys, *RAY, "-n", "2"))["address"] == "local"


def test_slurm(folder, capsys):
    asked = {line for line in dry_run(capsys, *SLURM, "-n", "2").splitlines() if line.startswith("#SBATCH")}
    wanted = {"--partition=gpu", "--time=2:00:00", "--gpus-per-node=4", "--exclusive", "--mem=0", "--signal=TERM@120"}
    assert {f"#SBATCH {line}" for line in wanted} <= asked
    out = dry_run(capsys, *SLURM, "-n", "2", "--partition", "cpu", "--sbatch-option=--nice", "--gpus-per-node", "0")
    assert "--partition=cpu" in out
    assert "--nice" in out
    assert not [word for word in ("=gpu\n", "--exclusive", "--gpus-per-node") if word in out], "a flag wins as a whole"
    assert "--time=2:00:00" in out


def test_kubernetes(folder, capsys):
    out = dry_run(capsys, *PODS)
    assert "image: registry.example/bert:1" in out
    assert "kueue.x-k8s.io/queue-name: ml" in out
    assert "effect: NoSchedule" in out
    out = dry_run(capsys, *PODS, "--queue", "other", "--toleration", "slow")
    assert "kueue.x-k8s.io/queue-name: other" in out
    assert "NoSchedule" not in out


def test_tables_of_other_launchers_are_not_used(folder, capsys):
    assert "registry.example" not in dry_run(capsys, *SLURM)
    (folder / "cluster.toml").write_text('[slurm]\ntime = "soon"\n[ray]\ncpus_per_rank = 0\n')
    assert "h1: ranks 0 to 1" in dry_run(capsys, *SSH)


def test_a_file_may_begin_with_a_byte_order_mark(folder):
    """As editors on Windows write it; nobody sees it."""
    (folder / "cluster.toml").write_bytes(b'\xef\xbb\xbf[ssh]\npython = "x"\n')
    assert read_cluster_file(folder / "cluster.toml").tables == {"ssh": {"python": "x"}}


def test_every_default_of_a_table_is_of_its_kind(tmp_path):
    for table, settings in TABLES.items():
        values = {key: setting.default for key, setting in settings.items()}
        assert dict(ClusterFile().settings(table, {}).values) == values
        for setting in settings.values():
            assert not setting.choices or setting.default in setting.choices


# --- bad input: the file, the command, and what the error must say (its three lines, in part)

BAD = {
    "an unknown table": ("[slurmm]\n", SLURM, "cluster.toml has the table [slurmm]", "ssh, mpi, ray, slurm", "did you mean 'slurm'"),
    "an unknown table of another launcher": ("[pbs]\n", SSH, "cluster.toml has the table [pbs]", "its tables are", "leave it out"),
    "an unknown key": ('[slurm]\npartitions = "x"\n', SLURM, "the key partitions in [slurm]", "the keys of [slurm] are partition", "did you mean 'partition'"),
    "an unknown key of another launcher": ('[mpi]\nmpiron = "x"\n', SSH, "the key mpiron in [mpi]", "mpirun, options", "did you mean 'mpirun'"),
    "a key as the flag has it": ("[slurm]\ngpus-per-node = 1\n", SLURM, "the key gpus-per-node in [slurm]", "the keys", "did you mean 'gpus_per_node'"),
    "a key of another table": ('[ssh]\npartition = "x"\n', SSH, "the key partition in [ssh]", "program, options", "write it in [slurm]"),
    "a key outside of a table": ('partition = "x"\n', SLURM, "the key partition outside of a table", "its tables are", "write it in one of these"),
    "a table that is none": ('slurm = "x"\n', SLURM, "[slurm] in cluster.toml should be one table", "it is a text", "write [slurm] once"),
    "tables in a list": ("[[slurm]]\n", SLURM, "[slurm] in cluster.toml should be one table", "it is a list", "write [slurm] once"),
    "a text for a number": ('[slurm]\ngpus_per_node = "8"\n', SLURM, "[slurm] gpus_per_node in cluster.toml should be a whole number", "it is a text", "gpus_per_node = 1"),
    "a number for a text": ("[kubernetes]\ncpu = 4\n", PODS, "[kubernetes] cpu in cluster.toml should be a text", "it is a whole number", 'cpu = "..."'),
    "a time that TOML reads": ("[slurm]\ntime = 12:00:00\n", SLURM, "[slurm] time in cluster.toml should be a text", "it is a date or a time", 'time = "..."'),
    "a text for a list": ('[ssh]\noptions = "-p22"\n', SSH, "[ssh] options in cluster.toml should be a list of texts", "it is a text", 'options = ["..."]'),
    "a list of numbers": ("[ssh]\noptions = [22]\n", SSH, "[ssh] options in cluster.toml should be a list of texts", "it is a list with something else in it", 'options = ["..."]'),
    "a choice in other letters": ('[ray]\nstrategy = "spread"\n', RAY, "[ray] strategy in cluster.toml is 'spread'", "the choices are PACK", "did you mean 'SPREAD'"),
    "a flag of the job": ('[slurm]\nplan = "shard=2"\n', SLURM, "the key plan in [slurm]", "the keys", "write --plan in the command, since it is about the job"),
    "a flag of the job with two words": ("[kubernetes]\ncheckpoint_every = 9\n", PODS, "the key checkpoint_every in", "the keys", "write --checkpoint-every in the command"),
    "hosts in the file": ('[ssh]\nhosts = "h1:2"\n', SSH, "the key hosts in [ssh]", "the keys", "write --hosts in the command"),
    "hosts where no command takes them": ('[slurm]\nhosts = "h1:2"\n', SLURM, "the key hosts in [slurm]", "the keys", "leave it out"),
    "true for a number": ("[ray]\ngpus_per_rank = true\n", RAY, "[ray] gpus_per_rank in cluster.toml should be a number", "it is true or false", "= 1"),
    "an infinity": ("[ray]\ncpus_per_rank = inf\n", RAY, "[ray] cpus_per_rank in cluster.toml should be a number", "it is infinite", "= 1"),
    "a number of many digits": ("[slurm]\nsignal = " + "9" * 99 + "\n", SLURM, "[slurm] signal in cluster.toml should be a whole number", "more than 64 bits", "= 1"),
    "a number of too many digits": ("[slurm]\nsignal = " + "9" * 9999 + "\n", SLURM, "can't read the cluster file cluster.toml", "line 2 has a number of more than 300 digits", "such as [ssh]"),
    "a number beyond all floats": ("[ray]\ncpus_per_rank = 1e999999999\n", RAY, "[ray] cpus_per_rank in cluster.toml should be a number", "it is infinite", "= 1"),
    "a key of 20,000 parts": ("[slurm]\na" + ".a" * 20_000 + " = 1\n", SLURM, "can't read the cluster file cluster.toml", "line 2 has more than 100 dots outside of texts", "such as [ssh]"),
    "a bad choice": ('[ray]\nstrategy = "SPREADS"\n', RAY, "[ray] strategy in cluster.toml is 'SPREADS'", "the choices are PACK", "did you mean 'SPREAD'"),
    "a bad choice of another launcher": ('[kubernetes]\ngang = "kue"\n', SSH, "[kubernetes] gang in cluster.toml is 'kue'", "the choices are none", "did you mean 'kueue'"),
    "an empty text": ('[ssh]\nprogram = ""\n', SSH, "[ssh] program in cluster.toml can't be used", "a text is empty", "leave it out"),
    "a line end": ('[ssh]\noptions = ["a\\nb"]\n', SSH, "[ssh] options in cluster.toml can't be used", "another control character", "mend it"),
    "no TOML": ("[slurm\n", SLURM, "can't read the cluster file cluster.toml", "it is not TOML (", "such as [ssh]"),
    "a key twice": ('[slurm]\nqos = "a"\nqos = "b"\n', SLURM, "can't read the cluster file cluster.toml", "it is not TOML (", "such as [ssh]"),
    "not UTF-8": (b'[slurm]\nqos = "\xff"\n', SLURM, "can't read the cluster file cluster.toml", "it is not UTF-8", "such as [ssh]"),
    "too long": ("#" * (MOST_BYTES + 1), SLURM, "can't read the cluster file cluster.toml", f"more than {MOST_BYTES} bytes", "such as [ssh]"),
    "nested too deep": ("a = " + "[" * 20000, SLURM, "can't read the cluster file cluster.toml", "it is", "such as [ssh]"),
    "a missing file": (None, SLURM, "can't read the cluster file cluster.toml", "No such file", "name a text file with tables such as [ssh]"),
    "a folder": ("/", SLURM, "can't read the cluster file cluster.toml", "Is a directory", "name a text file with tables such as [ssh]"),
    "a file on this host": ("", ["run", "-n", "2"], "--cluster does not apply to a job on this host", "--on ssh or --on mpi", "leave --cluster out"),
    "a time that Slurm can't read": ('[slurm]\ntime = "soon"\n', SLURM, "the time limit 'soon'", "([slurm] time in cluster.toml)", "12:00:00"),
    "a signal below zero": ("[slurm]\nsignal = -1\n", SLURM, "signal=-1 for sbatch", "it is below 0 ([slurm] signal in cluster.toml)", "write 0 or more"),
    "GPUs below zero": ("[slurm]\ngpus_per_node = -1\n", SLURM, "gpus_per_node=-1 for sbatch", "([slurm] gpus_per_node in cluster.toml)", "write 0 or more"),
    "CPUs below zero": ("[slurm]\ncpus_per_task = -2\n", SLURM, "cpus_per_task=-2 for sbatch", "([slurm] cpus_per_task in cluster.toml)", "write 0 or more"),
    "a partition of two words": ('[slurm]\npartition = "a b"\n', SLURM, "the argument 'a b' for sbatch", "([slurm] partition in cluster.toml)", "without"),
    "an option that is none": ('[slurm]\nsbatch_option = ["nice"]\n', SLURM, "the line 'nice' for sbatch", "([slurm] sbatch_option in cluster.toml)", "--exclusive"),
    "ranks without resources": ("[ray]\ncpus_per_rank = 0\n", RAY, "a rank under Ray needs resources", "([ray] cpus_per_rank in cluster.toml)", "a GPU"),
    "an ssh that is not there": ('[ssh]\nprogram = "/nowhere/ssh"\n', SSH, "can't reach other hosts by /nowhere/ssh", "([ssh] program in cluster.toml)", "install"),
    "an mpirun that is not there": ('[mpi]\nmpirun = "/nowhere/mpi"\n', ["run", "--on", "mpi"], "/nowhere/mpi to start ranks", "([mpi] mpirun in cluster.toml)", "name another with mpirun under [mpi]"),
    "an API of another gang": (IMAGE + 'pod_group_api = "v1alpha2"\n', PODS, "[kubernetes] pod_group_api in cluster.toml does not apply", "only --gang native", "add --gang native"),
    "a timeout without a gang": (IMAGE + "placeholder_timeout = 9\n", PODS, "[kubernetes] placeholder_timeout in cluster.toml does not apply", "yunikorn", "leave it out"),
    "an accelerator of none": (IMAGE + 'accelerator = "amd.com/gpu"\n', PODS, "[kubernetes] accelerator in cluster.toml does not apply", "has none", "add --gpus N"),
    "servers' CPUs without servers": (IMAGE + 'server_cpu = "2"\n', PODS, "[kubernetes] server_cpu in cluster.toml does not apply", "no servers", "server=2"),
    "a gang without a queue": (IMAGE + 'gang = "kueue"\n', PODS, "gang=kueue", "([kubernetes] gang in cluster.toml)", "write the queue that the cluster's administrator names, with --queue"),
    "a flag that contradicts the file": (IMAGE + 'queue = "ml"\n', [*PODS, "--gang", "none"], "the queue 'ml'", "([kubernetes] queue in cluster.toml, flag --gang)", "leave it out"),
    "a gang that the flag's kind can't have": (IMAGE + 'gang = "native"\n', [*PODS, "--kind", "mpijob"], "gang=native with kind=mpijob", "([kubernetes] gang in cluster.toml, flag --kind)", "jobset"),
    "a memory below /dev/shm": (IMAGE + 'shm = "4Gi"\n', PODS, "a /dev/shm of 4Gi", "([kubernetes] shm in cluster.toml, [kubernetes] memory in cluster.toml)", "more memory"),
    "no user": (IMAGE + "user = 0\n", PODS, "the job's user", "([kubernetes] user in cluster.toml)", "write 1"),
    "a toleration without a key": (IMAGE + 'toleration = ["=x"]\n', PODS, "--toleration =x", "([kubernetes] toleration in cluster.toml)", "NoSchedule"),
    "what only the file could say": ("[slurm]\n", PODS, "can't make a job for Kubernetes", "--image is not given", "image under [kubernetes] in the cluster file"),
    "Slurm under run": ("", ["run", "--on", "slurm"], "can't run a job --on", "stays with the ranks", "write `paceline submit slurm`"),
    "Kubernetes under run": ("", ["run", "--on", "kubernetes"], "can't run a job --on", "stays with the ranks", "write `paceline submit kubernetes`"),
    "a place that is none": ("", ["run", "--on", "shh"], "can't run a job --on shh", "local, ssh, mpi, ray", "did you mean 'ssh'"),
    "hosts of another launcher": ("", [*RAY, "-H", "h1:2"], "-H does not apply to a job --on ray", "it belongs to --on ssh", "leave -H out"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_error_of_three_lines(case, folder, capsys, monkeypatch):
    content, words, asked, found, fix = BAD[case]
    path = folder / "cluster.toml"
    path.unlink()
    if content == "/":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    monkeypatch.setattr("subprocess.Popen", refuse_to_start)
    at = 2 if words[0] == "submit" else 1
    job = [] if "-n" in words or "-H" in words else ["-n", "2"]
    file = ["--cluster", "cluster.toml"] if content != "" or "on this host" in case else []
    assert main([*words[:at], *file, *job, *words[at:], "train.py"]) == 2
    error = capsys.readouterr().err
    command = "paceline submit [a-z]+" if words[0] == "submit" else "paceline run"
    parts = re.fullmatch(rf"{command}: error: (.+)\n  found: (.+)\n  fix: (.+)\n", error)
    assert parts, error
    for part, said in zip(parts.groups(), (asked, found, fix), strict=True):
        assert said in part
    assert not (folder / "runs").exists(), "something was begun"


def refuse_to_start(*_, **__):
    raise AssertionError("a process was started")


def test_an_error_that_is_not_about_the_file_does_not_name_it(folder, capsys):
    assert main([*PODS, "--cluster", "cluster.toml", "--job", "Bert", "train.py"]) == 2
    error = capsys.readouterr().err
    assert "the job's name 'Bert'" in error
    assert "cluster.toml" not in error


def test_a_wrong_value_is_not_quoted(folder):
    """It may be a secret that stands in the wrong place."""
    (folder / "cluster.toml").write_text('[slurm]\ngpus_per_node = "s3cr3t"\n')
    with pytest.raises(UsageError, match="it is a text") as caught:
        read_cluster_file(folder / "cluster.toml")
    assert "s3cr3t" not in str(caught.value)


# --- what `explain` shows of it


def explained(capsys, *words):
    assert main(["explain", "--json", *words]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    return {row["setting"]: (row["value"], row["from"]) for row in json.loads(printed.out)["settings"]}


def test_explain_shows_each_setting_of_the_file_and_its_defaults(folder, capsys):
    shown = explained(capsys, "--cluster", "cluster.toml")
    keys = {f"[{table}] {key}" for table, settings in TABLES.items() for key in settings}
    assert keys <= set(shown)
    assert shown["[ssh] options"] == ("-F /nowhere/config", "cluster.toml: [ssh]")
    assert shown["[slurm] gpus_per_node"] == ("4", "cluster.toml: [slurm]")
    assert shown["[slurm] signal"] == ("120", "default")
    assert shown["[slurm] qos"] == ("none", "default")
    (folder / "cluster.toml").write_text("[ray]\n")
    assert {name for name in explained(capsys, "--cluster", "cluster.toml") if name.startswith("[")} == {
        f"[ray] {key}" for key in TABLES["ray"]
    }


def test_explain_says_that_it_read_a_file_without_tables(folder, capsys):
    (folder / "cluster.toml").write_text("# nothing yet\n")
    assert main(["explain", "--cluster", "cluster.toml"]) == 0
    assert "else from the cluster file" in capsys.readouterr().out.splitlines()[-1]


def test_explain_of_a_command_shows_what_its_flags_change(folder, capsys):
    cluster = ["--cluster", "cluster.toml"]
    shown = explained(capsys, *SLURM, *cluster, "--partition", "cpu", "-j", "2x4", "train.py")
    assert shown["launcher"] == ("paceline submit slurm", "command submit slurm")
    assert shown["size"] == ("8", "flag -j 2x4")
    assert shown["[slurm] partition"] == ("cpu", "flag --partition")
    assert shown["[slurm] time"] == ("2:00:00", "cluster.toml: [slurm]")
    assert shown["[slurm] account"] == ("none", "default")
    shown = explained(capsys, *PODS, *cluster, "--gang", "none", "--plan", "shard=2,zero=1", "train.py")
    assert shown["plan"] == ("shard=2,zero=1", "flag --plan shard=2,zero=1")
    assert shown["[kubernetes] gang"] == ("none", "flag --gang")
    shown = explained(capsys, *SSH, *cluster, "--python", "/py", "train.py")
    assert shown["size"] == ("2", "flag -H")
    assert shown["[ssh] python"] == ("/py", "flag --python")
    assert shown["[ssh] interface"] == ("eth1", "cluster.toml: [ssh]")


def test_explain_names_rays_variable(folder, capsys, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "h9:6379")
    assert explained(capsys, *RAY, "-n", "2", "train.py")["[ray] address"] == ("h9:6379", "RAY_ADDRESS")


def test_explain_of_a_job_on_this_host_is_that_of_its_flags(folder, capsys):
    of_command = explained(capsys, "run", "-n", "2", "train.py")
    assert of_command.pop("run directory") == ("runs/train-DATE-TIME", "default")
    of_flags = explained(capsys, "-n", "2")
    assert of_flags.pop("run directory") == ("runs/FILE-DATE-TIME", "default")
    assert of_command.pop("grace") == ("30 s", "default")
    assert of_command.pop("stall notice") == ("after 60 s", "default")
    assert of_command.pop("stall timeout") == ("never", "default")
    assert of_command.pop("restarts") == ("0", "default")
    assert of_command == of_flags


def test_explain_run_shows_run_directory_and_checkpoint_interval(folder, capsys, monkeypatch):
    words = [
        "--job",
        "a",
        "--runs",
        "all",
        "--checkpoint-every",
        "5",
        "--keep",
        "2",
        "--grace",
        "7",
        "--stall-notice",
        "0",
        "--stall-timeout",
        "9",
        "train.py",
    ]
    shown = explained(capsys, "run", *words)
    assert shown["run directory"] == ("all/a", "flag --runs, flag --job")
    assert shown["checkpoint every"] == ("5 steps", "flag --checkpoint-every")
    assert shown["checkpoints kept"] == ("2", "flag --keep")
    assert shown["grace"] == ("7 s", "flag --grace")
    assert shown["stall notice"] == ("never", "flag --stall-notice")
    assert shown["stall timeout"] == ("after 9 s", "flag --stall-timeout")
    monkeypatch.setenv("PACELINE_STALL_NOTICE", "9")
    Plan(mesh="replicate=2", checkpoint_every=0).write(folder / "plan.json")
    shown = explained(capsys, "run", "--resume", "--plan", "plan.json", "train.py")
    assert shown["run directory"] == ("runs, the last of train.py", "flag --resume")
    assert shown["checkpoint every"] == ("the end only", "flag --plan plan.json")
    assert shown["stall notice"] == ("after 9 s", "PACELINE_STALL_NOTICE")


def test_explain_of_a_job_that_is_sent_shows_where_it_is_kept(folder, capsys):
    shown = explained(capsys, *SLURM, "-j", "1x2", "--job", "a", "train.py")
    assert shown["run directory"] == ("runs/a", "flag --job")
    assert shown["checkpoint every"] == ("100 steps", "default")
    assert "grace" not in shown
    pods = ("--image", "i", "--cpu", "1", "--memory", "1Gi")
    shown = explained(capsys, *PODS, *pods, "-j", "1x2", "my_model.py")
    assert shown["run directory"] == ("/runs/my-model in the pods", "default")


def test_explain_shows_no_run_directory_where_there_is_none(folder, capsys, monkeypatch):
    assert explained(capsys)["run directory"] == ("none", "default")
    torchrun = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    for name, value in {**torchrun, "MASTER_ADDR": "h1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    shown = explained(capsys, "run", "train.py")
    assert shown["run directory"] == ("none", "default")
    assert "checkpoint every" not in shown
    assert explained(capsys, "run", "--job", "a", "train.py")["run directory"] == ("runs/a", "flag --job")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["plan", "train.py"], "can't explain the command 'plan'\n  found: run and submit start jobs"),
        (
            ["train.py"],
            "can't explain the command 'train.py'\n  found: run and submit start jobs\n  fix: write `paceline explain run train.py`",
        ),
        (["-n", "2", "run", "train.py"], "-n should be a flag of the command that is explained"),
        (["run", "--on", "ray", "-H", "h1:2", "train.py"], "-H does not apply to a job --on ray"),
        (["submit", "slurm", "--time", "soon", "train.py"], "the time limit 'soon'"),
        (["submit", "slurm", "train.py", "--time", "1"], "--time should stand before train.py"),
        (["--cluster", "none.toml"], "can't read the cluster file none.toml"),
    ],
)
def test_explain_refuses_what_the_command_would(words, said, folder, capsys):
    assert main(["explain", *words]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert re.fullmatch(r"paceline explain: error: .+\n  found: .+\n  fix: .+\n", error)


@pytest.mark.parametrize(
    "value",
    [
        ("--export=A=1,API_KEY=s3cr3t,B=s3cr3t",),
        ("--token", "s3cr3t"),
        ("-x", "HF_TOKEN=s3cr3t"),
        ("-oSetEnv=DB_PASSWORD=s3cr3t s3cr3t",),
        "https://user:s3cr3t@registry.example/bert",
        "user:s3cr3t@h1:6379",
        "password: s3cr3t",
    ],
)
def test_no_secret_is_shown(value):
    assert "s3cr3t" not in displayed(value)
    assert "(set, not shown)" in displayed(value)


def test_what_is_no_secret_is_shown():
    for value in ("registry.example:5000/bert:1", "12:00:00", "user@h1", "-oProxyJump=h1", "TOKENIZERS=1"):
        assert displayed(value) == value
    assert displayed(("-p", "2222")) == "-p 2222"

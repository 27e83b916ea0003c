"""Modules that are named by a string: started with `python -m`, or imported when first needed.

They stand in one table because neither a type checker nor a search for imports sees a name in a string.
"""

COMMAND = "paceline.cli.main"

# A job's processes.
AGENT = "paceline.run.supervise.agent"
RAY_DRIVER = "paceline.run.supervise.ray_driver"
FORKSERVER = "paceline.run.rank.forkserver"
TEMPLATE = "paceline.run.rank.template"
WORKER = "paceline.run.rank.worker"
FUNCTION = "paceline.run.rank.function"
EXTERNAL_RANK = "paceline.run.rank.external_rank"
SERVER_PROCESS = "paceline.run.rank.server_process"

# What the fork server imports before it forks.
JOB = "paceline.train.job"
PARALLEL_SERVER = "paceline.parallel.server"
GRAPH_MODEL = "paceline.parallel.graph_model"
FSDP_ADAPTER = "paceline.parallel.shard.fsdp_adapter"
DEMO_WORKLOAD = "paceline.demo.demo_workload"

# Children with torch of commands that start without it.
TORCH_FACTS = "paceline.doctor.probe.torch_facts"
PROFILE_WORKLOAD = "paceline.profile.profile_workload"
PROFILE_LOOP = "paceline.profile.profile_loop"
VERIFY_DRY_RUN = "paceline.verify.ranks.dry_run"
VERIFY_REFERENCE = "paceline.verify.ranks.reference"
VERIFY_RANK = "paceline.verify.ranks.rank_main"
VERIFY_REPLAY = "paceline.verify.ranks.replay_step"

# What trains a loop of the user's own.
PACKAGE = "paceline"
ACCELERATE = "paceline.integrations.accelerate"
TRANSFORMERS = "paceline.integrations.transformers"
TRL = "paceline.integrations.trl"
LIGHTNING = "paceline.integrations.lightning"

# What has Horovod's names, and what lets a rank import them, by `paceline horovodrun`.
HOROVOD = "paceline.horovod"
HOROVOD_ALIAS = "paceline.horovod.import_alias"

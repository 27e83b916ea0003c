"""A script that distributes its training without Paceline is known by its source."""

from __future__ import annotations

import pytest

from paceline.launch.workload_file import read_workload_file

FOUND = {
    "import torch.distributed as dist\ndist.init_process_group('gloo')": "makes a process group",
    "from torch import distributed\ndistributed.init_process_group()": "makes a process group",
    "import torch\ntorch.distributed.init_process_group()": "makes a process group",
    "from torch.distributed import init_process_group as start\nstart()": "makes a process group",
    "import torch\nmodel = torch.nn.parallel.DistributedDataParallel(model)": "DistributedDataParallel",
    "from torch.nn.parallel import DistributedDataParallel as DDP\nDDP(model)": "DistributedDataParallel",
    "from torch.distributed.fsdp import fully_shard\nfully_shard(model)": "FSDP",
    "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP\nFSDP(model)": "FSDP",
    "from torch.distributed.device_mesh import init_device_mesh\ninit_device_mesh('cpu', (2,))": "DeviceMesh",
    "def main():\n    from accelerate import Accelerator\n    a = Accelerator()": "Accelerate",
    "import lightning as L\nL.Trainer(devices=2).fit(module)": "Lightning",
    "import pytorch_lightning as pl\npl.Trainer()": "Lightning",
    "from transformers import Trainer\nTrainer(model).train()": "transformers",
    "import deepspeed\nengine, *_ = deepspeed.initialize(model=model)": "DeepSpeed",
    "from ray.train.torch import TorchTrainer\nTorchTrainer(loop).fit()": "Ray Train",
}
NOT_FOUND = {
    "nothing distributed": "import torch\nprint(torch.ones(2))",
    "another's name": "from mine import init_process_group\ninit_process_group()",
    "a method": "import torch\nself.init_process_group()",
    "not called": "from torch.nn.parallel import DistributedDataParallel\n",
    "with Paceline": "import paceline\nimport torch.distributed as dist\ndist.init_process_group()",
    "a relative import": "from .accelerate import Accelerator\nAccelerator()",
}


def read(folder, text, **others):
    for name, content in others.items():
        (folder / f"{name}.py").write_text(content)
    (folder / "train.py").write_text(text)
    return read_workload_file(str(folder / "train.py"), 2).plain


@pytest.mark.parametrize("text", FOUND)
def test_what_it_calls_is_found(tmp_path, text):
    assert FOUND[text] in read(tmp_path, text).found


@pytest.mark.parametrize("name", NOT_FOUND)
def test_other_files_are_none(tmp_path, name):
    assert read(tmp_path, NOT_FOUND[name]) is None


def test_files_of_its_folder_are_read(tmp_path):
    wrap = "from torch.nn.parallel import DistributedDataParallel\ndef wrap(m):\n    return DistributedDataParallel(m)"
    main = "import parts\nimport torch.distributed as dist\ndist.init_process_group()"
    assert "DistributedDataParallel" in read(tmp_path, main, parts=wrap).found
    assert read(tmp_path, main, parts=f"import paceline\n{wrap}") is None


SPAWN = "import torch.multiprocessing as mp\nimport torch.distributed as dist\ndist.init_process_group()\n{}mp.spawn(f)"


def test_a_script_that_torchrun_can_start_spawns_only_without(tmp_path):
    assert read(tmp_path, SPAWN.format("")).spawner == "torch.multiprocessing.spawn"
    assert read(tmp_path, SPAWN.format("import os\nos.environ['RANK'] = '0'\n")).spawner
    script = read(tmp_path, SPAWN.format("import os\nif 'RANK' not in os.environ:\n    "))
    assert script.spawner == ""
    assert script.needs_variables(2)


def test_ray_starts_its_own_workers(tmp_path):
    script = read(tmp_path, "from ray.train.torch import TorchTrainer\nTorchTrainer(loop).fit()")
    assert script.spawner == "ray.train.torch.TorchTrainer"
    assert not script.needs_variables(1)


def test_one_process_of_lightning_is_no_rank(tmp_path):
    script = read(tmp_path, "import lightning\nlightning.Trainer(devices=2)")
    assert script.needs_variables(2)
    assert not script.needs_variables(1)


@pytest.mark.parametrize("option", ["--local-rank", "--local_rank"])
def test_the_option_for_the_local_rank_is_found(tmp_path, option):
    text = f"import torch.distributed as d\nd.init_process_group()\nparser.add_argument('-r', '{option}', type=int)"
    assert read(tmp_path, text).rank_option == option

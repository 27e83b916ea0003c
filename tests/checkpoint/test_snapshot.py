"""Model and optimizer of any strategy: DTensors, stages that know their own parameters only, ties."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from test_meshes import FACTS, on_ranks
from torch import nn

from paceline.checkpoint.manifest import read_manifest
from paceline.checkpoint.save import CheckpointWriter
from paceline.comm import api
from paceline.nouns.errors import CheckpointError, WorkloadError
from paceline.nouns.shard_spec import FLAT, Cut, LocalShard, ShardSpec
from paceline.train import snapshot

from support.ranks import run_ranks

GROUPS = {"decayed": {"weight_decay": 0.1}, "free": {"weight_decay": 0.0, "lr": 0.02}}


def make(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def optimizer_of(model, kind=torch.optim.AdamW, is_all=True):
    here = [(name, p) for name, p in model.named_parameters() if is_all or not p.is_meta]
    groups = [{"params": [p for n, p in here if n.endswith(end)], **GROUPS[key]}
              for key, end in (("decayed", "weight"), ("free", "bias"))]  # fmt: skip
    return kind(groups, lr=0.01)


def steps(model, optimizer, count=2, seed=1):
    random = torch.Generator().manual_seed(seed)
    for _ in range(count):
        model(torch.randn(4, 5, generator=random)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def state_of(model, optimizer):
    names = {id(p): name for name, p in model.named_parameters()}
    full = lambda value: value.full_tensor() if hasattr(value, "full_tensor") else value  # noqa: E731
    found = {name: full(tensor).detach().clone() for name, tensor in model.state_dict().items()}
    for parameter, state in optimizer.state.items():
        found.update({f"{names[id(parameter)]}/{key}": full(value).clone() for key, value in state.items()})
    return found


def save(rank, size, folder, model, optimizer, held):
    optimizer_parts, facts = snapshot.optimizer_state(model, optimizer, held, size)
    parts = {**snapshot.model_parts(model, held, size), **optimizer_parts}
    writer = CheckpointWriter(rank, size, lambda event: None)
    writer.begin(folder, parts, {}, {**FACTS, "world_size": size, "optimizer": facts}, 0)
    return writer


def load(folder, model, optimizer, held, comm):
    manifest = read_manifest(folder)
    tensors = snapshot.read_state(folder, manifest, model, held, comm)
    snapshot.restore_model(model, tensors, held)
    snapshot.restore_optimizer(model, optimizer, tensors, manifest["optimizer"], {})


def load_alone(folder, model, optimizer):
    return on_ranks(1, lambda comm: load(folder, model, optimizer, {}, comm))[0]


def is_equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def fully_sharded(rank, size):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    api.init()
    model = make()
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
    held = {n: LocalShard(ShardSpec(s, (Cut(0, (s[0],), rank, size),)), (rank,)) for n, s in shapes.items()}
    return model, optimizer_of(model), held


def save_sharded(rank, size, folder):
    model, optimizer, held = fully_sharded(rank, size)
    steps(model, optimizer)
    assert save(rank, size, folder, model, optimizer, held).wait() is None
    before = state_of(model, optimizer)
    steps(model, optimizer, seed=2)
    return before, state_of(model, optimizer)


def load_sharded(rank, size, folder):
    model, optimizer, held = fully_sharded(rank, size)
    load(folder, model, optimizer, held, api.world().comm)
    before = state_of(model, optimizer)
    steps(model, optimizer, seed=2)
    return before, state_of(model, optimizer)


def test_dtensors_are_saved_and_loaded_by_their_local_parts(tmp_path):
    folder = tmp_path / "saved"
    before, after = run_ranks(2, save_sharded, 2, folder)[0]
    assert len(before) == 4 + 4 * 3
    for loaded, gone_on in run_ranks(2, load_sharded, 2, folder):
        assert is_equal(loaded, before)
        assert is_equal(gone_on, after), "the optimizer went on otherwise"
    for loaded, _ in run_ranks(4, load_sharded, 4, folder):  # 3 rows over 4 ranks: the last has none
        assert is_equal(loaded, before)
    model = make(seed=3)
    optimizer = optimizer_of(model)
    load_alone(folder, model, optimizer)
    assert is_equal(state_of(model, optimizer), before)


def test_dtensors_load_what_one_process_saved(tmp_path):
    model = make()
    optimizer = optimizer_of(model)
    steps(model, optimizer)
    assert save(0, 1, tmp_path / "saved", model, optimizer, {}).wait() is None
    for loaded, _ in run_ranks(3, load_sharded, 3, tmp_path / "saved"):
        assert is_equal(loaded, state_of(model, optimizer))


def stage_of(model, rank):
    """The model as a stage leaves it: the other's parameters on the meta device."""
    for layer in (model[2 - 2 * rank],):
        layer.to("meta")
    return model


def stage(rank, is_all, seed=0):
    """Stage `rank` of 2 of a trained model and its optimizer; `is_all`: the optimizer lists the other's too."""
    model = make(seed)
    trained = optimizer_of(model)
    steps(model, trained)
    whole = state_of(model, trained)
    stage_of(model, rank)
    optimizer = optimizer_of(model, is_all=is_all)
    for name, parameter in model.named_parameters():
        if not parameter.is_meta:
            keys = ("step", "exp_avg", "exp_avg_sq")
            optimizer.state[parameter] = {key: whole[f"{name}/{key}"] for key in keys}
    held = {n: LocalShard(ShardSpec(tuple(p.shape)), (rank,)) for n, p in model.named_parameters() if not p.is_meta}
    return model, optimizer, held, whole


@pytest.mark.parametrize("is_all", [True, False])
def test_stages_save_and_load_what_they_hold(tmp_path, is_all):
    folder = tmp_path / "saved"
    stages = [stage(rank, is_all) for rank in range(2)]
    writers = [save(rank, 2, folder, *stages[rank][:3]) for rank in range(2)]
    assert [writer.wait() for writer in writers] == [None, None]
    groups = read_manifest(folder)["optimizer"]["groups"]
    assert [group["parameters"] for group in groups] == [["0.weight", "2.weight"], ["0.bias", "2.bias"]]
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]

    model = make(seed=3)
    optimizer = optimizer_of(model)
    assert load_alone(folder, model, optimizer) is None
    assert is_equal(state_of(model, optimizer), stages[0][3])

    def load_stage(comm):
        model, optimizer, held, _ = others[comm.rank]
        load(folder, model, optimizer, held, comm)
        here = state_of(model, optimizer)
        return all(t.is_meta or torch.equal(t, stages[0][3][name]) for name, t in here.items()) and len(here) == 10

    others = [stage(rank, is_all, seed=4) for rank in range(2)]
    assert on_ranks(2, load_stage) == [True, True]


def saved_alone(tmp_path, **options):
    model = make()
    optimizer = optimizer_of(model, **options)
    steps(model, optimizer)
    assert save(0, 1, tmp_path / "saved", model, optimizer, {}).wait() is None
    return tmp_path / "saved"


def other_groups(model):
    return torch.optim.AdamW([{"params": [p]} for p in model.parameters()])


def moved_between_groups(model):
    groups = [[model[0].weight, model[2].weight, model[0].bias], [model[2].bias]]
    return torch.optim.AdamW([{"params": group} for group in groups])


def frozen_now(model):
    return torch.optim.AdamW([{"params": [model[0].weight]}, {"params": [model[0].bias, model[2].bias]}])


OTHER_PARAMETERS = "this one's groups have other parameters"


@pytest.mark.parametrize(
    ("make_optimizer", "found"),
    [
        (other_groups, "this one is AdamW, 4 groups of parameters"),
        (moved_between_groups, OTHER_PARAMETERS),
        (frozen_now, OTHER_PARAMETERS),
    ],
)
def test_other_groups_are_refused(tmp_path, make_optimizer, found):
    folder = saved_alone(tmp_path)
    model = make()
    error = load_alone(folder, model, make_optimizer(model))
    assert isinstance(error, CheckpointError)
    assert error.found == found


def test_a_tensor_that_the_model_lacks_is_named(tmp_path):
    folder = saved_alone(tmp_path)
    model = make()
    model[2] = nn.Linear(7, 3, bias=False)
    error = load_alone(folder, model, optimizer_of(model))
    assert error.found == "its 2.bias of shape (3,) is not in the model"
    assert error.exit_code == 2


def test_ranks_with_other_groups_are_not_published(tmp_path):
    models = [make() for _ in range(2)]
    optimizers = [optimizer_of(models[0]), torch.optim.AdamW(models[1].parameters())]
    writers = [save(rank, 2, tmp_path / "saved", models[rank], optimizers[rank], {}) for rank in range(2)]
    failure, _ = [writer.wait() for writer in writers]
    assert "is of a rank with 1" in failure.found


def test_snapshot_refuses_cut_state_of_another_shape():
    model = make()
    optimizer = optimizer_of(model)
    steps(model, optimizer)
    optimizer.state[model[0].weight]["row"] = torch.zeros(7)
    whole, _ = snapshot.optimizer_state(model, optimizer, {}, 1)
    assert whole["optimizer/row/0.weight"].shard == LocalShard(ShardSpec((7,)), (0,))
    held = {"0.weight": LocalShard(ShardSpec((7, 5), (Cut(0, (7,), 0, 1),)), (0,))}
    with pytest.raises(WorkloadError, match="it is of shape"):
        snapshot.optimizer_state(model, optimizer, held, 1)


def test_optimizer_state_alone_can_be_cut():
    """ZeRO's first two stages: whole parameters, and a part of their optimizer's state."""
    model = make()
    optimizer = optimizer_of(model)
    steps(model, optimizer)
    weight = model[0].weight
    cut = ShardSpec((7, 5), (Cut(FLAT, (35,), 1, 2),))
    for key in ("exp_avg", "exp_avg_sq"):
        optimizer.state[weight][key] = optimizer.state[weight][key].view(-1)[18:]
    parts, _ = snapshot.optimizer_state(model, optimizer, {"optimizer/0.weight": LocalShard(cut, (1,))}, 2)
    assert parts["optimizer/exp_avg/0.weight"].shard == LocalShard(cut, (1,))
    assert "optimizer/step/0.weight" not in parts, "rank 0 has the first part and answers for the number"
    assert parts["optimizer/step/0.bias"].shard.holders == (0, 1)


@pytest.mark.parametrize("text", ["no JSON", "[1]", "null"])
def test_a_config_that_is_not_of_transformers_is_left_out(text):
    model = make()
    model.config = SimpleNamespace(to_json_string=lambda: text)
    assert snapshot.config_facts(model) == {}
    model.config = SimpleNamespace(to_json_string=lambda: '{"width": 7}')
    assert snapshot.config_facts(model)["config"] == {"width": 7, "architectures": ["Sequential"], "dtype": "float32"}

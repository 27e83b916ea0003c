"""What Paceline expects of torch's private parts: that they are there, and do what the package relies on.

A new version of torch is tried with these first. Each test says what fails in Paceline where its part is another.
"""

import ast
import copy
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.fsdp
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.checkpoint import checkpoint

import paceline
from paceline.torch_private import autograd, data_loader, modules, operations, optim, process_groups, tensors

SOURCE = Path(paceline.__file__).parent
HERE = SOURCE / "torch_private"
FILES = sorted(file for file in SOURCE.rglob("*.py") if HERE not in file.parents)
# Private names that are used as they are. The first three and `_version` are read by most libraries, and at every step.
ANYWHERE = {"_parameters", "_buffers", "_modules", "_version"}


def private_attributes():
    """The names with an underscore that `torch_private` reads of torch, without its own."""
    names = set()
    for file in HERE.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
                names.add(node.attr)
            if isinstance(node, ast.ImportFrom):
                names |= {name.name for name in node.names if name.name.startswith("_")}
    return names - ANYWHERE


def private_uses(file):
    """Yield what a file uses of torch's private parts: imports of private modules and names, and private attributes."""
    private = private_attributes()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            words = [*node.module.split("."), *(name.name for name in node.names)]
            yield from (word for word in words if word.startswith("_"))
        if isinstance(node, ast.Import):
            for name in node.names:
                words = name.name.split(".")
                yield from (word for word in words if words[0] == "torch" and word.startswith("_"))
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            owner = ast.unparse(node.value)
            is_of_torch = owner == "torch" or owner.startswith("torch.")
            is_operation = owner.startswith(
                ("aten", "_ATEN", "torch.ops")
            )  # ATen's names are the same for every caller
            if not is_operation and owner != "self" and (is_of_torch or node.attr in private):
                yield f"{owner}.{node.attr}"


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SOURCE)))
def test_private_parts_of_torch_are_used_through_their_module(file):
    assert set(private_uses(file)) == set(), "give it a name and a reason in paceline/torch_private"


def test_a_fake_tensor_has_a_shape_and_no_values():
    with operations.FakeTensorMode():
        value = torch.ones(3, 4) @ torch.ones(4, 2)
        assert isinstance(value, operations.FakeTensor)
        assert value.shape == (3, 2)
        with pytest.raises(operations.DataDependentOutputException):
            value.sum().item()
        with pytest.raises(operations.DynamicOutputShapeException):
            value.nonzero()
        with operations.unset_fake_temporarily():
            assert torch.ones(2).tolist() == [1, 1]


class Calls(operations.TorchDispatchMode):
    """Notes each operation."""

    def __init__(self):
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operations.append(func)
        return func(*args, **(kwargs or {}))


def test_a_dispatch_mode_sees_operations_also_of_a_backward_pass():
    weight = torch.ones(2, requires_grad=True)
    with Calls() as calls:
        loss = weight.exp().sum()
        with operations.disable_current_modes():
            torch.sin(weight.detach())
        loss.backward()
    assert torch.ops.aten.exp.default in calls.operations
    assert torch.ops.aten.mul.Tensor in calls.operations  # the derivative of exp
    assert torch.ops.aten.sin.default not in calls.operations


class Named(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise AssertionError("a function was called on a subclass")


def test_code_can_run_without_subclasses_and_function_modes():
    named = torch.ones(2).as_subclass(Named)
    with operations.DisableTorchFunctionSubclass():
        torch.add(named, 1)
    with operations.DisableTorchFunction():
        torch.add(named, 1)
    with pytest.raises(AssertionError, match="a function was called"):
        torch.add(named, 1)
    seen = []
    torch.vmap(lambda row: seen.append(operations.is_functorch_wrapped_tensor(row)) or row)(torch.ones(2, 2))
    assert seen == [True]
    with operations.no_python_dispatcher():
        assert not operations.is_functorch_wrapped_tensor(torch.ones(2))


def test_an_operation_tells_its_schema_and_its_overloads():
    add = torch.ops.aten.add.Tensor
    assert isinstance(add, operations.OpOverload)
    assert [argument.name for argument in operations.schema_of(add).arguments] == ["self", "other", "alpha"]
    assert operations.schema_of(torch.ops.aten.add_.Tensor).is_mutable
    assert operations.overloads_of(add) is torch.ops.aten.add
    assert operations.overload_of(torch.ops.aten.mul, add) is torch.ops.aten.mul.Tensor
    assert operations.overload_of(torch.ops.aten.relu, add) is None


def test_a_graph_has_the_call_that_switches_gradients_off():
    class Switched(nn.Module):
        def forward(self, x):
            with torch.no_grad():
                return x + 1

    graph = torch.fx.symbolic_trace(Switched()).graph
    exported = torch.export.export(Switched(), (torch.ones(2),)).graph_module
    targets = {node.target for each in (graph, exported.graph) for node in each.nodes}
    assert operations.set_grad_enabled in targets or torch.ops.higher_order.wrap_with_set_grad_enabled in targets


def test_a_custom_operation_has_its_code():
    @torch.library.custom_op("paceline_contract::double", mutates_args=())
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    code = operations.custom_code(torch.ops.paceline_contract.double.default)
    assert code is not None
    assert code(torch.ones(1)).item() == 2
    assert operations.custom_code(torch.ops.aten.add.Tensor) is None


def test_a_library_ends_at_once():
    library = torch.library.Library("aten", "IMPL")
    library.impl("_grouped_mm", lambda *arguments: None, "CPU", allow_override=True)
    operations.end_library(library)
    left, right = torch.ones(2, 8, dtype=torch.bfloat16), torch.ones(8, 8, dtype=torch.bfloat16)
    assert torch.nn.functional.grouped_mm(left, right[None], offs=torch.tensor([2], dtype=torch.int32)) is not None


def test_autograd_reports_a_running_backward_pass_and_its_node():
    told = []
    weight = torch.ones(1, requires_grad=True)
    before = autograd.next_node_number()
    result = weight.exp()
    result.register_hook(lambda gradient: told.append(autograd.is_in_backward()))
    result.grad_fn.register_hook(lambda *gradients: told.append(autograd.running_node_number()))
    assert not autograd.is_in_backward()
    assert autograd.running_node_number() is None
    result.backward()
    assert told == [True, before]


def test_a_backward_pass_runs_within_a_mode():
    names = []

    class Functions(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            names.append(getattr(func, "__name__", ""))
            return func(*args, **(kwargs or {}))

    weight = torch.ones(2, requires_grad=True)
    with autograd.backward_passes_within(Functions()):
        checkpoint(lambda x: torch.tanh(x), weight, use_reentrant=False).sum().backward()
    assert "tanh" in names


def test_a_running_profiler_is_seen():
    assert not autograd.is_profiler_running()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert autograd.is_profiler_running()


def test_hooks_of_tensors_modules_and_optimizers_are_listed():
    def hook(*arguments):
        """Do nothing."""

    model = nn.Linear(2, 1)
    model.weight.register_hook(hook)
    model.weight.register_post_accumulate_grad_hook(hook)
    model.register_full_backward_hook(hook)
    before, after = autograd.gradient_hooks(model.weight)
    assert [*before.values(), *after.values()] == [hook, hook]
    assert list(autograd.backward_hooks_of(model)) == [hook]
    autograd.set_gradient_hooks(model.weight, None, None)
    assert autograd.gradient_hooks(model.weight) == (None, None)
    everywhere = nn.modules.module.register_module_full_backward_hook(hook)
    assert hook in autograd.backward_hooks_of_every_module()
    everywhere.remove()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(hook)
    optimizer.register_step_post_hook(hook)
    assert list(autograd.step_pre_hooks(optimizer).values()) == [hook]
    assert list(autograd.step_post_hooks(optimizer).values()) == [hook]
    everywhere = register_optimizer_step_pre_hook(hook)
    assert hook in autograd.step_hooks_of_every_optimizer()
    everywhere.remove()


@pytest.mark.parametrize(
    "layer",
    [nn.BatchNorm1d(2), nn.BatchNorm2d(2), nn.BatchNorm3d(2), nn.SyncBatchNorm(2)],
    ids=lambda x: type(x).__name__,
)
def test_every_batch_norm_has_one_base_class(layer):
    assert isinstance(layer, modules.BatchNorm)
    assert isinstance(layer, modules.NormBase)
    assert not isinstance(nn.InstanceNorm1d(2), modules.BatchNorm)
    assert isinstance(nn.InstanceNorm1d(2), modules.NormBase)


def test_batch_norm_checks_its_input():
    modules.check_images(nn.BatchNorm1d(2), torch.ones(3, 2))
    with pytest.raises(ValueError, match="expected 2D or 3D"):
        modules.check_images(nn.BatchNorm1d(2), torch.ones(1, 1, 1, 1))


def test_every_dropout_has_one_base_class():
    layers = [nn.Dropout(), nn.Dropout1d(), nn.Dropout2d(), nn.Dropout3d(), nn.AlphaDropout(), nn.FeatureAlphaDropout()]
    assert all(isinstance(layer, modules.Dropout) for layer in layers)


def test_what_a_module_holds():
    module = nn.Module()
    module.register_buffer("kept", torch.ones(1))
    module.register_buffer("derived", torch.ones(1), persistent=False)
    assert modules.non_persistent_buffers(module) == {"derived"}
    assert all(name in vars(module) for name in modules.HOOKS)
    assert {"_parameters", "_buffers", "_modules"} <= vars(module).keys()
    frames = []
    module.forward = lambda: frames.append(sys._getframe(1))
    module()
    assert frames[0].f_code is modules.CALL or frames[0].f_back.f_code is modules.CALL


def test_a_compiled_module_is_known_and_its_copy_can_forget_it():
    plain, compiled = nn.Linear(1, 1), nn.Linear(1, 1)
    compiled.compile(backend="eager")
    assert [modules.is_compiled(plain), modules.is_compiled(compiled)] == [False, True]
    assert modules.compiled_from(torch.compile(plain, backend="eager")) is plain
    again = copy.deepcopy(compiled)
    modules.forget_compiled(again)
    assert not modules.is_compiled(again)


def test_a_recurrent_module_computes_with_a_list_of_its_weights():
    module = nn.LSTM(1, 1)
    assert {name for name in vars(module) if name.startswith(modules.FLAT_WEIGHTS)}
    with torch.no_grad():
        before = module(torch.ones(1, 1, 1))[0]
        for name, weight in list(module._parameters.items()):
            module._parameters[name] = nn.Parameter(torch.zeros_like(weight))
        modules.list_weights_again(module)
        assert not torch.equal(module(torch.ones(1, 1, 1))[0], before)


@pytest.mark.parametrize("name", ["lstm", "gru", "rnn_tanh", "rnn_relu"])
def test_recurrent_modules_look_their_function_up(name, monkeypatch):
    kinds = {
        "lstm": nn.LSTM,
        "gru": nn.GRU,
        "rnn_tanh": nn.RNN,
        "rnn_relu": lambda *sizes: nn.RNN(*sizes, nonlinearity="relu"),
    }
    called = []
    original = getattr(modules.FUNCTIONS, name)
    monkeypatch.setattr(modules.FUNCTIONS, name, lambda *arguments: called.append(name) or original(*arguments))
    kinds[name](1, 1)(torch.ones(1, 1, 1))
    assert called == [name]


def test_tensors_of_one_memory_have_one_key():
    value = torch.ones(4)
    assert tensors.storage_key(value[1:]) == tensors.storage_key(value) == tensors.key_of(value.untyped_storage())
    assert tensors.storage_key(value.clone()) != tensors.storage_key(value)
    with operations.FakeTensorMode():
        first, second = torch.ones(2), torch.ones(2)
        assert tensors.storage_key(first) != tensors.storage_key(second)
    assert tensors.is_view(value[1:])
    assert not tensors.is_view(value)
    version = value._version
    value[1:].add_(1)
    assert value._version == version + 1


def test_the_flag_of_gradients_is_set_in_one_place():
    weight = torch.ones(1)
    tensors.SET_REQUIRES_GRAD(weight, True)
    assert tensors.REQUIRES_GRAD.__get__(weight) is True


def test_operations_on_lists():
    values = [torch.ones(2), torch.full((2,), 3.0)]
    optim.foreach_mul_(values, 2.0)
    assert [value.tolist() for value in values] == [[2, 2], [6, 6]]
    optim.foreach_copy_(values, [torch.zeros(2), torch.ones(2)])
    optim.foreach_lerp_(values, [torch.ones(2), torch.ones(2)], 0.5)
    assert [value.tolist() for value in values] == [[0.5, 0.5], [1, 1]]
    assert torch.stack(list(optim.foreach_norm(values, 2))).tolist() == pytest.approx([0.5**0.5, 2**0.5])
    found = torch.zeros(1)
    optim.foreach_unscale_(values, found, torch.tensor([2.0]))
    assert (values[1].tolist(), found.item()) == ([2, 2], 0)
    optim.foreach_unscale_([torch.tensor([float("inf")])], found, torch.tensor([1.0]))
    assert found.item() == 1


def test_optimizers_take_lists_by_default_where_they_are_told():
    called = []
    module = sys.modules[torch.optim.SGD.__module__]
    step = module._multi_tensor_sgd
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    with pytest.MonkeyPatch.context() as patch, optim.foreach_by_default([torch.Tensor, nn.Parameter]):
        patch.setattr(module, "_multi_tensor_sgd", lambda *a, **k: called.append("lists") or step(*a, **k))
        torch.optim.SGD([weight], lr=0.1).step()
    assert called == ["lists"]


def test_functorch_has_vmap_and_gradients_where_implemented():
    assert callable(autograd.apis.vmap_impl)
    assert all(callable(getattr(autograd.eager_transforms, name)) for name in autograd.DIFFERENTIATES)


def test_a_scaler_tells_what_it_has_found():
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale((weight * float("inf")).sum()).backward()
    assert optim.scale_of(scaler).item() == 4
    assert optim.is_scaled(scaler, optimizer)
    unscaled = []
    own = getattr(scaler, optim.UNSCALE)
    optim.replace_methods(scaler, {optim.UNSCALE: lambda *a: unscaled.append(len(a)) or own(*a)})
    scaler.unscale_(optimizer)
    assert unscaled == [4]
    assert not optim.is_scaled(scaler, optimizer)
    assert optim.found_infinite(scaler, optimizer)
    optim.switch_off(scaler)
    assert not scaler.is_enabled()


def test_a_scheduler_counts_the_steps_that_it_is_told_of():
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    inner = [torch.optim.lr_scheduler.ConstantLR(optimizer), torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]
    both = torch.optim.lr_scheduler.SequentialLR(optimizer, inner, [2])
    assert list(optim.inner_of(both)) == inner
    assert optim.INNER in both.state_dict()
    assert optim.STATE_OF_ALL - {"base_lrs"} <= inner[1].state_dict().keys()
    assert optim.is_wrapped_by_scheduler(optimizer.step)

    def step():
        optim.note_step(optimizer)

    assert not optim.is_wrapped_by_scheduler(step)
    optim.mark_as_wrapped(step)
    optimizer.step = step
    optimizer.step()
    inner[1].step()  # without the note it warns, and a warning is an error here


def test_the_result_of_workers_is_seen_before_it_is_asked_for():
    assert data_loader.batches_at_hand(iter([1])) is None
    assert data_loader.is_batch(torch.ones(1))
    assert not data_loader.is_batch(data_loader.ExceptionWrapper((ValueError, ValueError("no"), None)))
    # The rest is tests/train/test_device_batches.py: a queue of pinned batches, which needs a GPU or a stand-in.


def test_a_tree_is_taken_apart_and_put_together():
    tree = {"a": [1, (2,)], "b": 3}
    leaves, spec = tensors.tree_flatten(tree)
    assert isinstance(spec, tensors.TreeSpec)
    assert leaves == tensors.tree_leaves(tree) == list(tensors.tree_iter(tree)) == [1, 2, 3]
    assert tensors.tree_unflatten([4, 5, 6], spec) == {"a": [4, (5,)], "b": 6}
    assert tensors.tree_map(lambda leaf: -leaf, tree) == {"a": [-1, (-2,)], "b": -3}


def test_a_process_group_of_absent_ranks(tmp_path):
    torch.distributed.init_process_group("fake", store=process_groups.FakeStore(), rank=1, world_size=4)
    try:
        value = torch.ones(2)
        torch.distributed.all_reduce(value)
        assert value.tolist() == [1, 1]
    finally:
        torch.distributed.destroy_process_group()


@pytest.fixture
def one_rank(tmp_path):
    """A process group of this process."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


needs_shard = pytest.mark.skipif(
    not hasattr(torch.distributed.fsdp.FSDPModule, "set_reduce_scatter_unused_params"),
    reason="shard is refused under this torch",
)


@needs_shard
def test_backward_hooks_of_fsdp_can_be_limited_to_gathering(one_rank):
    from torch.distributed.fsdp import fully_shard

    from paceline.torch_private import fsdp

    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    parts = [fully_shard(part) for part in (*model, model)]
    is_forward, noted = True, []
    for part in parts:
        fsdp.limit_backward_hooks(part, lambda: is_forward, lambda: noted.append("gradient"))
    fsdp.make_root(model)
    inputs = torch.ones(1, 2, requires_grad=True)
    torch.autograd.grad(model(inputs).sum(), inputs)
    assert noted
    assert all(parameter.grad is None for parameter in model.parameters())
    is_forward = False
    model(inputs).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    beside = torch.ones(1, requires_grad=True) * 2
    beside.register_hook(fsdp.before_backward(model))
    beside.backward()  # begins the model's backward pass, which ends with this one


@needs_shard
def test_fsdp_leaves_gathered_parameters_in_state_dicts_if_told(one_rank):
    from torch.distributed.fsdp import fully_shard

    from paceline.torch_private import fsdp

    model = fully_shard(nn.Linear(2, 1))
    fsdp.make_root(model)
    fsdp.keep_gathered_in_state_dicts([model])
    model.unshard()
    assert type(model.state_dict()["weight"].data) is torch.Tensor
    with fsdp.copies_from_host():
        model.reshard()
        model.unshard()


def test_an_operation_of_dtensors_gets_a_rule_of_our_own(one_rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    value = distribute_tensor(torch.ones(2), init_device_mesh("cpu", (1,)), [Replicate()])
    assert type(tensors.own_part(value)) is torch.Tensor
    operation = torch.ops.aten.sinh.default
    tensors.dtensor_rules()[operation] = lambda operation, arguments, options: arguments[0]
    try:
        assert tensors.own_part(torch.sinh(value)).tolist() == [1, 1]
    finally:
        del tensors.dtensor_rules()[operation]


def test_a_backward_pass_in_two_halves():
    from torch.autograd.graph import get_gradient_edge

    from paceline.torch_private import pipelining

    weight, inputs = torch.full((1,), 3.0, requires_grad=True), torch.full((1,), 2.0, requires_grad=True)
    result = (weight * inputs).clone()
    edges = pipelining.construct_reverse_graph([result.grad_fn])
    ends = [get_gradient_edge(weight).node]
    groups = pipelining.get_param_groups([get_gradient_edge(inputs).node], ends, edges)
    assert [ends[0] in group["params"] for group in groups] == [True]
    _, groups = pipelining.stage_backward_input([result], [torch.ones(1)], [inputs], iter([weight]))
    assert (inputs.grad.item(), weight.grad) == (3, None)
    pipelining.stage_backward_weight(iter([weight]), groups)
    assert weight.grad.item() == 2


def test_a_function_is_kept_out_of_the_compiler():
    from paceline.torch_private.modules import compiled_never

    def plain(x):
        assert not torch.compiler.is_compiling()
        return x + 1

    alone = compiled_never(plain)
    whole = torch.compile(lambda x: alone(x * 2), backend="eager")
    assert whole(torch.ones(1)).item() == 3
    assert torch.compiler.config.recompile_limit > 0

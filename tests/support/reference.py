"""The pages of docs/reference/: the public names that they list, and what the docstring of each lacks."""

from __future__ import annotations

import ast
import dataclasses
import doctest
import importlib
import inspect
import io
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

PAGES = Path(__file__).parents[2] / "docs" / "reference"
_DIRECTIVE = re.compile(r"^::: (paceline[\w.]*)\n((?: {4}.*\n)*)", re.MULTILINE)
_SECTION = re.compile(r"^(Args|Attributes|Returns|Yields|Raises|Examples):\n((?: {4}.*\n|\n)*)", re.MULTILINE)
_ITEM = re.compile(r"^ {4}(\w+)(?: \([^)]*\))?: ", re.MULTILINE)
# What Paceline's own modules call of either form of a job.
BASE = [
    "notice",
    "named",
    "settle",
    "compare_ranks",
    "check_place",
    "leave_step",
    "go_to",
    "restore_own_state",
    "facts",
    "is_at_step",
    "may_be_done",
]
# Public by their spelling alone: Paceline's own modules call them.
# By name, or by the path of a name that stands twice.
INTERNAL = {
    "Average": ["parts", "restore"],
    "Decoding": ["choose", "end_tokens", "of"],
    "Workload": ["check_ranks"],
    "Job": ["stand_at", "leave_step", "go_to", *BASE],
    "LoopJob": [
        "part",
        "assembly_class",
        "batches_of",
        "begin_batch",
        "take",
        "end_step",
        "sum_gradients",
        "skip_update",
        "count_update",
        *BASE,
    ],
    # Methods of Accelerate's that scripts call as Accelerate documents them.
    "paceline.integrations.accelerate.Accelerator": [
        "backward",
        "clip_grad_norm_",
        "clip_grad_value_",
        "data_rank",
        "end_training",
        "free_memory",
        "gather",
        "gather_for_metrics",
        "get_state_dict",
        "is_cut",
        "join_uneven_inputs",
        "load_state",
        "no_sync",
        "pad_across_processes",
        "prepare",
        "prepare_data_loader",
        "prepare_model",
        "reduce",
        "save_state",
        "split_between_processes",
    ],
    # What transformers' Trainer calls.
    "paceline.integrations.transformers.TrainerMixin": [
        "create_accelerator_and_postprocess",
        "floating_point_ops",
        "job",
        "train",
    ],
    # Hooks that Lightning's Trainer calls.
    "paceline.integrations.lightning.Strategy": [
        "setup_environment",
        "set_world_ranks",
        "setup",
        "setup_precision_plugin",
        "model_to_device",
        "backward",
        "optimizer_step",
        "block_backward_sync",
        "on_validation_start",
        "on_train_end",
        "reduce",
        "reduce_boolean_decision",
        "all_gather",
        "barrier",
        "broadcast",
        "lightning_module_state_dict",
        "optimizer_state",
        "load_optimizer_state_dict",
        "load_checkpoint",
        "teardown",
        "plan",
        "mesh",
        "is_distributed",
        "root_device",
        "distributed_sampler_kwargs",
    ],
    "Plan": [
        "check_effect",
        "settled",
        "of",
        "of_variable",
        "strategy",
        "is_one_process",
        "without_shared_memory",
        "is_compiled",
        "shares_updates",
        "gradient_axes",
        "spreading_axes",
    ],
    "Handle": ["join", "step", "take"],
    "TensorBoard": ["write", "close"],
    "paceline.sinks.wandb.WandB": ["write", "close"],
    "paceline.sinks.mlflow.MLflow": ["write", "close"],
    "paceline.sinks.prometheus.Prometheus": ["write", "close"],
    "paceline.sinks.opentelemetry.OpenTelemetry": ["write", "close"],
}


@dataclass(frozen=True)
class Public:
    """A name that a page lists, and of a class the members that the page shows."""

    page: str
    path: str
    what: Any
    members: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Its last word: a member has that of its class, too."""
        return self.path.removeprefix("paceline.").rpartition(".")[2]


def public() -> list[Public]:
    """Every name on every page of the reference."""
    found = []
    for page in sorted(PAGES.glob("*.md")):
        for path, options in _DIRECTIVE.findall(page.read_text() + "\n"):
            members = (yaml.safe_load(options) or {}).get("options", {}).get("members", [])
            found.append(Public(page.name, path, _load(path), members))
    return found


def documented() -> dict[str, Any]:
    """Every public function, class and shown member, by its path."""
    found = {}
    for one in public():
        found[one.path] = one.what
        found |= {f"{one.path}.{member}": inspect.getattr_static(one.what, member) for member in one.members}
    return found


def sections(docstring: str) -> dict[str, str]:
    """The sections of a docstring, by title."""
    return {title: text for title, text in _SECTION.findall(inspect.cleandoc(docstring) + "\n")}


def items(docstring: str, *titles: str) -> list[str]:
    """The names that the sections with these titles explain."""
    parts = sections(docstring)
    return [name for title in titles for name in _ITEM.findall(parts.get(title, ""))]


def examples(docstring: str) -> list[doctest.Example]:
    """The lines that the docstring's examples would have a reader type, with what they print."""
    return doctest.DocTestParser().get_examples(inspect.cleandoc(docstring))


def run_example(path: str, docstring: str, shown: io.StringIO) -> doctest.TestResults:
    """Run the examples of a docstring after the lines with which all begin; write to `shown` what fails."""
    setup = re.search(r"```python\n(.*?)```", (PAGES / "README.md").read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(setup[1] if setup else "", names)
    test = doctest.DocTestParser().get_doctest(docstring, names, path, None, 0)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    runner.run(test, out=shown.write, clear_globs=False)
    return runner.summarize(verbose=False)


def gaps(path: str, what: Any) -> list[str]:
    """What the docstring of a public name lacks, a line each."""
    if isinstance(what, property):
        found = _gaps_of_property(what)
    elif inspect.isclass(what):
        found = _gaps_of_class(what)
    else:
        found = _gaps_of_function(getattr(what, "__func__", what))  # of a classmethod, the function
    return [f"{path} {gap}" for gap in found]


def undocumented_members(one: Public) -> list[str]:
    """Methods and properties of a class that no page shows, and that are not Paceline's own.

    Those of a base that no page shows itself are the class's own; another class may show them.
    """
    if not inspect.isclass(one.what):
        return []
    named = {
        *one.members,
        *INTERNAL.get(one.name, INTERNAL.get(one.path, [])),
        *items(one.what.__doc__ or "", "Args", "Attributes"),
    }
    kinds = (property, classmethod, staticmethod)
    shown = set(map(id, documented().values()))
    bases = [base for base in one.what.__mro__[1:] if base.__module__ == "paceline.train.base_job"]
    return [
        name
        for kind in (one.what, *bases)
        for name, value in vars(kind).items()
        if not name.startswith("_") and (inspect.isfunction(value) or isinstance(value, kinds))
        if name not in named and id(value) not in shown
    ]


def _load(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def _gaps_of_property(what: property) -> Iterator[str]:
    if not what.__doc__:
        yield "has no docstring"
    elif "Returns" not in sections(what.__doc__):
        yield "has no Returns"


def _gaps_of_class(what: type) -> Iterator[str]:
    docstring = vars(what).get("__doc__") or ""
    if not examples(docstring):
        yield "has no example"
    parameters: list[str] = []
    # An inherited one is documented where it is defined; that of a protocol is typing's.
    if "__init__" in vars(what) and not getattr(what, "_is_protocol", False):
        parameters = list(inspect.signature(what.__init__).parameters)[1:]
    yield from _differences(parameters, items(docstring, "Args"), items(docstring, "Attributes"))
    source = inspect.getsource(what)
    there = {*dir(what), *_annotated(what), *re.findall(r"self\.(\w+)", source)}
    for name in items(docstring, "Attributes"):
        if name not in there:
            yield f"documents the attribute {name}, which is not there"
    constructors = [vars(what).get(name) for name in ("__init__", "__post_init__", "__new__")]
    for constructor in constructors:
        if inspect.isfunction(constructor) and constructor.__module__ == what.__module__:
            yield from _missing_errors(constructor, docstring)


def _annotated(what: type) -> list[str]:
    fields = [one.name for one in dataclasses.fields(what)] if dataclasses.is_dataclass(what) else []
    return [*fields, *inspect.get_annotations(what)]


def _gaps_of_function(what: Callable[..., Any]) -> Iterator[str]:
    docstring = what.__doc__ or ""
    if not examples(docstring):
        yield "has no example"
    signature = inspect.signature(what)
    parameters = [name for name in signature.parameters if name not in ("self", "cls")]
    yield from _differences(parameters, items(docstring, "Args"))
    returned = str(signature.return_annotation)
    title = "Yields" if returned.startswith("Iterator") else "Returns"
    if returned not in ("None", "NoReturn") and title not in sections(docstring):
        yield f"has no {title}"
    yield from _missing_errors(what, docstring)


def _differences(parameters: list[str], explained: list[str], attributes: list[str] | None = None) -> Iterator[str]:
    for name in parameters:
        if name not in (*explained, *(attributes or [])):
            yield f"does not explain the argument {name}"
    for name in explained:
        if name not in parameters:
            yield f"explains the argument {name}, which it does not have"


def _missing_errors(what: Callable[..., Any], docstring: str) -> Iterator[str]:
    explained = items(docstring, "Raises")
    for name in _raised(what):
        if name not in explained:
            yield f"raises {name}, which it does not say"


def _raised(what: Callable[..., Any]) -> list[str]:
    """Names of the errors that the function makes in its `raise` statements, itself or by a function for that."""
    try:
        source = textwrap.dedent(inspect.getsource(what))
    except (OSError, SyntaxError):  # what dataclasses write has no source
        return []
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Raise) and (made := _made(node.exc)) is not None:
            maker = what.__globals__.get(made)
            if inspect.isclass(maker) and issubclass(maker, BaseException):
                found.append(maker.__name__)
            elif callable(maker):
                found.append(str(inspect.signature(maker).return_annotation))
    return list(dict.fromkeys(found))


def _made(node: ast.expr | None) -> str | None:
    """The name that is called to make an error: `UsageError` of `UsageError(...).at(rank=0)`."""
    while isinstance(node, ast.Call | ast.Attribute):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else None

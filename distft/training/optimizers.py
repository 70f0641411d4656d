"""Which optimizers stay the same when their parameters are split over ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from distft.training.clip import check_group_bounds

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

OptimizerFactory = Callable[[Any], "Optimizer"]
ParamGroup = Mapping[str, Any]

# Their update of one number reads that number's own gradient and state alone, so a shard is
# updated as it would be inside the whole tensor.
ELEMENTWISE = frozenset(
    {"Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "Lion", "NAdam", "RAdam", "RMSprop", "SGD"}
)
_WHOLE_NORM = "scales by the norm of the whole tensor"
_ONE_STEP_SIZE = "estimates one step size from inner products over all parameters"
REFUSED = {
    # Elementwise, and yet not the same: their result is not what a strategy gathers and saves.
    "ASGD": "trains towards an average that it keeps in its state, which no model is made from",
    "AdamWScheduleFree": "trains at other weights than those to be saved, which it swaps in eval()",
    "SGDScheduleFree": "trains at other weights than those to be saved, which it swaps in eval()",
    # Elementwise, and decided by rounding.
    "Rprop": "steps by whether a gradient changed its sign, which rounding decides near 0",
    # A number's update reads other numbers' gradients.
    "Adafactor": "factors the second moment over the rows and columns of the whole matrix",
    "Adam_mini": "keeps one second moment for a block of the whole tensor",
    "CAME": "factors the second moment over the rows and columns of the whole matrix",
    "DAdaptAdam": _ONE_STEP_SIZE,
    "GaLoreAdamW": "projects whole matrices on their singular vectors",
    "LAMB": _WHOLE_NORM,
    "LARS": _WHOLE_NORM,
    "LBFGS": "keeps a history over all parameters at once, and needs a closure",
    "Lamb": _WHOLE_NORM,
    "Muon": "orthogonalises whole matrices",
    "Prodigy": _ONE_STEP_SIZE,
    "SOAP": "rotates whole matrices",
    "Shampoo": "preconditions whole matrices",
    "SparseAdam": "reads sparse gradients, which no collective here reduces",
}
# How names of optimizers end whose state is quantized, in bitsandbytes, torchao and others.
_QUANTIZED = ("8bit", "4bit", "Fp8")


def check_factory(factory: Any) -> None:
    """Raise unless calling ``factory`` on parameters makes an optimizer that sharding keeps.

    The factory is tried on one number first, so that a wrong one is found before anything is
    sharded.

    Raises:
        ValueError: It is an optimizer already, not callable, or its optimizer is not on the list.

    Collective: none.
    """
    import torch

    if isinstance(factory, torch.optim.Optimizer):
        name = type(factory).__name__
        raise ValueError(
            f"apply() got a {name} that was built before sharding, so it would hold tensors that "
            f"the model no longer has. Pass how to build it, such as partial({name}, lr=1e-4)."
        )
    if not callable(factory):
        raise ValueError(
            f"apply() needs a function from parameters to an optimizer, and got {factory!r}. "
            "Pass one such as partial(AdamW, lr=1e-4)."
        )
    trial = factory([{"params": [torch.nn.Parameter(torch.zeros(1))]} for _ in range(2)])
    name = type(trial).__name__
    package = type(trial).__module__.partition(".")[0]
    if not isinstance(trial, torch.optim.Optimizer):
        raise ValueError(f"apply() needs a torch optimizer, and the function made a {name}.")
    if len(trial.param_groups) != 2:
        raise ValueError(
            f"The function got 2 parameter groups and made a {name} of {len(trial.param_groups)}. "
            "Hand the groups on as they come, and give them to apply(param_groups=...)."
        )
    if name in ELEMENTWISE and package != "bitsandbytes":
        return
    why = REFUSED.get(name, "has not been shown to give the same update on shards")
    if name.endswith(_QUANTIZED):
        why = "quantizes its state in blocks that sharding cuts elsewhere"
    elif package == "bitsandbytes":
        # Of the same name as torch's, and 8 bits wide where optim_bits says so.
        name = f"bitsandbytes' {name}"
        why = "updates raw memory of whole tensors, which shards are not"
    raise ValueError(
        f"{name} {why}. Use one of the {len(ELEMENTWISE)} elementwise ones: "
        f"{', '.join(sorted(ELEMENTWISE))}."
    )


def name_groups(
    model: nn.Module, param_groups: Iterable[ParamGroup] | None
) -> list[dict[str, Any]]:
    """Return the parameter groups with parameter names in place of tensors.

    Sharding replaces tensors, so the groups must outlive them by name. Groups without a trainable
    parameter are left out, since DeepSpeed drops them and numbers the rest anew.

    Args:
        model: The model before it is sharded.
        param_groups: As torch optimizers take them; ``params`` may hold parameters or names. None
            means one group of all trainable parameters.

    Raises:
        ValueError: A group has no ``params``, names a tensor that the model does not have, two
            groups share one, a trainable parameter is in none, or a ``max_grad_norm`` is not
            above 0.

    Collective: none.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    trainable = [name for name, p in model.named_parameters() if p.requires_grad]
    if not trainable:
        raise ValueError(
            f"The model has {len(names)} parameters and 0 that require gradients. "
            "Set requires_grad on those to train."
        )
    if param_groups is None:
        return [{"params": trainable}]
    param_groups = list(param_groups)
    check_group_bounds(param_groups)
    groups, seen = [], set[str]()
    for index, group in enumerate(param_groups):
        if not isinstance(group, Mapping) or "params" not in group:
            raise ValueError(f"param_groups[{index}] has no `params`. Pass dicts with `params`.")
        entries = group["params"]
        entries = [entries] if isinstance(entries, str) or hasattr(entries, "shape") else entries
        members = [_name_of(entry, names, index) for entry in entries]
        for name in members:
            if name in seen:
                raise ValueError(f"param_groups[{index}] repeats {name}. Give it one group.")
            seen.add(name)
        members = [name for name in members if name in set(trainable)]
        if members:
            groups.append({**group, "params": members})
    missing = [name for name in trainable if name not in seen]
    if missing:
        raise ValueError(
            f"{len(missing)} of {len(trainable)} trainable parameters are in no group, such as "
            f"{missing[0]}. Add them to a group, or set requires_grad=False."
        )
    return groups


def split_groups(groups: Sequence[ParamGroup], apart: Collection[str]) -> list[dict[str, Any]]:
    """Return groups of names of which each is wholly in a set of names or wholly outside it.

    Collective: none.
    """
    found = []
    for group in groups:
        parts = ([n for n in group["params"] if (n in apart) is side] for side in (False, True))
        found += [{**group, "params": part} for part in parts if part]
    return found


def follow_parameters(
    param_groups: Iterable[ParamGroup] | None, before: Mapping[str, Tensor], model: nn.Module
) -> Iterable[ParamGroup] | None:
    """Return the groups with a model's parameters of now in place of those it had before.

    Collective: none.
    """
    now = dict(model.named_parameters())
    new = {id(old): now[name] for name, old in before.items() if now[name] is not old}
    if param_groups is None or not new:
        return param_groups
    followed = []
    for group in param_groups:
        members = group.get("params", ()) if isinstance(group, Mapping) else ()
        alone = isinstance(members, str) or hasattr(members, "shape")
        members = [new.get(id(entry), entry) for entry in ([members] if alone else members)]
        followed.append({**group, "params": members} if "params" in group else group)
    return followed


def _name_of(entry: Any, names: Mapping[int, str], index: int) -> str:
    if isinstance(entry, tuple):
        entry = entry[0]
    name = entry if isinstance(entry, str) else names.get(id(entry))
    if name is None or name not in names.values():
        what = entry if isinstance(entry, str) else f"a tensor of shape {tuple(entry.shape)}"
        raise ValueError(
            f"param_groups[{index}] holds {what}, which is none of the model's {len(names)} "
            "parameters. Take parameters or names from model.named_parameters()."
        )
    return name


def build_optimizer(
    factory: OptimizerFactory, parameters: Mapping[str, Tensor], groups: Sequence[ParamGroup]
) -> Optimizer:
    """Return the optimizer over sharded parameters, its groups as `name_groups` gave them.

    Every group also keeps its parameters' names under ``param_names``.

    Collective: none.
    """
    built = [
        {
            **{key: value for key, value in group.items() if key != "params"},
            "params": [parameters[name] for name in group["params"]],
        }
        for group in groups
    ]
    optimizer = factory(built)
    for group, named in zip(optimizer.param_groups, groups, strict=True):
        group["param_names"] = list(named["params"])
    return optimizer


def num_moments(factory: OptimizerFactory, groups: Sequence[ParamGroup]) -> int:
    """Return how many tensors of a parameter's size the optimizer keeps for it: the most of any.

    It is found out by a step on two numbers with the settings of each group.

    Collective: none.
    """
    import torch

    tried = {group["params"][0]: torch.nn.Parameter(torch.zeros(2)) for group in groups}
    settings = [{**group, "params": [group["params"][0]]} for group in groups]
    optimizer = build_optimizer(factory, tried, settings)
    for parameter in tried.values():
        parameter.grad = torch.zeros(2)
    optimizer.step()
    states = (optimizer.state[parameter].values() for parameter in tried.values())
    return max(sum(torch.is_tensor(v) and v.shape == (2,) for v in values) for values in states)

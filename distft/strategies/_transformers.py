"""Everything of transformers' tensor and expert parallelism that is not its public API.

transformers says how a layer is split (a *plan*: names of modules and parameters to the name of a
style) and has the styles. Which rules apply, in which order, and what must hold before anything is
split is decided here. `tests/unit/test_transformers_names.py` fails first when upstream moves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from distft.formulas.split_rules import DISPATCH, NORM, generic_name

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

# From the name of a module or parameter to the name of its style.
Plan = dict[str, str]

EXPERTS = "grouped_gemm"
EXPERT_STYLES = (DISPATCH, EXPERTS)
# Between layers of these two styles activations are split.
HALVES = ("colwise", "rowwise")


def require_styles() -> Any:
    """Return transformers' registry of styles.

    Raises:
        RuntimeError: This transformers has none.

    Collective: none.
    """
    import transformers

    try:
        # Both modules register their styles when they are loaded.
        from transformers.distributed import expert_parallel, tensor_parallel  # noqa: F401
        from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES

        missing = [name for name in (*EXPERT_STYLES, NORM) if name not in ALL_PARALLEL_STYLES]
    except ImportError as error:
        missing = [str(error)]
    if missing:
        raise RuntimeError(
            f"transformers {transformers.__version__} has no parallel style {', '.join(missing)}. "
            "Run pip install 'transformers>=5.24'."
        )
    return ALL_PARALLEL_STYLES


# ---- plans --------------------------------------------------------------------------------------


def model_plans(model: Any) -> tuple[Plan, Plan]:
    """Return a model's own rules for tensors and for experts, ``*`` for a layer's number.

    Collective: none.
    """
    tensors, experts = (getattr(model, name, None) or {} for name in ("tp_plan", "ep_plan"))
    return dict(tensors), dict(experts)


def find_plans(
    caller: str, model: nn.Module, tp: int, ep: int, rules: Mapping[str, str] | None
) -> tuple[Plan, Plan]:
    """Return what is split over ``tp`` and over ``ep``: names in the model to styles.

    Rules of one's own come over the model's, one by one; an empty mapping leaves out all rules
    for tensors. A module whose experts are dispatched keeps no rule for tensors.

    Raises:
        ValueError: A rule matches nothing or names an unknown style, or there is no rule for an
            axis above 1.

    Collective: none.
    """
    styles = require_styles()
    names = _generic_names(model)
    for rule, style in (rules or {}).items():
        if style not in styles:
            raise ValueError(
                f"{caller}: the plan's style {style!r} for {rule} is none of the {len(styles)} "
                f"that transformers has: {', '.join(sorted(styles))}."
            )
    lost = [rule for rule in rules or {} if rule not in names]
    if lost:
        raise ValueError(
            f"{caller}: {len(lost)} of {len(rules or {})} rules of the plan match nothing in "
            f"{type(model).__name__}: {', '.join(lost)}.{_nearest(lost[0], names)}"
        )
    tensors, experts = merge_rules(*model_plans(model), rules)
    tensors = {rule: style for rule, style in tensors.items() if rule in names}
    experts = {rule: style for rule, style in experts.items() if rule in names}
    if tp > 1 and not tensors and rules != {}:
        raise ValueError(
            f"{caller}: {type(model).__name__} has no plan for tensor parallelism, and tp is {tp}. "
            "Pass one such as plan={'model.layers.*.mlp.up_proj': 'colwise', "
            "'model.layers.*.mlp.down_proj': 'rowwise'}, or leave tp at 1."
        )
    if ep > 1 and DISPATCH not in experts.values():
        raise ValueError(
            f"{caller}: {type(model).__name__} has no experts with a plan for expert parallelism, "
            f"and ep is {ep}. Use a mixture-of-experts model, pass a plan, or leave ep at 1."
        )
    expert_plan = _expand(model, experts) if ep > 1 else {}
    inside = tuple(f"{name}." for name in expert_plan)
    tensor_plan = {
        name: style
        for name, style in (_expand(model, tensors) if tp > 1 else {}).items()
        if name not in expert_plan and not name.startswith(inside)
    }
    return tensor_plan, expert_plan


def merge_rules(
    tensors: Mapping[str, str], experts: Mapping[str, str], rules: Mapping[str, str] | None
) -> tuple[Plan, Plan]:
    """Return a model's rules for tensors and for experts with those of one's own over them.

    An empty mapping of one's own leaves out all rules for tensors.

    Collective: none.
    """
    if rules is None:
        return dict(tensors), dict(experts)
    own = {rule: style for rule, style in rules.items() if style not in EXPERT_STYLES}
    of_experts = {rule: style for rule, style in rules.items() if style in EXPERT_STYLES}
    return ({**tensors, **own} if rules else {}), {**experts, **of_experts}


def _generic_names(model: nn.Module) -> set[str]:
    modules = {generic_name(name) for name, _ in model.named_modules() if name}
    parameters = model.named_parameters(remove_duplicate=False)
    return modules | {generic_name(name) for name, _ in parameters}


def _nearest(rule: str, names: set[str]) -> str:
    import difflib

    close = difflib.get_close_matches(generic_name(rule), names, n=1, cutoff=0.5)
    return f" Did you mean {close[0]}?" if close else " Write names as in named_modules()."


def _expand(model: nn.Module, plan: Plan) -> Plan:
    """Return one entry for every module and parameter, a module's own parameters before it.

    A rule for a module is also one for its own parameters.
    """
    found: Plan = {}
    for path, module in model.named_modules():
        style = plan.get(generic_name(path))
        for name, _ in module.named_parameters(recurse=False, remove_duplicate=False):
            full = f"{path}.{name}" if path else name
            chosen = plan.get(generic_name(full), style)
            if chosen is not None:
                found[full] = chosen
        if style is not None:
            found[path] = style
    return found


# ---- splitting ----------------------------------------------------------------------------------


def split_tensors(model: nn.Module, mesh: DeviceMesh, plan: Plan) -> None:
    """Split parameters over a mesh of one axis and make their modules' forward passes fit.

    Every rank must hold the same values; nothing is sent.

    Collective: none.
    """
    modules = dict(model.named_modules())
    with _ties_kept(model):
        _split_parameters(modules, mesh, plan)
    for name, style in plan.items():
        if name in modules:
            module = modules[name]
            if style == "mla_kv_a_proj":
                module.config = model.config.get_text_config()  # type: ignore[union-attr,operator]
            fit_forward(module, style, mesh, mesh)


def split_experts(model: nn.Module, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh, plan: Plan) -> None:
    """Give each rank of a mesh of one axis its experts, and send tokens to them by all-to-all.

    Collective: none.
    """
    modules = dict(model.named_modules())
    _split_parameters(modules, ep_mesh, plan)
    for name, style in plan.items():
        if name in modules:
            fit_forward(modules[name], style, tp_mesh, ep_mesh)


def _split_parameters(modules: Mapping[str, nn.Module], mesh: DeviceMesh, plan: Plan) -> None:
    for name, style in plan.items():
        if name not in modules:
            path, _, parameter = name.rpartition(".")
            split_parameter(modules[path], parameter, style, mesh)


def split_parameter(module: nn.Module, name: str, style: str, mesh: DeviceMesh) -> None:
    """Split one parameter of a module, which is whole, over a mesh of one axis.

    Collective: none.
    """
    require_styles()[style].shard_param(module, name, mesh)
    own_memory(module._parameters[name])


def fit_forward(module: nn.Module, style: str, tp_mesh: DeviceMesh, ep_mesh: DeviceMesh) -> None:
    """Make the forward pass of a module fit its split parameters, as a style says.

    Collective: none.
    """
    if style == NORM:
        _sum_gradients_in_backward(module, tp_mesh)
    elif style == DISPATCH:
        require_styles()[style].install_forward(module, ep_mesh=ep_mesh, tp_mesh=tp_mesh)
    else:
        require_styles()[style].install_forward(module, tp_mesh)


def split_factor(module: nn.Module, style: str, mesh: DeviceMesh) -> None:
    """Split the parameters of a linear layer, which are whole, and fit its forward pass.

    Collective: none.
    """
    for name in list(module._parameters):
        split_parameter(module, name, style, mesh)
    fit_forward(module, style, mesh, mesh)


@contextmanager
def _ties_kept(model: nn.Module) -> Iterator[None]:
    """Let places that share a parameter share the new one, which each rule would make for itself.

    Raises:
        ValueError: The rules for two of its places split it in different ways.
    """
    places: dict[int, list[tuple[str, nn.Module, str]]] = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            places.setdefault(id(parameter), []).append((f"{path}.{name}", module, name))
    yield
    for shared in places.values():
        tensors = [module._parameters[name] for _, module, name in shared]
        split = [getattr(tensor, "placements", None) for tensor in tensors]
        if len(tensors) > 1 and len(set(split)) > 1:
            raise ValueError(
                f"The plan splits {shared[0][0]} as {split[0]} and {shared[1][0]}, which is the "
                f"same tensor, as {split[1]}. Give both the same split, or untie them in the "
                "config."
            )
        for _, module, name in shared:
            module._parameters[name] = tensors[0]


def own_memory(parameter: Any) -> None:
    """Let a rank's part have memory of its own: a view would hold all of the whole tensor.

    Collective: none.
    """
    import torch

    local = getattr(parameter, "_local_tensor", None)
    if local is not None and not local.is_meta:
        parameter._local_tensor = local.detach().clone(memory_format=torch.contiguous_format)


def _sum_gradients_in_backward(module: nn.Module, mesh: DeviceMesh) -> None:
    """Sum the gradients of a whole parameter that each rank uses on its own heads only.

    Inside the graph, so that every micro-step adds its own sum. transformers sums ``.grad`` after
    each backward pass, which sums the earlier micro-steps of a window again.
    """
    forward = module.forward

    def summed(*args: Any, **kwargs: Any) -> Any:
        whole = dict(module._parameters)
        module._parameters.update(
            {
                name: sum_gradients(parameter, mesh)
                for name, parameter in whole.items()
                if parameter is not None
            }
        )
        try:
            return forward(*args, **kwargs)
        finally:
            module._parameters.update(whole)

    module.forward = summed


def sum_gradients(tensor: Any, mesh: DeviceMesh) -> Any:
    """Return a tensor of which each rank of a mesh of one axis uses a part, as it is.

    Its gradient is summed over the ranks in the backward pass.

    Collective: none here; one all_reduce in the backward pass.
    """
    from transformers.distributed.parallel_utils import _AllReduceBackward

    return _AllReduceBackward.apply(tensor, mesh.get_group())

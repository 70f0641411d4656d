"""Case EP-07: a router, or any module, that is kept in fp32 stays so in bf16 training."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

import distft
from distft import DDP, EP, FSDP2, HSDP, TP, NDParallel, ZeRO1, ZeRO2, ZeRO3
from distft.testing import tiny_batches, tiny_model
from tests.gloo.test_costs import check_memory, check_traffic

ROWS = (3, 8, 13, 6)
LEARNING_RATE = 1e-5
GATES = ("model.layers.0.mlp.gate", "model.layers.1.mlp.gate")


def near_experts(gate_dtype: str = "float32") -> Any:
    """Return M in bf16 whose routers score pairs of experts 1e-3 apart, which bf16 cannot tell."""
    import torch

    model = tiny_model("M").bfloat16()
    for layer in model.model.layers:
        row = torch.randn(32, generator=torch.Generator().manual_seed(5))
        # Where the row says yes, 5 comes first and 1 just before 0; else 4, and 2 before 3.
        factors = torch.tensor([1.0, 1.001, 0.5, 0.5005, 0.2, 3.0])
        weight = factors[:, None] * row
        layer.mlp.gate.weight = torch.nn.Parameter(weight.to(getattr(torch, gate_dtype)))
    return model


def watched(model: Any) -> list[Any]:
    """Return a list that gets, for each forward pass of a router, its chosen experts and fp32's."""
    seen: list[Any] = []
    for layer in model.model.layers:
        watch_gate(layer.mlp.gate, layer.mlp.gate.weight.detach().clone().float(), seen)
    return seen


def watch_gate(gate: Any, weight: Any, seen: list[Any]) -> None:
    """Add to a list what a router chooses, and what fp32 weights choose of the same input."""
    import torch

    def watch(_gate: Any, args: Any, output: Any) -> None:
        scores = args[0].detach().float().reshape(-1, weight.shape[1]) @ weight.T
        seen.append((output[2].detach().clone(), torch.topk(scores, 2).indices))

    gate.register_forward_hook(watch)


def train(strategy: Any, path: str, build: Any = near_experts) -> dict[str, Any]:
    """Train two steps, save, load into another model; return what the gates were on the way."""
    import torch
    from torch.optim import AdamW

    distft.init(seed=0)
    plain = build()
    start = {n: p.detach().clone() for n, p in plain.named_parameters() if ".gate." in n}
    seen = watched(plain)
    factory = partial(AdamW, lr=LEARNING_RATE)
    model, optimizer = strategy.apply(plain, factory)
    inner = distft.unwrap(model)
    dtypes = [inner.get_submodule(gate).weight.dtype for gate in GATES]
    rows = tiny_batches(ROWS)[strategy.dp_rank :: strategy.dp_size]
    strategy.train_step(model, optimizer, rows)
    chosen = list(seen)
    dtypes += [inner.get_submodule(gate).weight.dtype for gate in GATES]
    after = strategy.gather_weights(model, start)
    strategy.train_step(model, optimizer, rows, max_grad_norm=1.0)
    strategy.save(path, model, optimizer, step=2)
    saved = strategy.gather_weights(model)
    other, other_optimizer = strategy.apply(tiny_model_in_both_dtypes(), factory)
    strategy.load(path, other, other_optimizer)
    loaded = strategy.gather_weights(other)
    return {
        "dtypes": dtypes
        + [distft.unwrap(other).get_submodule(gate).weight.dtype for gate in GATES],
        "moved": [float((after[name] - start[name].float()).abs().max()) for name in start],
        "chosen": chosen,
        "same": all(torch.equal(saved[name], loaded[name]) for name in saved),
    }


def tiny_model_in_both_dtypes() -> Any:
    """Return M of other values with its gates in fp32 and the rest in bf16."""
    model = tiny_model("M", seed=7).bfloat16()
    for layer in model.model.layers:
        layer.mlp.gate.float()
    return model


def check(results: list[dict[str, Any]]) -> None:
    import torch

    for result in results:
        assert set(result["dtypes"]) == {torch.float32}
        # AdamW's first step moves a weight by its rate: bf16 weights of 1 would not move by 1e-5.
        assert result["moved"] == pytest.approx([LEARNING_RATE] * 2, rel=0.1)
        assert len(result["chosen"]) >= 4
        for chosen, reference in result["chosen"]:
            assert torch.equal(chosen, reference)
            assert {1, 2} & set(chosen.flatten().tolist())
        assert result["same"]


def precise(kind: Any, **fields: Any) -> list[Any]:
    return [kind(precision=precision, **fields) for precision in ("bf16", "bf16-mixed")]


@pytest.mark.parametrize(
    "strategy",
    [
        *precise(DDP),
        *precise(FSDP2),
        *precise(EP, ep=2),
        *precise(TP, tp=2),
        *(kind(precision="bf16-mixed") for kind in (ZeRO1, ZeRO2, ZeRO3)),
    ],
    ids=str,
)
def test_a_router_kept_in_fp32_trains_and_is_saved_in_fp32(pools, tmp_path, strategy):
    check(pools(2).run(train, strategy, str(tmp_path / "run")))
    out = distft.consolidate(tmp_path / "run", tmp_path / "model")
    others = "BF16" if strategy.precision == "bf16" else "F32"
    assert file_dtypes(out) == {"gate": {"F32"}, "others": {others}}


def file_dtypes(folder: Path) -> dict[str, set[str]]:
    from safetensors import safe_open

    found: dict[str, set[str]] = {"gate": set(), "others": set()}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                kind = "gate" if ".mlp.gate." in name else "others"
                found[kind].add(opened.get_slice(name).get_dtype())
    return found


def measure(strategy: Any, grad_accum: int) -> dict[str, Any]:
    """Return what `tests/gloo/test_costs.py` measures, of M with gates in fp32."""
    from torch.optim import AdamW

    from distft.measure import count_collectives, model_state_bytes
    from distft.spec import ModelSpec

    distft.init()
    plain = near_experts()
    spec = ModelSpec.from_model(plain)
    model, optimizer = strategy.apply(plain, partial(AdamW, lr=1e-3))

    def step(number: int) -> None:
        strategy.train_step(model, optimizer, tiny_batches([9, 12][:number], seed=strategy.dp_rank))

    for _ in range(2):
        step(1)
    with count_collectives() as counted:
        step(grad_accum)
    optimizer.zero_grad()
    strategy.backward(model(**tiny_batches([9])[0]).loss)
    records = [(record.op, record.num_bytes, record.group_size) for record in counted.records]
    return {
        "spec": spec,
        "state": model_state_bytes(model, optimizer),
        "collectives": {grad_accum: records},
        "wire_bytes": {grad_accum: counted.wire_bytes},
    }


@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [
        *((strategy, 2) for strategy in (*precise(DDP), *precise(FSDP2))),
        (FSDP2(precision="bf16-mixed", activation_checkpointing=True), 2),
        (HSDP(precision="bf16-mixed", dp_replicate=2), 2),
        *((kind(precision="bf16-mixed"), 2) for kind in (ZeRO1, ZeRO2, ZeRO3)),
        (FSDP2(), 2),
    ],
    ids=str,
)
def test_memory_and_traffic_are_exact_with_a_router_in_fp32(pools, strategy, ranks):
    results = pools(ranks).run(measure, strategy, 2)
    check_memory(strategy, results)
    check_traffic(strategy, results, 2)


def load_and_train(strategy: Any, path: str) -> dict[str, Any]:
    """Load a folder, train a step; return the gates' dtypes, values and choices."""
    from torch.optim import AdamW

    distft.init(seed=0)
    model = distft.load_model(path, strategy)
    whole = near_experts()
    seen: list[Any] = []
    for layer, source in zip(model.model.layers, whole.model.layers, strict=True):
        watch_gate(layer.mlp.gate, source.mlp.gate.weight.detach(), seen)
    model, optimizer = strategy.apply(model, partial(AdamW, lr=LEARNING_RATE))
    start = strategy.gather_weights(model)
    rows = tiny_batches(ROWS)[strategy.dp_rank :: strategy.dp_size]
    strategy.train_step(model, optimizer, rows)
    inner = distft.unwrap(model)
    expected = {name: p.detach().float() for name, p in whole.named_parameters()}
    return {
        "dtypes": [inner.get_submodule(gate).weight.dtype for gate in GATES],
        "off": max(float((start[name] - expected[name]).abs().max()) for name in expected),
        "chosen": seen,
    }


@pytest.mark.parametrize(
    "strategy",
    [
        DDP(precision="bf16-mixed"),
        FSDP2(precision="bf16"),
        NDParallel(precision="bf16-mixed", tp=2, ep=2, plan={}),
        ZeRO3(precision="bf16-mixed"),
    ],
    ids=str,
)
def test_load_model_reads_what_the_files_keep_in_fp32(pools, tmp_path, strategy):
    import torch

    near_experts().save_pretrained(tmp_path)
    assert file_dtypes(tmp_path) == {"gate": {"F32"}, "others": {"BF16"}}
    for result in pools(2).run(load_and_train, strategy, str(tmp_path)):
        assert set(result["dtypes"]) == {torch.float32}
        assert result["off"] == 0
        assert all(torch.equal(chosen, reference) for chosen, reference in result["chosen"])


def gate_gradients(strategy: Any) -> list[Any]:
    """Return the gradients of the gates after one micro-batch."""
    from torch.optim import AdamW

    from distft.testing.runs import step_by_pieces

    distft.init(seed=0)
    model, optimizer = strategy.apply(near_experts(), partial(AdamW, lr=LEARNING_RATE))
    _, _, gradients = step_by_pieces(strategy, model, optimizer, tiny_batches([9]), None)
    return [gradient for name, gradient in gradients.items() if ".gate." in name]


@pytest.mark.parametrize(
    "strategy",
    [
        DDP(precision="bf16"),
        FSDP2(precision="bf16"),
        *(kind(precision="bf16-mixed") for kind in (ZeRO1, ZeRO2, ZeRO3)),
    ],
    ids=str,
)
def test_no_gradient_of_a_router_in_fp32_is_rounded_on_its_way(pools, strategy):
    import torch

    # On one rank a gradient that went through bf16 would still be a bf16 number.
    for gradient in pools(1).run(gate_gradients, strategy)[0]:
        assert gradient.dtype == torch.float32
        assert not torch.equal(gradient, gradient.bfloat16().float())


def bounded(strategy: Any) -> tuple[Any, Any]:
    """Make a step of one group with a bound of its own; return its norm and the whole one."""
    from torch.optim import AdamW

    distft.init(seed=0)
    plain = near_experts()
    groups = [{"params": list(plain.parameters()), "max_grad_norm": 0.1}]
    model, optimizer = strategy.apply(plain, partial(AdamW, lr=1e-3), param_groups=groups)
    result = strategy.train_step(model, optimizer, tiny_batches([9], seed=strategy.dp_rank))
    return result.group_norms, result.grad_norm


@pytest.mark.parametrize("kind", [ZeRO2, ZeRO3])
def test_a_group_that_zero_divides_by_dtype_is_clipped_as_one(pools, kind):
    for norms, whole in pools(2).run(bounded, kind(precision="bf16-mixed")):
        assert norms == pytest.approx((whole,))


def mixed_attention(strategy: Any) -> Any:
    """Train L with an fp32 parameter in a module of bf16 layers, and norms in fp32."""
    import torch
    from torch.optim import AdamW

    distft.init(seed=0)
    plain: Any = tiny_model("L").bfloat16()
    for name, parameter in plain.named_parameters():
        parameter.data = parameter.data.float() if "norm" in name else parameter.data
    attention = plain.model.layers[0].self_attn
    attention.scale = torch.nn.Parameter(torch.ones(4))

    def scaled(module: Any, _args: Any, output: Any) -> Any:
        return (output[0] * module.scale.sum().to(output[0].dtype) / 4, *output[1:])

    attention.register_forward_hook(scaled)
    model, optimizer = strategy.apply(plain, partial(AdamW, lr=1e-3))
    rows = tiny_batches(ROWS)[strategy.dp_rank :: strategy.dp_size]
    losses = [strategy.train_step(model, optimizer, rows).loss for _ in range(3)]
    scale = distft.unwrap(model).model.layers[0].self_attn.scale
    return losses, scale.dtype, strategy.gather_weights(model)["model.layers.0.self_attn.scale"]


def test_norms_and_single_parameters_in_fp32_train_alike_under_every_strategy(pools):
    import torch

    strategies = [
        *precise(DDP),
        *precise(FSDP2),
        *precise(TP, tp=2),
        *(kind(precision="bf16-mixed") for kind in (ZeRO2, ZeRO3)),
    ]
    expected, _, _ = pools(2).run(mixed_attention, DDP())[0]
    for strategy in strategies:
        for losses, dtype, scale in pools(2).run(mixed_attention, strategy):
            assert losses == pytest.approx(expected, rel=5e-3), strategy
            assert dtype == torch.float32
            assert (scale != 1).all()


def refusals(_: Any = None) -> list[str]:
    """Return what ZeRO says of kept routers that it cannot keep."""
    from torch.optim import AdamW

    distft.init(seed=0)
    found = []
    for strategy, groups in (
        (ZeRO2(precision="bf16"), None),
        (ZeRO2(precision="bf16-mixed"), ("mlp.gate", "")),
    ):
        model = near_experts()
        names = [name for name, _ in model.named_parameters()]
        chosen = groups and [
            {"params": [name for name in names if ("mlp.gate" in name) is (part != "")]}
            for part in groups
        ]
        try:
            strategy.apply(model, partial(AdamW, lr=1e-3), param_groups=chosen)
        except ValueError as error:
            found.append(str(error))
    return found


def test_zero_says_what_it_cannot_keep_in_fp32_alike_on_every_rank(pools):
    first, second = pools(2).run(refusals)
    assert first == second
    assert "2 parameters stay fp32, such as model.layers.0.mlp.gate.weight" in first[0]
    assert "Use precision='bf16-mixed', or FSDP2" in first[0]
    assert "of 2 parameter groups the first holds only what stays fp32" in first[1]


def test_the_experts_here_are_nearer_than_bf16_can_tell():
    import torch

    chosen = {}
    for dtype in ("float32", "bfloat16"):
        gate = near_experts(dtype).model.layers[0].mlp.gate
        states = torch.randn(64, 32, generator=torch.Generator().manual_seed(1))
        chosen[dtype] = gate(states.to(gate.weight.dtype))[2]
    assert not torch.equal(chosen["float32"], chosen["bfloat16"])


def deepseek(strategy: Any) -> Any:
    """Train a tiny DeepSeek-V3, whose class keeps its routers; return dtype and choices."""
    import copy

    import torch
    from torch.optim import AdamW
    from transformers import AutoConfig, AutoModelForCausalLM

    distft.init(seed=0)
    sizes = {"vocab_size": 131, "hidden_size": 32, "moe_intermediate_size": 16, "n_group": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 8, "v_head_dim": 8}
    ranks = {"kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "topk_group": 1}
    experts = {"n_routed_experts": 8, "num_experts_per_tok": 2, "first_k_dense_replace": 0}
    more = {"num_hidden_layers": 1, "intermediate_size": 48, "pad_token_id": None}
    config = AutoConfig.for_model("deepseek_v3", **sizes, **heads, **ranks, **experts, **more)
    config.bos_token_id, config.eos_token_id = 1, 2
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(config).float()
    gate = plain.model.layers[0].mlp.gate
    alone, seen = copy.deepcopy(gate), []
    gate.register_forward_hook(
        lambda _, args, output: seen.append((args[0].dtype, output[2], alone(args[0].float())[2]))
    )
    model, optimizer = strategy.apply(plain, partial(AdamW, lr=1e-3))
    strategy.train_step(model, optimizer, tiny_batches([9], seed=strategy.dp_rank))
    weight = distft.unwrap(model).model.layers[0].mlp.gate.weight
    return weight.dtype, seen


@pytest.mark.parametrize(
    "strategy", [DDP(precision="bf16-mixed"), FSDP2(precision="bf16")], ids=str
)
def test_a_router_that_its_class_keeps_in_fp32_stays_so(pools, strategy):
    import torch

    for dtype, seen in pools(2).run(deepseek, strategy):
        assert dtype == torch.float32
        assert seen
        for _, chosen, reference in seen:
            assert torch.equal(chosen, reference)

"""What the ranks do in the tests of TP, EP and products; module-level, so that ranks find it."""

from __future__ import annotations

from functools import partial
from typing import Any

import distft
from distft.testing import tiny_batches, tiny_model

ROWS = (3, 8, 13, 6, 11, 4, 9, 14)


def start(strategy: Any, model: str = "M", seed: int = 0, **changes: Any) -> tuple[Any, Any]:
    """Return a tiny model and AdamW under a strategy."""
    from torch.optim import AdamW

    distft.init(seed=3)
    return strategy.apply(tiny_model(model, seed, **changes), partial(AdamW, lr=1e-3))


def train(strategy: Any, model: Any, optimizer: Any, steps: Any, **options: Any) -> list[float]:
    """Make steps on eight rows over all data ranks; return their losses."""
    losses = []
    for step in steps:
        rows = tiny_batches(ROWS, seed=100 + step)[strategy.dp_rank :: strategy.dp_size]
        losses.append(strategy.train_step(model, optimizer, rows, **options).loss)
    return losses


def whole_state(model: Any, optimizer: Any) -> dict[str, Any]:
    """Return parameters and optimizer state whole, by name."""
    from distft.checkpoint.dcp import named_tensors
    from distft.checkpoint.placement import gather_whole

    found: dict[str, Any] = {}
    for name, tensor in named_tensors(model).items():
        state = optimizer.state.get(tensor, {}) if hasattr(tensor, "requires_grad") else {}
        for key, value in {"": tensor, **state}.items():
            whole = gather_whole(value) if hasattr(value, "placements") else value
            found[f"{name}.{key}"] = whole.detach().clone()
    return found


def train_and_save(strategy: Any, model_name: str, path: str) -> Any:
    """Train two steps and save; return the whole state and the losses of the next two."""
    model, optimizer = start(strategy, model_name)
    train(strategy, model, optimizer, (0, 1), max_grad_norm=1.0)
    strategy.save(path, model, optimizer, step=2)
    state = whole_state(model, optimizer)
    return state, train(strategy, model, optimizer, (2, 3), max_grad_norm=1.0)


def load_and_train(strategy: Any, model_name: str, path: str) -> Any:
    """Load into a model of other values; return the whole state and the losses of two steps."""
    model, optimizer = start(strategy, model_name, seed=7)
    strategy.load(path, model, optimizer)
    state = whole_state(model, optimizer)
    return state, train(strategy, model, optimizer, (2, 3), max_grad_norm=1.0)


def load_pretrained(strategy: Any, path: str) -> Any:
    """Load a model of a folder; return it whole, and the losses of two steps."""
    from torch.optim import AdamW

    from distft.measure import model_state_bytes

    distft.init(seed=3)
    model = distft.load_model(path, strategy)
    model, optimizer = strategy.apply(model, partial(AdamW, lr=1e-3))
    held = model_state_bytes(model, optimizer).parameters
    whole = strategy.gather_weights(model)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    return whole, buffers, held, train(strategy, model, optimizer, (0, 1), max_grad_norm=1.0)


def norms_of_norms(strategy: Any, changes: Any) -> list[float]:
    """Train norms only; return the gradient norm of two steps."""
    from torch.optim import AdamW

    distft.init(seed=0)
    plain = tiny_model("Q", **changes)
    for name, parameter in plain.named_parameters():
        parameter.requires_grad_("norm" in name)
    model, optimizer = strategy.apply(plain, partial(AdamW, lr=1e-3))
    rows = [tiny_batches(ROWS, seed=step)[strategy.dp_rank :: strategy.dp_size] for step in (0, 1)]
    return [strategy.train_step(model, optimizer, each).grad_norm for each in rows]


def norms_on_every_rank(strategy: Any, model_name: str) -> list[float]:
    """Return the gradient norms of three steps clipped to 0.1."""
    model, optimizer = start(strategy, model_name)
    rows = [tiny_batches(ROWS, seed=step) for step in range(3)]
    return [
        strategy.train_step(
            model, optimizer, each[strategy.dp_rank :: strategy.dp_size], max_grad_norm=0.1
        ).grad_norm
        for each in rows
    ]


def local_tensors_by_step(strategy: Any, model_name: str, part: str) -> list[dict[str, Any]]:
    """Return this rank's tensors whose name has ``part``, after each of three steps."""
    model, optimizer = start(strategy, model_name)
    found = []
    for step in range(3):
        train(strategy, model, optimizer, [step], max_grad_norm=1.0)
        found.append(
            {name: p.detach().clone() for name, p in model.named_parameters() if part in name}
        )
    return found


def refusal(strategy: Any, model_name: str, changes: Any) -> str:
    """Return what `apply` raises."""
    try:
        start(strategy, model_name, **changes)
    except ValueError as error:
        return str(error)
    return ""


def logits_width(strategy: Any, model_name: str, path: str, changes: Any) -> tuple[int, bool]:
    """Make a step, save, and return the logits' width and whether embedding and head are one."""
    model, optimizer = start(strategy, model_name, **changes)
    train(strategy, model, optimizer, [0])
    width = model(input_ids=tiny_batches([3])[0]["input_ids"]).logits.shape[-1]
    strategy.save(path, model, optimizer, step=1)
    return width, model.lm_head.weight is model.model.embed_tokens.weight


def experts_of_rank0(strategy: Any, precision: str = "fp32") -> Any:
    """Let rank 0 alone have the right values, its experts filled with their index."""
    from torch.distributed import get_rank
    from torch.optim import AdamW

    distft.init(seed=0)
    plain = indexed_experts() if get_rank() == 0 else tiny_model("M", seed=9)
    model, _ = strategy.apply(plain, partial(AdamW, lr=1e-3))
    whole = strategy.gather_weights(model)
    logits = model(input_ids=tiny_batches([3])[0]["input_ids"]).logits.detach()
    return {name: tensor for name, tensor in whole.items() if "experts" in name}, logits


def indexed_experts() -> Any:
    """Return M with every weight of expert i equal to i / 100."""
    import torch

    plain = tiny_model("M")
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            if ".experts." in name:
                parameter.copy_((torch.arange(6.0) / 100).view(6, 1, 1).expand_as(parameter))
    return plain


def rows_by_rank(step: int, idle: bool) -> list[Any]:
    """Return eight rows; the first token of a row says which experts it goes to, see `steered`."""
    rows = tiny_batches(ROWS, seed=step)
    for number, row in enumerate(rows):
        row["input_ids"][:, 0] = 1 if idle else number % 2
    return rows


def steered(plain: Any) -> Any:
    """Make the routers of M choose by a row's first token: 1 experts 0 and 1, 0 experts 0 and 5."""
    import torch

    chosen = {}

    def look(_module: Any, _args: Any, keywords: Any) -> None:
        odd = bool(keywords["input_ids"][0, 0] == 1)
        chosen["experts"] = torch.tensor([0, 1] if odd else [0, 5])

    def choose(_module: Any, _args: Any, output: Any) -> Any:
        logits, scores, indices = output
        return logits, scores, chosen["experts"].expand_as(indices)

    plain.register_forward_pre_hook(look, with_kwargs=True)
    for layer in plain.model.layers:
        layer.mlp.gate.register_forward_hook(choose)
    return plain


def few_experts(strategy: Any, idle: bool) -> Any:
    """Train three steps where most experts get no token; return gradients, weights, loads."""
    import torch
    from torch.optim import AdamW

    from distft.testing.runs import step_by_pieces

    distft.init(seed=0)
    factory = partial(AdamW, lr=1e-3, weight_decay=0.1)
    model, optimizer = strategy.apply(steered(tiny_model("M")), factory)
    gradients: Any = {}
    for step in range(3):
        rows = rows_by_rank(step, idle)[strategy.dp_rank :: strategy.dp_size]
        if step == 0:
            _, _, gradients = step_by_pieces(strategy, model, optimizer, rows, None)
            load = strategy.expert_load(model)
        else:
            strategy.train_step(model, optimizer, rows)
    inner = distft.unwrap(model)
    local = {n: p for n, p in inner.named_parameters() if type(p) is torch.nn.Parameter}
    local = {name: parameter.detach().clone() for name, parameter in local.items()}
    return gradients, strategy.gather_weights(model), local, load


def few_experts_alone(idle: bool) -> Any:
    """Return the first gradients and the last weights of one process."""
    from torch.optim import AdamW

    from distft.training.loss import count_next_tokens, next_token_loss

    model = steered(tiny_model("M"))
    optimizer = AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    gradients: Any = {}
    for step in range(3):
        rows = rows_by_rank(step, idle)
        num_tokens = sum(map(count_next_tokens, rows))
        optimizer.zero_grad()
        for row in rows:
            (next_token_loss(model, row) / num_tokens).backward()
        if step == 0:
            gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
    return gradients, {name: p.detach() for name, p in model.named_parameters()}


def router_update(strategy: Any, grad_accum: int) -> Any:
    """Make one SGD step on one row seen by every rank and micro-step; return gate and head."""
    from torch.optim import SGD

    distft.init(seed=0)
    plain = tiny_model("M", **ROUTER)
    before = {name: p.detach().clone() for name, p in plain.named_parameters()}
    model, optimizer = strategy.apply(plain, partial(SGD, lr=1.0))
    row = tiny_batches([11])[0]
    strategy.train_step(model, optimizer, [row] * grad_accum)
    after = strategy.gather_weights(model)
    return {
        name: after[name] - before[name]
        for name in after
        if "mlp.gate" in name or "lm_head" in name
    }


ROUTER = {
    "num_experts": 4,
    "num_experts_per_tok": 1,
    "output_router_logits": True,
    "router_aux_loss_coef": 5.0,
}


def refusal_of_rows(strategy: Any, call: str) -> str:
    """Give the ranks of a tp group different rows of equal counts; return what is raised."""
    import torch
    from torch.distributed import get_rank

    model, optimizer = start(strategy, "L")
    rows = tiny_batches([5, 5, 7], seed=get_rank())
    if call == "other counts":
        rows = tiny_batches([5 + get_rank()], seed=0)
    try:
        if call == "generate":
            ids = torch.arange(4).view(1, 4) + get_rank()
            strategy.generate(model, input_ids=ids, max_new_tokens=1)
        elif call == "eval_step":
            strategy.eval_step(model, rows)
        else:
            strategy.train_step(model, optimizer, rows)
    except ValueError as error:
        return str(error)
    return ""


def refusal_without_plan(strategy: Any) -> str:
    """Return what `apply` says of a module that has no plan."""
    import torch

    distft.init(seed=0)
    plain = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    try:
        strategy.apply(plain, partial(torch.optim.AdamW, lr=1e-3))
    except ValueError as error:
        return str(error)
    return ""

"""A script for torchrun on two hosts: steps of HSDP, and what the network interface sent."""

from __future__ import annotations

import json
import os
import sys
import time
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
STEPS = 6


def main(folder: Path, interface: str) -> None:
    """Write what this rank's collectives and its host's interface sent in steps, and in none."""
    import torch
    import torch.distributed as dist

    import distft
    from distft.measure import count_collectives
    from distft.testing import tiny_batches, tiny_model

    torch.set_num_threads(1)
    distft.init(seed=0)
    # Groups within a host, by LOCAL_WORLD_SIZE.
    strategy = distft.HSDP()
    model = tiny_model("W")
    spec = distft.ModelSpec.from_model(model)
    model, optimizer = strategy.apply(model, partial(torch.optim.AdamW, lr=1e-3))
    sent = Path(f"/sys/class/net/{interface}/statistics/tx_bytes")

    def measured(work) -> int:
        dist.barrier()
        before = int(sent.read_text())
        work()
        dist.barrier()
        # What is on its way has left the host a moment later.
        time.sleep(0.5)
        return int(sent.read_text()) - before

    def steps() -> None:
        for _ in range(STEPS):
            batches = tiny_batches([12], seed=strategy.dp_rank)
            strategy.train_step(model, optimizer, batches, max_grad_norm=1.0)

    steps()
    began = time.monotonic()
    with count_collectives() as counted:
        busy = measured(steps)
    idle = measured(partial(time.sleep, time.monotonic() - began))
    mesh = strategy.mesh()
    replicas = list(mesh.group("dp_replicate", dist.get_rank()))
    ours = [each for each in counted.records if list(each.ranks) == replicas]
    said = strategy.traffic(spec, distft.Workload(), world_size=dist.get_world_size())
    found = {
        "replicas": replicas,
        "counted": sum(each.wire_bytes for each in ours if each.op == "all_reduce"),
        "formula": STEPS
        * sum(
            each.num_bytes
            for each in said.collectives
            if (each.op, each.axis) == ("all_reduce", "dp_replicate")
        ),
        "busy": busy,
        "idle": idle,
    }
    (folder / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])

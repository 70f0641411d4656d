"""What is wrong with a machine or its packages, found by trying rather than by versions."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator

from distft.diagnose.machine import devices, limits, shared_memory, stale_locks, variables

# Below it loader workers and NCCL run out of shared memory: Docker's default is 64 MiB.
_SHM = 2**30
_FILES = 4096

Finding = tuple[str, str]


def findings() -> list[Finding]:
    """Return what does not fit, each with the way out; a probe that fails says so itself.

    Collective: none.
    """
    found: list[Finding] = []
    for probe in _PROBES:
        try:
            found += probe()
        except Exception as error:  # a broken package is what a doctor is asked about
            name = probe.__name__.strip("_").replace("_", " ")
            found.append((f"{name}: could not be looked at ({type(error).__name__})", "look there"))
    return found


def _shared_memory() -> Iterator[Finding]:
    held = shared_memory()
    if held is not None and held[1] < _SHM:
        yield (
            f"/dev/shm has {held[1] / 2**20:.0f} MiB; loader workers and NCCL need about 1024",
            "start the container with --ipc=host or --shm-size=16g",
        )


def _limits() -> Iterator[Finding]:
    held = limits()
    files = held.get("open files")
    if files is not None and files < _FILES:
        yield (
            f"this process may open {files} files; a run with many ranks and shards needs {_FILES}",
            f"ulimit -n {16 * _FILES}",
        )
    locked = held.get("locked memory")
    if locked is not None and locked < 2**30 and os.path.isdir("/sys/class/infiniband"):
        yield (
            f"{locked / 2**20:.0f} MiB may be locked, and InfiniBand registers all that it sends",
            "ulimit -l unlimited",
        )


def _gpus() -> Iterator[Finding]:
    import torch

    seen = devices()
    if torch.cuda.is_available():
        supported = torch.cuda.get_arch_list()
        for index in range(torch.cuda.device_count()):
            major, minor = torch.cuda.get_device_capability(index)
            # Binaries run on later chips of the same generation.
            if supported and not any(arch.startswith(f"sm_{major}") for arch in supported):
                yield (
                    f"GPU {index} is sm_{major}{minor}, and this torch has kernels for "
                    f"{', '.join(supported)}",
                    "install a build of torch for it",
                )
    elif torch.version.cuda is not None:
        yield (
            f"torch was built for CUDA {torch.version.cuda} and sees 0 GPUs",
            "look at the driver with nvidia-smi, and at CUDA_VISIBLE_DEVICES",
        )
    if any(line.startswith("pairs without P2P") for line in seen):
        yield (
            f"some GPUs cannot reach each other's memory ({seen[-1]}), so NCCL goes through the "
            "host",
            "turn off ACS in the BIOS, or accept it; python -m distft topo shows the wires",
        )


def _wires() -> Iterator[Finding]:
    import shutil

    if shutil.which("nvidia-smi") is None:
        return
    from distft.topology.cluster import Cluster

    for warning in Cluster.detect().warnings:
        yield warning, "python -m distft topo shows the wires"


def _variables() -> Iterator[Finding]:
    held = variables()
    slow = {
        "NCCL_P2P_DISABLE": "GPUs talk through the host",
        "NCCL_SHM_DISABLE": "GPUs without P2P talk through the network",
        "NCCL_IB_DISABLE": "nodes talk through TCP",
        "CUDA_LAUNCH_BLOCKING": "every kernel waits for the one before",
    }
    for name, effect in slow.items():
        if held.get(name, "0") not in ("0", ""):
            yield f"{name}={held[name]}: {effect}", "unset it unless that is meant"
    if held.get("TORCH_NCCL_BLOCKING_WAIT", "0") not in ("0", ""):
        yield (
            "TORCH_NCCL_BLOCKING_WAIT waits on the host for every collective",
            "unset it; TORCH_NCCL_ASYNC_ERROR_HANDLING ends a run that hangs",
        )


def _locks() -> Iterator[Finding]:
    for name, age in stale_locks():
        yield (
            f"the build of torch's extension {name} has been locked for {age / 3600:.1f} h; a run "
            "that needs it waits for ever if its builder was killed",
            "if nothing compiles now, remove the file named lock in that extension's folder",
        )


def _upstream() -> Iterator[Finding]:
    """Probe what is known to train wrongly, or to break, where packages do not fit together."""
    import torch

    try:
        from torch.distributed.fsdp import fully_shard
    except ImportError:
        yield f"torch {torch.__version__} has no fully_shard", "install torch 2.13 or later"
        return
    if "reshard_after_forward" not in inspect.signature(fully_shard).parameters:
        yield "fully_shard takes no reshard_after_forward", "install torch 2.13 or later"
    import transformers

    parameters = inspect.signature(transformers.Trainer.compute_loss).parameters
    if "num_items_in_batch" not in parameters:
        yield (
            f"transformers {transformers.__version__} averages batches' means over accumulation",
            "install transformers 5.24 or later",
        )
    tied = torch.nn.Linear(2, 2)
    if tied.weight.dtype != torch.float32:
        yield (
            f"torch's default dtype is {tied.weight.dtype}, so new layers, such as adapters, have "
            "it too",
            "torch.set_default_dtype(torch.float32)",
        )


def _deepspeed() -> Iterator[Finding]:
    from importlib.util import find_spec

    import torch

    if find_spec("deepspeed") is None:
        return
    import shutil

    if torch.cuda.is_available() and not (os.environ.get("CUDA_HOME") or shutil.which("nvcc")):
        yield (
            "DeepSpeed is there, and neither CUDA_HOME nor nvcc: offload=... must compile",
            "install the CUDA toolkit of torch's version, or use no offload",
        )


_PROBES: tuple[Callable[[], Iterator[Finding]], ...] = (
    _shared_memory,
    _limits,
    _gpus,
    _wires,
    _variables,
    _locks,
    _upstream,
    _deepspeed,
)

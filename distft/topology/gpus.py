"""GPUs by name: memory, speed and wires, as their makers state them."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

GIB = 2**30
# One direction of 16 lanes after 128b/130b coding, by PCIe generation.
_PCIE = {3: 15.75e9, 4: 31.5e9, 5: 63.0e9}
# Kinds that are sold as modules; their cards are called PCIe or NVL.
_MODULES = ("GB300", "B300", "GB200", "B200", "H200", "H100", "H800", "H20", "A100", "A800", "V100")


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU.

    Args:
        name: Name that `Cluster.parse(gpu=...)` takes.
        memory_bytes: Memory that CUDA reports as total: some percent below the name's number.
        flops: Peak bf16 FLOP/s, dense, fp32 accumulation (fp16 where the chip has no bf16).
        memory_bandwidth: Bytes/s of the device memory.
        nvlinks: NVLinks of the card, 0 for none.
        nvlink_bandwidth: Bytes/s of one link in one direction, on the wire.
        pcie_bandwidth: Bytes/s of the PCIe slot in one direction, on the wire.
        multicast: Whether a switch sums on the way (NVLink SHARP, since Hopper).
        is_module: Whether it sits on a board that joins its NVLinks; cards have bridges, or none.

    Source: data sheets of the maker; memory as `torch.cuda.get_device_properties` gives it.
    """

    name: str
    memory_bytes: int
    flops: float
    memory_bandwidth: float
    nvlinks: int = 0
    nvlink_bandwidth: float = 0.0
    pcie_bandwidth: float = _PCIE[4]
    multicast: bool = False
    is_module: bool = False


def _gpu(
    name: str, gib: float, tflops: float, gbps: float, links: int, link_gbps: float, pcie: int
) -> Gpu:
    """Make one from the units that data sheets use."""
    hopper = links > 0 and name.startswith(("H", "B", "GB"))
    module = name.partition("-")[0] in _MODULES and not name.partition("-")[2].startswith("P")
    return Gpu(
        name,
        round(gib * GIB),
        tflops * 1e12,
        gbps * 1e9,
        links,
        link_gbps * 1e9,
        _PCIE[pcie],
        multicast=hopper,
        is_module=module and "NVL" not in name,
    )


_ALL = (
    _gpu("GB300", 268.6, 2500, 8000, 18, 50, 5),
    _gpu("B300", 268.6, 2250, 8000, 18, 50, 5),
    _gpu("GB200", 184.3, 2500, 8000, 18, 50, 5),
    _gpu("B200", 178.4, 2250, 8000, 18, 50, 5),
    _gpu("H200", 139.8, 989.4, 4800, 18, 25, 5),
    _gpu("H200-NVL", 139.8, 835.5, 4800, 18, 25, 5),
    _gpu("H100-80GB", 79.1, 989.4, 3350, 18, 25, 5),
    # Six stacks of HBM2e where the PCIe card has five.
    _gpu("H100-96GB", 95.0, 989.4, 2450, 18, 25, 5),
    _gpu("H100-NVL", 93.1, 835.5, 3900, 12, 25, 5),
    _gpu("H100-PCIe", 79.1, 756, 2040, 12, 25, 5),
    _gpu("H800-80GB", 79.1, 989.4, 3350, 8, 25, 5),
    _gpu("H20", 95.1, 148, 4000, 18, 25, 5),
    _gpu("A100-80GB", 79.2, 312, 2039, 12, 25, 4),
    _gpu("A100-40GB", 39.4, 312, 1555, 12, 25, 4),
    _gpu("A100-PCIe-80GB", 79.2, 312, 1935, 12, 25, 4),
    _gpu("A100-PCIe-40GB", 39.4, 312, 1555, 12, 25, 4),
    _gpu("A800-80GB", 79.2, 312, 2039, 8, 25, 4),
    _gpu("V100-32GB", 31.7, 125, 900, 6, 25, 3),
    _gpu("V100-16GB", 15.8, 125, 900, 6, 25, 3),
    _gpu("P100-16GB", 15.9, 21.2, 732, 4, 20, 3),
    _gpu("A30", 23.5, 165, 933, 4, 25, 4),
    _gpu("A5000", 23.6, 111, 768, 4, 14.0625, 4),
    _gpu("A6000", 47.5, 154.8, 768, 4, 14.0625, 4),
    _gpu("A40", 44.4, 149.7, 696, 4, 14.0625, 4),
    _gpu("RTX3090", 23.7, 71, 936, 4, 14.0625, 4),
    _gpu("TITAN-RTX", 23.6, 130.5, 672, 2, 25, 3),
    _gpu("RTX5090", 31.4, 209.5, 1792, 0, 0, 5),
    _gpu("RTX4090", 23.6, 165.2, 1008, 0, 0, 4),
    _gpu("RTX6000-Ada", 47.4, 364, 960, 0, 0, 4),
    _gpu("L40S", 44.4, 362, 864, 0, 0, 4),
    _gpu("L4", 22.0, 121, 300, 0, 0, 4),
    _gpu("A10", 22.1, 125, 600, 0, 0, 4),
    _gpu("A10G", 22.0, 70, 600, 0, 0, 4),
    _gpu("T4", 14.6, 65, 320, 0, 0, 3),
)
GPUS = {gpu.name: gpu for gpu in _ALL}

# Other names of the same, reduced as `_reduced` does: short ones and those of nvidia-smi.
_ALIASES = {
    "b300sxm6ac": "B300",
    "h100": "H100-80GB",
    "h100sxm": "H100-80GB",
    "h10080": "H100-80GB",
    "h10080gbhbm3": "H100-80GB",
    "h100sxm580gb": "H100-80GB",
    "h10096": "H100-96GB",
    "h100pcie80gb": "H100-PCIe",
    "h200sxm": "H200",
    "h200141gb": "H200",
    "h800": "H800-80GB",
    "a100": "A100-80GB",
    "a10080": "A100-80GB",
    "a100sxm": "A100-80GB",
    "a100sxm480gb": "A100-80GB",
    "a10040": "A100-40GB",
    "a100sxm440gb": "A100-40GB",
    "a10080gbpcie": "A100-PCIe-80GB",
    "a100pcie": "A100-PCIe-80GB",
    "a800": "A800-80GB",
    "a80080": "A800-80GB",
    "a800sxm480gb": "A800-80GB",
    "6000adageneration": "RTX6000-Ada",
    "p100": "P100-16GB",
    "p100sxm216gb": "P100-16GB",
    "v100": "V100-32GB",
    "v10032": "V100-32GB",
    "v10016": "V100-16GB",
    "v100sxm232gb": "V100-32GB",
    "v100sxm332gb": "V100-32GB",
    "v100sxm216gb": "V100-16GB",
}


def gpu_by_name(name: str) -> Gpu:
    """Return the GPU of a name, in our spelling or in that of nvidia-smi.

    Raises:
        ValueError: No GPU of that name is known; the message lists those that are.

    Collective: none.

    >>> gpu_by_name("NVIDIA A100-SXM4-80GB").name
    'A100-80GB'
    """
    known = {_reduced(gpu.name): gpu for gpu in _ALL}
    for alias, target in _ALIASES.items():
        known[alias] = GPUS[target]
    key = _reduced(name)
    if key in known:
        return known[key]
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    hint = f" Did you mean {known[near[0]].name!r}?" if near else ""
    raise ValueError(
        f"gpu is {name!r}, but known GPUs are {', '.join(GPUS)}.{hint} "
        "Pass one of them, or a distft.topology.Gpu with your numbers."
    )


def _reduced(name: str) -> str:
    """Leave out what names of one card differ in: maker, series, blanks, dashes."""
    return re.sub(r"nvidia|tesla|geforce|rtx|[^a-z0-9]", "", str(name).lower())

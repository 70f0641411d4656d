"""What the fork server loads once for all ranks; DeepSpeed only where it is installed."""

import contextlib
import importlib
import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")
for _name in (
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "deepspeed",
):
    with contextlib.suppress(ImportError):
        importlib.import_module(_name)

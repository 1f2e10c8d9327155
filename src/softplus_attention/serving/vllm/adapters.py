"""LoRA adapters in vLLM: over the attention that they were trained over, or not at all."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from softplus_attention.huggingface.adapters import after_import, record_of_config, unmark
from softplus_attention.huggingface.attention import SETTINGS
from softplus_attention.utils import untrusted

LARGEST_JSON = 16 * untrusted.MIB


def check_attention(folder: Path, model: Any) -> None:
    saved = untrusted.read_json(folder / "adapter_config.json", LARGEST_JSON)
    record = saved.get(SETTINGS) if isinstance(saved, dict) else None
    if record is not None and record != (now := record_of_config(model.config)):
        raise ValueError(
            f"{folder}: softplus_attention: this adapter was trained over the attention {record}, and the model that "
            f"is served has {now or 'softmax'}; serve the model that it was trained over, saved with that attention"
        )


def keep_attention_of_adapters() -> None:
    after_import("vllm.lora.worker_manager", wrap_loading)


def wrap_loading(module: Any) -> None:
    manager, helper = module.WorkerLoRAManager, module.PEFTHelper
    load, read = manager._load_adapter, helper.from_dict.__func__
    if hasattr(load, "knows_softplus_attention"):
        return

    @functools.wraps(load)
    def load_over_attention(self: Any, lora_request: Any) -> Any:
        folder = Path(module.get_adapter_absolute_path(lora_request.lora_path))
        if (folder / "adapter_config.json").is_file():
            check_attention(folder, self._adapter_manager.model)
        return load(self, lora_request)

    @functools.wraps(read)
    def from_marked_dict(cls: Any, config_dict: dict[str, Any]) -> Any:
        return read(cls, unmark(config_dict) if SETTINGS in config_dict else config_dict)

    load_over_attention.knows_softplus_attention = True  # type: ignore[attr-defined]
    manager._load_adapter = load_over_attention
    helper.from_dict = classmethod(from_marked_dict)

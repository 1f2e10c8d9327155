"""LoRA adapters in vLLM: served only over the attention they were trained with."""

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
    if record is not None and record != (served := record_of_config(model.config)):
        raise ValueError(
            f"{folder}: softplus_attention: this adapter was trained with the attention {record}, but the served model "
            f"has {served or 'softmax'}; serve the adapter's base model, saved with that attention"
        )


def check_adapters() -> None:
    after_import("vllm.lora.worker_manager", wrap_loading)


def wrap_loading(module: Any) -> None:
    manager, helper = module.WorkerLoRAManager, module.PEFTHelper
    load, read = manager._load_adapter, helper.from_dict.__func__
    if hasattr(load, "knows_softplus_attention"):
        return

    @functools.wraps(load)
    def load_checked_adapter(self: Any, lora_request: Any) -> Any:
        folder = Path(module.get_adapter_absolute_path(lora_request.lora_path))
        if (folder / "adapter_config.json").is_file():
            check_attention(folder, self._adapter_manager.model)
        return load(self, lora_request)

    @functools.wraps(read)
    def from_marked_dict(cls: Any, config_dict: dict[str, Any]) -> Any:
        return read(cls, unmark(config_dict) if SETTINGS in config_dict else config_dict)

    load_checked_adapter.knows_softplus_attention = True  # type: ignore[attr-defined]
    manager._load_adapter = load_checked_adapter
    helper.from_dict = classmethod(from_marked_dict)

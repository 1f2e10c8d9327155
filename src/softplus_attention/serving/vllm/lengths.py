"""How long a request may be."""

from __future__ import annotations

from vllm.transformers_utils.model_arch_config_convertor import ModelArchConfigConvertorBase


class UnlimitedLength(ModelArchConfigConvertorBase):
    """The training length is the default, and ``--max-model-len`` may be any: nothing in SoftplusGPT limits it."""

    def derive_max_model_len_and_key(self) -> tuple[float, str | None]:
        found = super().derive_max_model_len_and_key()
        self.hf_config.model_max_length = 2**62
        return found

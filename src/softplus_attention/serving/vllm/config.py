"""vLLM's checks of a model's config, before anything is loaded."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.models.config import VerifyAndUpdateConfig
from vllm.transformers_utils.model_arch_config_convertor import ModelArchConfigConvertorBase

# Their frequencies depend on the longest sequence of a call, which may be another request's.
ROPE_BY_LENGTH = ("dynamic", "longrope")


class UnlimitedLength(ModelArchConfigConvertorBase):
    """The training length is the default, but any ``--max-model-len`` is allowed: SoftplusGPT has no limit."""

    def derive_max_model_len_and_key(self) -> tuple[float, str | None]:
        found = super().derive_max_model_len_and_key()
        self.hf_config.model_max_length = 2**62
        return found


class WithoutContextParallel(VerifyAndUpdateConfig):
    """Shards of a sequence are merged by softmax's log-sum-exp, which these attentions do not have."""

    @classmethod
    def verify_and_update_config(cls, vllm_config: Any) -> None:
        for size in ("decode_context_parallel_size", "prefill_context_parallel_size"):
            if (requested := getattr(vllm_config.parallel_config, size)) > 1:
                raise NotImplementedError(
                    f"{size}={requested}: the attention of {vllm_config.model_config.architecture} cannot be merged "
                    "from shards of a sequence as vLLM merges softmax; leave it at 1"
                )

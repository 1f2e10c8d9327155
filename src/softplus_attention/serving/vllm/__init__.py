"""vLLM: ``plugin.register`` is the entry point of the group ``vllm.general_plugins``. Written for vLLM 0.32."""

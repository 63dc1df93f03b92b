"""Files to tensors: safetensors, quantization schemes, canonical expert weights, tokenizer files.

Nothing is imported here, so that the HTTP process can load a tokenizer without torch. Start at `checkpoint.Checkpoint`,
`hf_config.read_config`, `quant.read_linear`, `experts.read_gpt_oss_experts`, `experts.read_split_experts`,
`tokenizer.load_tokenizer`, `dummy.DummyCheckpoint`, `naming` and `progress.Progress`.
"""

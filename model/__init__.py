"""GPT-OSS and DeepSeek-V3: attention, norms, rope, the MoE layer, logits, and each family's tensor names."""

"""Files to tensors: safetensors, quantization schemes, canonical expert weights, tokenizer files."""

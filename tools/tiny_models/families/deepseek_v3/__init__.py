"""DeepSeek-V3: training model, FP8 blocks and NVFP4, the dialect of V3.1."""

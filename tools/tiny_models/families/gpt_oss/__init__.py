"""GPT-OSS: training model, MXFP4, Harmony."""

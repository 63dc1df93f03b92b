"""DeepGEMM's grouped FP8 GEMMs."""

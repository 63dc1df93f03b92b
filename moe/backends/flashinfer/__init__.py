"""FlashInfer's kernel families."""

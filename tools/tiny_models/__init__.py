"""Recipe of the bundled models: data, tokenizers, trainer, exporters. Serving needs none of it."""

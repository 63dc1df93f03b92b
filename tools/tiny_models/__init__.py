"""Recipe of the bundled model: facts, data generators, tokenizer, trainer, exporter. Nothing here is needed to serve."""

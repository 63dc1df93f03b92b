"""Recipe of the bundled model: facts, data, tokenizer, trainer, exporter. Serving needs none of it."""

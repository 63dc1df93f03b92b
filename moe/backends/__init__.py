"""One module per kernel family: quant info, refusals, `prepare` and the registered functions."""

"""Backends, one module or package per kernel family: quant info, supported paths, `prepare`, registered functions."""

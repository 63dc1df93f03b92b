"""Transports, one module each: they send tokens to the ranks that own their experts and bring the results back."""

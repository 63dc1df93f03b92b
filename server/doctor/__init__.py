"""`moe-serve doctor`: what of this machine keeps the service, or one of its paths, from running, and the way out."""

"""Plain torch, the reference path that runs anywhere."""

"""CPU support: the number of threads to use, and fast linear layers."""

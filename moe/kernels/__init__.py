"""Our own grouped expert kernels in Triton, and the weight layout they read. Import `launch` only where Triton is installed."""

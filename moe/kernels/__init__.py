"""Our own grouped expert kernels in Triton, and the weight layout they read. `launch` needs Triton."""

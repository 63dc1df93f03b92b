"""Stand-ins for compiled kernels, on a CPU: they check what the kernel checks, decode the processed weights back from
their layout alone, and compute in fp32. They know nothing of moe.backends or loaders; the libraries' own Python runs.
"""

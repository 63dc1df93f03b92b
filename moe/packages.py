"""Where to get the optional packages. Some of their import names belong to unrelated projects on PyPI."""

_FROM_SOURCE = "install it from {url}; {name} on PyPI is another project"

# How to get each package, by the name it is imported under.
SOURCES: dict[str, str] = {
    "triton": "pip install triton, in the version that the installed torch asks for",
    "flashinfer": "pip install flashinfer-python",
    "deep_gemm": _FROM_SOURCE.format(url="https://github.com/deepseek-ai/DeepGEMM", name="deep_gemm")
    + "; it compiles with a CUDA toolkit at run time",
    "deep_ep": _FROM_SOURCE.format(url="https://github.com/deepseek-ai/DeepEP", name="deep_ep"),
    "aiter": _FROM_SOURCE.format(url="https://github.com/ROCm/aiter", name="aiter"),
    "mori": "install it from https://github.com/ROCm/mori",
    "mooncake": "pip install mooncake-transfer-engine; mooncake on PyPI is another project",
    "nixl_ep": "pip install nixl",
}

# The package that each transport needs, by the transport's name.
TRANSPORT_PACKAGES: dict[str, str] = {
    "deepep": "deep_ep",
    "mori": "mori",
    "flashinfer": "flashinfer",
    "mooncake": "mooncake",
    "nixl": "nixl_ep",
}


def not_installed(package: str) -> str:
    """Says that the package is missing and how to get it, worded to follow "... needs"."""
    return f"the package {package}, which is not installed: {SOURCES[package]}"

# Serves a mixture-of-experts model on an NVIDIA GPU (compute capability 9.0 or 10.0); without one it runs on the CPU.
#   docker build -t moe-serve .
#   docker run --gpus all -p 8000:8000 -v moe-serve-cache:/cache moe-serve --moe-backend flashinfer_mxfp4
# The devel base keeps nvcc: FlashInfer compiles some kernels per shape at run time.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04

# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-dev python3-venv g++ \
    && rm -rf /var/lib/apt/lists/*

ENV VIRTUAL_ENV=/opt/moe-serve \
    PATH=/opt/moe-serve/bin:$PATH \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    FLASHINFER_CUDA_ARCH_LIST="9.0a 10.0a"
RUN python3 -m venv "$VIRTUAL_ENV"

# Dependencies and compiled kernels come before the project's own files, so that a change there rebuilds neither.
WORKDIR /src
COPY constraints.txt ./
RUN pip install -c constraints.txt torch setuptools flashinfer-python triton

# MoE, attention with sinks (head dim 64) and MLA kernels, placed where the library looks for ready-made ones.
RUN aot="$(python -c 'import flashinfer, pathlib; print(pathlib.Path(flashinfer.__file__).parent / "data" / "aot")')" \
    && python -m flashinfer.aot --out-dir "$aot" --build-dir /tmp/aot \
        --f16-dtype bfloat16 --fa2-head-dim 64,64 --fa3-head-dim 64,64 192,128 \
        --add-moe true --add-oai-oss true --add-misc true --add-act true \
        --add-comm false --add-gemma false --add-xqa false \
    && rm -rf /tmp/aot

COPY pyproject.toml README.md LICENSE ./
COPY assets assets
COPY engine engine
COPY loaders loaders
COPY model model
COPY moe moe
COPY server server
RUN pip install -c constraints.txt --no-build-isolation '.[gpu]' && rm -rf /src/*

# One writable place for what is compiled or tuned at run time; mount a volume there to keep it.
ENV FLASHINFER_WORKSPACE_BASE=/cache \
    TRITON_CACHE_DIR=/cache/triton \
    XDG_CACHE_HOME=/cache \
    HF_HOME=/cache/huggingface \
    MOE_SERVE_HOST=0.0.0.0
RUN useradd --create-home --uid 1000 serve && mkdir /cache && chown serve /cache
USER 1000
WORKDIR /home/serve
VOLUME /cache
EXPOSE 8000

HEALTHCHECK --interval=10s --timeout=3s --start-period=10m \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health/live', timeout=2)"]
ENTRYPOINT ["moe-serve"]

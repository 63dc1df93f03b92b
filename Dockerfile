# Two images of one service:
#   docker build -t moe-serve .                     for NVIDIA GPUs of compute capability 9.0 and 10.0
#   docker build -t moe-serve:cpu --target cpu .    without a GPU
#   docker run --gpus all -p 8000:8000 -v moe-serve-cache:/cache moe-serve
# Flags of the service follow the image's name. Only /cache is written, so --read-only and any --user work.

FROM ubuntu:24.04 AS cpu

# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-venv tini \
    && rm -rf /var/lib/apt/lists/*

ENV VIRTUAL_ENV=/opt/moe-serve \
    PATH=/opt/moe-serve/bin:$PATH \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN --mount=type=bind,source=constraints.txt,target=/tmp/constraints.txt \
    python3 -m venv "$VIRTUAL_ENV" \
    && pip install -c /tmp/constraints.txt --extra-index-url "$TORCH_INDEX" torch setuptools
RUN --mount=type=bind,target=/src,rw \
    pip install -c /src/constraints.txt --no-build-isolation /src

# Ubuntu's image has a user with uid 1000. The cache is open to every uid, as /tmp is.
RUN useradd --uid 10001 --home-dir /cache --no-create-home serve && mkdir -m 1777 /cache
ENV HOME=/cache \
    XDG_CACHE_HOME=/cache \
    HF_HOME=/cache/huggingface \
    MOE_SERVE_HOST=0.0.0.0 \
    MOE_SERVE_EXIT_ON_ENGINE_DEATH=true
LABEL org.opencontainers.image.title="moe-serve" \
      org.opencontainers.image.description="Mixture-of-experts models behind the OpenAI HTTP API" \
      org.opencontainers.image.version="0.1.0" \
      org.opencontainers.image.licenses="Apache-2.0"
USER 10001
WORKDIR /cache
VOLUME /cache
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=1h CMD ["moe-serve", "health", "--of-pid", "1"]
ENTRYPOINT ["tini", "--", "moe-serve"]

# The devel base keeps nvcc: FlashInfer compiles some kernels per shape at run time. Triton needs g++ and python3-dev.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04 AS gpu

# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-venv tini python3-dev g++ \
    && rm -rf /var/lib/apt/lists/*

ENV VIRTUAL_ENV=/opt/moe-serve \
    PATH=/opt/moe-serve/bin:$PATH \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    FLASHINFER_CUDA_ARCH_LIST="9.0a 10.0a"
# Dependencies and compiled kernels come before the project's files, so that a change to the project rebuilds neither.
RUN --mount=type=bind,source=constraints.txt,target=/tmp/constraints.txt \
    python3 -m venv "$VIRTUAL_ENV" \
    && pip install -c /tmp/constraints.txt torch setuptools flashinfer-python triton

# MoE, attention with sinks (head dim 64) and MLA kernels, placed where FlashInfer looks for compiled ones.
RUN aot="$(python -c 'import flashinfer, pathlib; print(pathlib.Path(flashinfer.__file__).parent / "data" / "aot")')" \
    && python -m flashinfer.aot --out-dir "$aot" --build-dir /tmp/aot \
        --f16-dtype bfloat16 --fa2-head-dim 64,64 --fa3-head-dim 64,64 192,128 \
        --add-moe true --add-oai-oss true --add-misc true --add-act true \
        --add-comm false --add-gemma false --add-xqa false \
    && rm -rf /tmp/aot

RUN --mount=type=bind,target=/src,rw \
    pip install -c /src/constraints.txt --no-build-isolation '/src[gpu]'

# As above; kernels compiled at run time are cached in /cache too.
RUN useradd --uid 10001 --home-dir /cache --no-create-home serve && mkdir -m 1777 /cache
ENV HOME=/cache \
    XDG_CACHE_HOME=/cache \
    HF_HOME=/cache/huggingface \
    MOE_SERVE_HOST=0.0.0.0 \
    MOE_SERVE_EXIT_ON_ENGINE_DEATH=true \
    TRITON_CACHE_DIR=/cache/triton \
    FLASHINFER_WORKSPACE_BASE=/cache
LABEL org.opencontainers.image.title="moe-serve" \
      org.opencontainers.image.description="Mixture-of-experts models behind the OpenAI HTTP API" \
      org.opencontainers.image.version="0.1.0" \
      org.opencontainers.image.licenses="Apache-2.0"
USER 10001
WORKDIR /cache
VOLUME /cache
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=1h CMD ["moe-serve", "health", "--of-pid", "1"]
ENTRYPOINT ["tini", "--", "moe-serve"]

# A worker for targets with an NVIDIA GPU, on NVIDIA's image. Not run on real hardware.
# The tag determines the version of TensorRT, which has to be the target's runtime_version: 26.08-py3 has 11.2.
#   docker build --file docker/tensorrt.Dockerfile --build-arg TENSORRT_TAG=26.08-py3 --tag enginewright-tensorrt:0.1.0 .
ARG TENSORRT_TAG=26.08-py3

FROM nvcr.io/nvidia/tensorrt:${TENSORRT_TAG} AS build
ENV PIP_NO_CACHE_DIR=1 \
    PIP_CONSTRAINT=/build/requirements.lock \
    PATH=/venv/bin:$PATH
WORKDIR /build
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv --system-site-packages /venv
COPY requirements.lock pyproject.toml README.md ./
# TensorRT's Python package comes with the image; PyTorch is the CUDA build
RUN pip install pycuda==2026.1 ".[server,gpu]"

FROM nvcr.io/nvidia/tensorrt:${TENSORRT_TAG}
ENV PATH=/venv/bin:$PATH \
    PYTHONPATH=/workspace \
    PYTHONUNBUFFERED=1
RUN apt-get update \
    && apt-get install --yes --no-install-recommends git \
    && rm -rf /var/lib/apt/lists/* \
    && git config --system --add safe.directory '*' \
    && useradd --uid 10001 --create-home enginewright \
    && install --directory --owner enginewright /workspace /measuring
COPY --from=build /venv /venv
COPY --chmod=755 docker/with_secrets.sh docker/start_worker.sh /usr/local/bin/
USER 10001
WORKDIR /workspace
ENTRYPOINT ["with_secrets.sh"]
CMD ["start_worker.sh"]

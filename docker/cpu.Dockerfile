# The servers and the CPU worker of compose.yaml, with the versions of requirements.lock and without code: a worker
# clones the repository into its volume.
#   docker build --file docker/cpu.Dockerfile --target worker --tag enginewright-cpu:0.1.0 .

FROM python:3.11.14-slim-bookworm AS build
ENV PIP_NO_CACHE_DIR=1 \
    PIP_CONSTRAINT=/build/requirements.lock \
    PATH=/venv/bin:$PATH
WORKDIR /build
RUN python -m venv /venv
COPY requirements.lock ./

FROM build AS build-server
RUN pip install prefect fastapi mlflow psycopg2-binary boto3 Flask-WTF

FROM build AS build-worker
# torch first and alone: an index with CPU builds (--build-arg TORCH_INDEX=...) makes the image 4 GB smaller
ARG TORCH_INDEX=
RUN pip install ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$(grep '^torch==' requirements.lock)"
COPY pyproject.toml README.md ./
RUN pip install ".[server]"

FROM python:3.11.14-slim-bookworm AS base
ENV PATH=/venv/bin:$PATH \
    PYTHONUNBUFFERED=1
RUN useradd --uid 10001 --create-home enginewright
COPY --chmod=755 docker/with_secrets.sh /usr/local/bin/
ENTRYPOINT ["with_secrets.sh"]

FROM base AS server
COPY --from=build-server /venv /venv
USER 10001
WORKDIR /home/enginewright

FROM base AS worker
# g++: PyTorch compiles the engines of the target cpu_aotinductor. A mounted repository belongs to another user.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ git \
    && rm -rf /var/lib/apt/lists/* \
    && git config --system --add safe.directory '*' \
    && install --directory --owner enginewright /workspace /measuring
COPY --from=build-worker /venv /venv
COPY --chmod=755 docker/start_worker.sh /usr/local/bin/
ENV PYTHONPATH=/workspace
USER 10001
WORKDIR /workspace
CMD ["start_worker.sh"]

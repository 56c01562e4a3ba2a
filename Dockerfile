# trace-jax for TPU or GPU hosts, by the extra that is installed. Not built where it was written: there was no registry to take the base
# image from. `tpu_scripts/pod push --kind=gke` builds it from what git has of a revision; by hand:
#
#   docker build --build-arg EXTRAS=tpu,tau2 --tag trace-jax .
#   docker build --build-arg EXTRAS=gpu,tau2 --tag trace-jax-gpu .      # run with --gpus=all; the driver is the host's
#   docker run --rm trace-jax run --config=quickstart --workdir=/tmp/trace-run
ARG PYTHON=3.12
FROM python:${PYTHON}-slim
ARG EXTRAS=tpu

# tini is process 1: it hands SIGTERM on to trace-jax, and buries orphans. git is for benchmarks whose tasks are repositories.
RUN apt-get update && apt-get install --yes --no-install-recommends git tini && rm -rf /var/lib/apt/lists/*

WORKDIR /app
COPY . .
RUN pip install --no-cache-dir --editable ".[${EXTRAS}]"

# the sandbox of environment code gives up what it has; it needs no root to begin with
RUN useradd --create-home trace
USER trace
WORKDIR /home/trace
ENTRYPOINT ["tini", "--", "trace-jax"]

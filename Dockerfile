# Build an image for predictions and for checks of files. It has no PyTorch:
#   docker build -t zero-study .
#   docker run --rm zero-study advise --model llama-3.1-8b --gpu h100 --gpus 8
#   docker run --rm -v "$PWD:/work" zero-study doctor ds_config.json
# Build an image for trainings on GPUs, on a base image that has CUDA, PyTorch and Python 3.11 or newer:
#   docker build -t zero-study-train --build-arg BASE=pytorch/pytorch:TAG --build-arg EXTRAS=train .
ARG BASE=python:3.13-slim

FROM python:3.13-slim AS wheel
WORKDIR /source
COPY pyproject.toml setup.py MANIFEST.in README.md LICENSE ./
COPY study/ study/
COPY zero_study/ zero_study/
COPY accelerate_configs/ accelerate_configs/
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheel .

FROM ${BASE}
ARG EXTRAS=""
COPY --from=wheel /wheel/ /wheel/
RUN pip install --no-cache-dir "$(echo /wheel/*.whl)${EXTRAS:+[$EXTRAS]}"
WORKDIR /work
ENTRYPOINT ["zero-study"]

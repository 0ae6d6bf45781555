# vLLM's own image with kvscope's plugin, which publishes every block of the server. From the repository's root:
#
#   docker build -f docker/vllm.Dockerfile -t vllm-kvscope .
#   docker run --gpus all --ipc host -p 8000:8000 -v /tmp/kvscope:/tmp/kvscope vllm-kvscope MODEL
#   kvscope --attach ipc:///tmp/kvscope/vllm
#
# The plugin adds small libraries and changes no package of the image.

ARG VLLM_VERSION=v0.32.0
FROM python:3.12-slim AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY app app
COPY engine engine
COPY kernels kernels
COPY resources resources
RUN pip install --no-cache-dir build==1.6.1 && python -m build --wheel --outdir /dist

FROM vllm/vllm-openai:${VLLM_VERSION}
COPY --from=build /dist/*.whl /tmp/
RUN python3 -m pip install --no-cache-dir /tmp/kvscope-*.whl && rm /tmp/kvscope-*.whl
ENV KVSCOPE_INSIDE=ipc:///tmp/kvscope/vllm

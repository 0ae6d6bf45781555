# kvscope's engine with its OpenAI API. From the repository's root:
#
#   docker build -f docker/engine.Dockerfile -t kvscope-engine .
#   docker run --gpus all -p 127.0.0.1:8000:8000 -p 127.0.0.1:7710-7711:7710-7711 \
#       -e KVSCOPE_API_KEY=SECRET -v kvscope:/home/kvscope kvscope-engine --model MODEL
#
# Without a GPU leave out `--gpus all`. The volume keeps models, compiled kernels and keys.

FROM python:3.12-slim AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY app app
COPY engine engine
COPY kernels kernels
COPY resources resources
RUN pip install --no-cache-dir build==1.6.1 && python -m build --wheel --outdir /dist

FROM python:3.12-slim
# gcc compiles the CPU kernels, and Triton's launchers
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
COPY constraints.txt /tmp/constraints.txt
COPY --from=build /dist/*.whl /tmp/
RUN set -- /tmp/kvscope-*.whl \
    && pip install --no-cache-dir --constraint /tmp/constraints.txt "$1[engine]" \
    && rm /tmp/kvscope-*.whl /tmp/constraints.txt \
    && useradd --create-home --uid 1000 kvscope
USER 1000
WORKDIR /home/kvscope
EXPOSE 8000 7710 7711
HEALTHCHECK --start-period=300s CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health')"]
ENTRYPOINT ["kvscope-engine", "serve", "--http", "0.0.0.0:8000", "--endpoint", "tcp://0.0.0.0:7710"]

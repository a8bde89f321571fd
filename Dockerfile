# An image with Meshwright, for `meshwright launch kubernetes` and `skypilot`:
#   docker build --tag NAME .
# PyTorch's wheels for Linux include CUDA. For a CPU, or another CUDA, name one of PyTorch's indexes:
#   docker build --tag NAME --build-arg TORCH_INDEX=URL .
FROM python:3.11-slim

# torch.compile compiles the C++ that it generates.
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/meshwright
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src src
ARG TORCH_INDEX=
RUN pip install --no-cache-dir ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$(grep '^torch==' constraints.txt)" \
    && pip install --no-cache-dir --constraint constraints.txt ".[train]"

WORKDIR /work
CMD ["meshwright", "doctor"]

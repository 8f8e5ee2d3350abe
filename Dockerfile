# CUDA runtime only: kernels are compiled on first use by NVRTC from its wheel, so no compiler is installed.
#   docker build -t serving-conv .
#   docker run --rm serving-conv                    # the replay, on the CPU
#   docker run --rm --gpus all serving-conv serving-conv replay --check --device cuda
# In vLLM's own image: pip install 'serving-conv[cuda]' there; its plugin needs nothing else.
FROM nvidia/cuda:13.0.1-runtime-ubuntu24.04

RUN apt-get update \
 && apt-get install --yes --no-install-recommends python3 python3-venv \
 && rm -rf /var/lib/apt/lists/*

ENV VIRTUAL_ENV=/opt/serving-conv PATH=/opt/serving-conv/bin:$PATH PYTHONUNBUFFERED=1
RUN python3 -m venv "$VIRTUAL_ENV"

WORKDIR /src
COPY . .
RUN pip install --no-cache-dir '.[cuda,plot]'

WORKDIR /work
CMD ["serving-conv", "replay", "--check"]

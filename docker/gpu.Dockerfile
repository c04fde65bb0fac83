# horovod_sparse on NVIDIA GPUs: cpu.Dockerfile on CUDA, with Horovod's collectives by NCCL (HOROVOD_GPU_OPERATIONS=NCCL).
# NOT YET BUILT, AND NOT RUN ON A GPU: its stages and scripts are those of cpu.Dockerfile, which was, and hadolint has read it.
#
#   docker build -f docker/gpu.Dockerfile -t horovod_sparse:gpu .
#   docker run --rm --gpus all horovod_sparse:gpu
#
# Takes the options of cpu.Dockerfile. BASE must be a CUDA "devel" image for Debian or Ubuntu, of the CUDA release that the
# installed build of torch is for. TensorFlow is left out: docker/setup.sh installs its build for CPUs.
ARG BASE=nvidia/cuda:13.0.0-devel-ubuntu24.04
ARG FRAMEWORKS=torch

FROM scratch AS wheels

# hadolint ignore=DL3006
FROM $BASE AS system
COPY docker/common.sh docker/system_packages.sh /usr/local/lib/horovod_sparse/
# NCCL: most of the base images have it. openssh: mpirun starts workers in other containers by it.
# The line for Open MPI: containers may forbid processes to read each other's memory.
# hadolint ignore=DL3008
RUN /usr/local/lib/horovod_sparse/system_packages.sh "$(command -v python3 || true)" \
    && if [ ! -x /usr/sbin/sshd ]; then apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
        apt-get install -qq -y --no-install-recommends openssh-client openssh-server; fi \
    && if [ ! -e /usr/include/nccl.h ]; then apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
        apt-get install -qq -y --no-install-recommends libnccl2 libnccl-dev; fi \
    && rm -rf /var/lib/apt/lists/* /etc/ssh/ssh_host_* \
    && printf '\nbtl_vader_single_copy_mechanism = none\n' >>/etc/openmpi/openmpi-mca-params.conf \
    && useradd --create-home --shell /bin/bash worker \
    && install -d -o worker -g worker /home/worker/horovod_sparse \
    && install -d -o worker -g worker -m 700 /home/worker/.ssh
# Makes build_horovod.sh set HOROVOD_GPU_OPERATIONS=NCCL.
ENV HOROVOD_GPU=1
# hadolint ignore=DL3066
USER worker
WORKDIR /home/worker/horovod_sparse

# Logs would tell of the indexes and folders that packages came from.
# From here on the same as in cpu.Dockerfile.
FROM system AS frameworks
ARG FRAMEWORKS
ARG TORCH
ARG TENSORFLOW
ARG PIP_EXTRA_INDEX_URL
ARG PIP_NO_INDEX
ENV FRAMEWORKS=$FRAMEWORKS TORCH=$TORCH TENSORFLOW=$TENSORFLOW
COPY --chown=worker constraints.txt ./
COPY --chown=worker docker/common.sh docker/system_packages.sh docker/setup.sh docker/
RUN --mount=type=bind,from=wheels,target=/wheels --mount=type=secret,id=pip,target=/etc/pip.conf,mode=0444 \
    PIP_NO_CACHE_DIR=1 PIP_FIND_LINKS=/wheels docker/setup.sh frameworks && rm .venv/setup.log

FROM frameworks AS horovod
COPY --chown=worker tools/build_horovod.sh tools/
RUN --mount=type=bind,from=wheels,target=/wheels --mount=type=secret,id=pip,target=/etc/pip.conf,mode=0444 \
    mkdir -p ~/.cache/horovod_sparse \
    && find /wheels -maxdepth 1 -type d -name 'horovod-*' -exec cp -r {} ~/.cache/horovod_sparse \; \
    && PIP_NO_CACHE_DIR=1 PIP_FIND_LINKS=/wheels docker/setup.sh horovod && rm -f ~/.cache/horovod_sparse/*.log

FROM frameworks
COPY --from=horovod --chown=worker /home/worker/.cache/horovod_sparse /home/worker/.cache/horovod_sparse
COPY --chown=worker . ./
RUN --mount=type=bind,from=wheels,target=/wheels --mount=type=secret,id=pip,target=/etc/pip.conf,mode=0444 \
    PIP_NO_CACHE_DIR=1 PIP_FIND_LINKS=/wheels docker/setup.sh && rm .venv/setup.log
CMD ["make", "demo"]

# horovod_sparse on CPUs: this repository with all that `make test` and `make demo` need, set up for a user who is not root.
#
#   docker build -f docker/cpu.Dockerfile -t horovod_sparse:cpu .
#   docker run --rm horovod_sparse:cpu
#
#   --build-arg BASE=...                     another Debian or Ubuntu with Python 3.10 to 3.13
#   --build-arg FRAMEWORKS=torch             without TensorFlow
#   --build-arg TORCH=... TENSORFLOW=...     other releases than those in constraints.txt
#   --build-arg PIP_EXTRA_INDEX_URL=...      an index with CPU builds of torch; else the one with CUDA's libraries is installed
#   --build-arg PIP_NO_INDEX=1               install from the folder of wheels alone
#   --build-context wheels=FOLDER            a folder of wheels; with a copy of build_horovod.sh's cache in it, Horovod is not compiled
#   --secret id=pip,src=FILE                 settings of pip for the build, which no layer keeps
#
# Without a Docker daemon: docker/build_without_daemon.sh.
ARG BASE=debian:12
ARG FRAMEWORKS="torch tensorflow"

FROM scratch AS wheels

# hadolint ignore=DL3006
FROM $BASE AS system
COPY docker/common.sh docker/system_packages.sh /usr/local/lib/horovod_sparse/
# openssh: mpirun starts workers in other containers by it.
# The line for Open MPI: containers may forbid processes to read each other's memory.
# hadolint ignore=DL3008
RUN /usr/local/lib/horovod_sparse/system_packages.sh "$(command -v python3 || true)" \
    && if [ ! -x /usr/sbin/sshd ]; then apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
        apt-get install -qq -y --no-install-recommends openssh-client openssh-server; fi \
    && rm -rf /var/lib/apt/lists/* /etc/ssh/ssh_host_* \
    && printf '\nbtl_vader_single_copy_mechanism = none\n' >>/etc/openmpi/openmpi-mca-params.conf \
    && useradd --create-home --shell /bin/bash worker \
    && install -d -o worker -g worker /home/worker/horovod_sparse \
    && install -d -o worker -g worker -m 700 /home/worker/.ssh
# hadolint ignore=DL3066
USER worker
WORKDIR /home/worker/horovod_sparse

# Logs would tell of the indexes and folders that packages came from.
# From here on the same as in gpu.Dockerfile.
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

# The images of popmq, by target:
#
#   popmq      controller, broker, proxy, console and the commands
#   operator   the same with what the operator needs, for one operator per Kubernetes cluster
#   reports    the operator's image with Spark, for reports
#
#   docker build -t popmq:0.1.0 .                              (or buildah bud, podman build)
#   docker build --target operator -t popmq-operator:0.1.0 .
#   docker buildx bake                                         all of them (docker-bake.json)
#
# BASE has Python 3.11 or later with venv and pip.  PIP_CERT names a CA bundle in the build, for
# a registry behind a certificate of your own.
ARG BASE=python:3.13-slim

FROM ${BASE} AS build
ARG PIP_CERT=
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
COPY . /src
RUN bash /src/tools/image.sh python
RUN bash /src/tools/image.sh compiler
RUN bash /src/tools/image.sh user /
RUN bash /src/tools/image.sh install /src /opt/popmq console,kubernetes
RUN bash /src/tools/image.sh sbom /opt/popmq

FROM build AS build-operator
# Not every builder hands an argument on to a stage that is made from another.
ARG PIP_CERT=
RUN bash /src/tools/image.sh install /src /opt/popmq operator
RUN bash /src/tools/image.sh sbom /opt/popmq

FROM build-operator AS build-reports
ARG PIP_CERT=
RUN bash /src/tools/image.sh install /src /opt/popmq operator,reports,reports-java
RUN bash /src/tools/image.sh sbom /opt/popmq

FROM ${BASE} AS base
LABEL org.opencontainers.image.title="popmq" \
    org.opencontainers.image.description="A RocketMQ-5-style message queue" \
    org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /etc/passwd /etc/group /etc/
COPY --from=build --chown=10001:10001 /var/lib/popmq /var/lib/popmq
ENV PATH=/opt/popmq/bin:/usr/local/bin:/usr/bin:/bin \
    HOME=/tmp \
    PYTHONDONTWRITEBYTECODE=1 \
    POPMQ_BROKER_DATA=/var/lib/popmq
USER 10001:10001
WORKDIR /tmp
EXPOSE 8081 8082 10911 9878 5557
# Kubernetes has probes of its own.
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s CMD ["/opt/popmq/bin/python", "-m", "popmq.cli.roles.healthcheck"]
ENTRYPOINT ["/opt/popmq/bin/popmq"]

FROM base AS operator
COPY --from=build-operator /opt/popmq /opt/popmq
CMD ["operator"]

FROM base AS reports
COPY --from=build-reports /opt/popmq /opt/popmq

# Without arguments a container is a cluster to try, for whoever reaches the port that is published.
# It advertises no address, so clients go on with the one that they dialled, whatever port or
# network they come through.  The last target is built when none is named.
FROM base AS popmq
COPY --from=build /opt/popmq /opt/popmq
CMD ["up", "--host", "0.0.0.0", "--open-to-anybody"]

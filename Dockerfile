# One image for every role:
#
#   docker build -t popmq:0.1.0 .                              (or buildah bud, podman build)
#   docker build --target reports -t popmq-reports:0.1.0 .     the same with Spark
#
# BASE has Python 3.11 or later with venv and pip.  PIP_CERT names a CA bundle in the build, for
# a registry behind a certificate of your own.
ARG BASE=python:3.13-slim

FROM ${BASE} AS build
ARG PIP_CERT=
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
COPY . /src
RUN bash /src/tools/image.sh user /
RUN bash /src/tools/image.sh install /src /opt/popmq operator

FROM build AS build-reports
# Not every builder hands an argument on to a stage that is made from another.
ARG PIP_CERT=
RUN bash /src/tools/image.sh install /src /opt/popmq operator,reports,reports-java

FROM ${BASE} AS base
COPY --from=build /etc/passwd /etc/group /etc/
COPY --from=build --chown=10001:10001 /var/lib/popmq /var/lib/popmq
ENV PATH=/opt/popmq/bin:/usr/local/bin:/usr/bin:/bin \
    HOME=/tmp \
    PYTHONDONTWRITEBYTECODE=1 \
    POPMQ_BROKER_DATA=/var/lib/popmq
USER 10001:10001
WORKDIR /tmp
EXPOSE 8081 10911 9878 5557
ENTRYPOINT ["/opt/popmq/bin/popmq"]

FROM base AS reports
COPY --from=build-reports /opt/popmq /opt/popmq

# The last one is what is built when no target is named.
FROM base AS popmq
COPY --from=build /opt/popmq /opt/popmq
CMD ["up", "--host", "0.0.0.0", "--advertise", "127.0.0.1:8081"]

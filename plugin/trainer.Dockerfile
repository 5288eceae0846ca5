# A base for training images: Python, `tiphys` and what it needs (pydantic, boto3), NumPy. From the root of the repository:
#   docker build -f plugin/trainer.Dockerfile -t tiphys-trainer .
# The base is pinned by the digest of its index of all architectures; that of today is shown by
#   docker buildx imagetools inspect python:3.11-slim-bookworm
# plugin/images.toml says what is in here, and a test holds the two together.
ARG BASE=python:3.11-slim-bookworm@sha256:fe556eaffd0d96abd8685b83bb8a69addd0dc730fa193669a7df0d49ddcfac02

FROM ${BASE} AS build
# For a store outside of S3: --build-arg EXTRAS="--extra gcs" or "--extra azure".
ARG EXTRAS=
ENV UV_PROJECT_ENVIRONMENT=/opt/tiphys UV_LINK_MODE=copy UV_PYTHON_DOWNLOADS=never
WORKDIR /build
COPY pyproject.toml uv.lock plugin/uv.txt ./
RUN pip install --no-cache-dir --require-hashes --requirement uv.txt
RUN uv sync --frozen --no-dev --no-install-project --extra numpy ${EXTRAS}
COPY tiphys /opt/tiphys/lib/python3.11/site-packages/tiphys
# Byte code is made here, because nothing can be written where the root is read-only.
RUN python -m compileall -q --invalidation-mode unchecked-hash /opt/tiphys/lib/python3.11/site-packages

FROM ${BASE}
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="tiphys-trainer" \
      org.opencontainers.image.description="Base for training images: Python with the checkpoints of Tiphys" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
COPY --from=build /opt/tiphys /opt/tiphys
ENV PATH=/opt/tiphys/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    HOME=/tmp \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1
WORKDIR /tmp
USER 65532:65532
CMD ["python"]

"""Options of pods on Kubernetes and KServe: parsers import this module, so it imports no heavy library."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from hasten.core.errors import PlanError
from hasten.core.options import Option, parse_whole
from hasten.core.plan import parse_duration
from hasten.deploy.check_names import check_image, check_name, check_object

# Proxies keep sending requests to a terminating pod for this long.
LINGER_S = 5
# The time to exit after all requests are answered.
_EXIT_S = 5
_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*://\S+")


@dataclass(frozen=True, slots=True)
class PodOptions:
    """Options of the pods; defaults are derived from the bundle."""

    name: Annotated[
        str, Option(str, "NAME", "name of the deployment and of the model (default: the bundle's directory)")
    ]
    namespace: Annotated[str | None, Option(str, "NAME", "namespace (default: the current one of kubectl)")] = None
    image: Annotated[
        str | None, Option(str, "NAME", "container image (default: the one that the Dockerfile or `make image` builds)")
    ] = None
    variant: Annotated[str | None, Option(str, "NAME", "variant to run (default: the fastest)")] = None
    threads: Annotated[
        int | None, Option(parse_whole, "N", "threads per session (default: the cores of the benchmark)")
    ] = None
    instances: Annotated[int | None, Option(parse_whole, "N", "sessions per pod (default: measured at startup)")] = None
    gpus: Annotated[
        int | None, Option(parse_whole, "N", "GPUs per pod (default: 1 if the variant needs a GPU)", flags=("--gpu",))
    ] = None
    replicas: Annotated[int, Option(parse_whole, "N", "minimum number of pods")] = 2
    max_replicas: Annotated[
        int | None, Option(parse_whole, "N", "maximum number of pods (default: five times --replicas)")
    ] = None
    target_wait_s: Annotated[float, Option(parse_duration, "TIME", "queueing time above which pods are added")] = 0.05
    keys_secret: Annotated[
        str | None, Option(str, "NAME", "Secret with API keys, one per line, under the key api-keys")
    ] = None
    drain_timeout_s: Annotated[float, Option(parse_duration, "TIME", "time to answer accepted requests")] = 30.0

    def __post_init__(self) -> None:
        check_name("--name", self.name)
        if self.namespace is not None:
            check_name("--namespace", self.namespace)
        if self.image is not None:
            check_image(self.image)
        if self.keys_secret is not None:
            check_object("--keys-secret", self.keys_secret)
        counts = {"--threads": self.threads, "--instances": self.instances, "--gpu": self.gpus}
        for flag, count in {**counts, "--replicas": self.replicas}.items():
            if count is not None and count < 1:
                raise PlanError(f"{flag} {count} is less than 1")
        if self.replica_limit < self.replicas:
            raise PlanError(
                f"--max-replicas {self.max_replicas} is less than --replicas {self.replicas}",
                hint="set both to the same number to disable scaling",
            )

    @property
    def replica_limit(self) -> int:
        """Return the maximum number of pods."""
        return 5 * self.replicas if self.max_replicas is None else self.max_replicas

    @property
    def is_scaled(self) -> bool:
        """Return whether the number of pods depends on the load."""
        return self.replica_limit > self.replicas

    @property
    def namespace_field(self) -> dict[str, object]:
        """Return the namespace as a field of a manifest's metadata."""
        return {"namespace": self.namespace} if self.namespace else {}

    @property
    def grace_s(self) -> int:
        """Return the time to stop a pod: until proxies stop sending, accepted requests are answered, and it exits."""
        return LINGER_S + math.ceil(self.drain_timeout_s) + _EXIT_S


class Runtime(StrEnum):
    """The server that runs the model."""

    HASTEN = "hasten"
    TRITONSERVER = "tritonserver"


class Mode(StrEnum):
    """The deployment mode of KServe; Knative rejects many fields of a pod."""

    STANDARD = "standard"
    KNATIVE = "knative"


class Protocol(StrEnum):
    """The version and transport of the Open Inference Protocol."""

    HTTP = "v2"
    GRPC = "grpc-v2"


@dataclass(frozen=True, slots=True)
class Service:
    """Options of an InferenceService of KServe."""

    runtime: Annotated[
        Runtime, Option(Runtime, "NAME", "server that runs the model", choices=tuple(map(str, Runtime)))
    ] = Runtime.HASTEN
    # The address of the bundle, under the model's name, or of tritonserver's model repository. None: in the image.
    storage: Annotated[
        str | None,
        Option(
            str,
            "ADDRESS",
            "s3://…, gs://… or pvc://… with the bundle under its name, or with the repository of tritonserver "
            "(default: the bundle is copied into the image)",
        ),
    ] = None
    protocol: Annotated[
        Protocol,
        Option(Protocol, "NAME", "inference protocol: v2 over HTTP or over gRPC", choices=tuple(map(str, Protocol))),
    ] = Protocol.HTTP
    mode: Annotated[Mode, Option(Mode, "NAME", "deployment mode of KServe", choices=tuple(map(str, Mode)))] = (
        Mode.STANDARD
    )
    # KServe alone cannot scale by the queue.
    prometheus: Annotated[str | None, Option(str, "URL", "Prometheus server: scale by queue length through KEDA")] = (
        None
    )
    is_for_cluster: Annotated[
        bool, Option(bool, "", "write a ClusterServingRuntime, for all namespaces", flags=("--cluster-wide",))
    ] = False

    def __post_init__(self) -> None:
        for flag, address in {"--storage": self.storage, "--prometheus": self.prometheus}.items():
            if address is not None and not _ADDRESS.fullmatch(address):
                raise PlanError(f"{flag} '{address}' is not an address", hint="use s3://…, gs://…, pvc://…, https://…")
        if self.prometheus is not None and self.mode is Mode.KNATIVE:
            raise PlanError("--prometheus is not supported in Knative mode", hint="use --mode standard")
        if self.runtime is Runtime.HASTEN:
            return
        if self.storage is None:
            raise PlanError(
                "--runtime tritonserver needs the storage address of a model repository",
                hint="run hasten deploy tritonserver BUNDLE -o DIR, upload DIR, and pass its address as --storage",
            )
        if self.prometheus is not None or self.is_for_cluster:
            raise PlanError("--prometheus and --cluster-wide need --runtime hasten", hint="leave them out")

    @property
    def is_hasten(self) -> bool:
        """Return whether hasten's own server runs the model."""
        return self.runtime is Runtime.HASTEN

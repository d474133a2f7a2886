"""A pod that serves a bundle, as big as the bundle's own benchmark says: what Kubernetes and KServe manifests share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from hasten.bundle import Bundle, VariantEntry
from hasten.core.errors import PlanError
from hasten.core.variant import CPU
from hasten.core.version import __version__
from hasten.deploy.names import check_image, check_name, check_object
from hasten.server.connections import HttpLimits
from hasten.server.instances import MOST_INSTANCES, MOST_ON_DEVICE
from hasten.server.settings import Settings

# What the server exports about its queue, and where (server/metrics.py, server/operations.py).
QUEUE_METRIC, METRICS_PATH = "hasten_waiting", "/metrics"
LIVE_PATH, READY_PATH = "/v2/health/live", "/v2/health/ready"
# As docker/Dockerfile has them, and docker/gpu.Dockerfile.
SERVER_IMAGE = f"hasten:{__version__}"
GPU_SERVER_IMAGE = f"{SERVER_IMAGE}-gpu"
CACHE, MODELS = "/var/cache/hasten", "/models"
USER = 10001

# Proxies go on sending for so long to a pod that is on its way out.
LINGER_S = 5
# To leave, once all is answered.
_LEAVE_S = 5
_STARTUP_PERIOD_S = 2
# On a cold node, from a slow disk: so many times what loading took in the benchmark, and never less than this.
_STARTUP_FACTOR, _STARTUP_LEAST_S = 60, 120
_MEMORY_STEP = 64 * 2**20
_GPU, _TENSORRT, _BUILT_ANEW = "nvidia.com/gpu", "tensorrt", "onnxruntime-tensorrt"

# What Node Feature Discovery calls the instructions that a variant may ask for.
_NODE_FEATURES = {
    "amx_int8": "AMXINT8",
    "amx_bf16": "AMXBF16",
    "avx512_vnni": "AVX512VNNI",
    "avx_vnni": "AVXVNNI",
    "avx512_bf16": "AVX512BF16",
    "neon": "ASIMD",
    "dotprod": "ASIMDDP",
}

_ABOUT_GPUS = f"""
Nodes need NVIDIA's device plugin, which offers `{_GPU}`; {{taint}}. Where the plugin lets
several pods share a GPU (time slicing, MPS), each still asks for 1. The image is that of `make image GPU=1`, or has
what that has: ONNX Runtime for CUDA, PyTorch and Triton.
"""
_TOLERATED = "pods tolerate the taint of that name"
_NOT_TOLERATED = "nodes with the taint of that name are left out, since Knative takes no tolerations by default"
_ABOUT_TENSORRT = "TensorRT lies outside PyPI: put it into that image, too, or no pod gets ready.\n"


@dataclass(frozen=True, slots=True)
class PodOptions:
    """What may be said about the pods, whatever makes them; what is left out follows from the bundle."""

    name: str
    namespace: str | None = None
    image: str | None = None
    variant: str | None = None
    threads: int | None = None
    instances: int | None = None
    gpus: int | None = None
    replicas: int = 2
    max_replicas: int = 10
    # More pods are started where requests wait for longer.
    target_wait_s: float = 0.05
    drain_s: float = Settings().drain
    # A Secret with the keys, one a line, under `api-keys`.
    keys_secret: str | None = None

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
                raise PlanError(f"{flag} {count} is less than one")
        if self.max_replicas < self.replicas:
            raise PlanError(
                f"--max-replicas {self.max_replicas} is less than --replicas {self.replicas}",
                hint="where both are the same, nothing is scaled",
            )

    @property
    def is_scaled(self) -> bool:
        return self.max_replicas > self.replicas

    @property
    def place(self) -> dict[str, object]:
        return {"namespace": self.namespace} if self.namespace else {}

    @property
    def grace_s(self) -> int:
        """From the wish to stop a pod to its end: proxies forget it, it answers what it took, it leaves."""
        return LINGER_S + math.ceil(self.drain_s) + _LEAVE_S


@dataclass(frozen=True, slots=True)
class Pod:
    """One bundle in one pod: what it runs, what that takes, what it gives."""

    options: PodOptions
    entry: VariantEntry
    digest: str
    cores: int
    gpus: int
    memory_bytes: int
    load_s: float
    # Sentences a second of the benchmark's usual shape, on as many cores or on a GPU.
    per_second: float
    # Requests that run at the same time: one a core or, on a GPU, a batch of the usual shape a session.
    running: int

    @classmethod
    def of(cls, bundle: Bundle, options: PodOptions) -> Pod:
        entry = bundle.entry(options.variant) if options.variant else bundle.chosen
        if entry.device == CPU and options.gpus:
            raise PlanError(f"{entry.name} runs on the CPU: it has no use for --gpu", hint="leave --gpu out")
        if entry.backend == _BUILT_ANEW:
            raise PlanError(
                f"{entry.name} builds its engine where it is first opened, and every pod would",
                hint="build the bundle with tensorrt-fp16@cuda, which keeps its engine",
            )
        report = bundle.report
        footprint = next((one for one in report.bench.footprints if one.variant == entry.name), None)
        # The usual shape is timed first.
        timing = next((one for one in report.bench.timings if one.variant == entry.name), None)
        if footprint is None or timing is None:
            raise PlanError(
                f"the bundle's report has no benchmark of {entry.name}, by which its pods would be sized",
                hint="build the bundle again",
            )
        timed_cores = report.plan.threads or report.machine.cores
        is_on_cpu = entry.device == CPU
        cores, instances = _arranged(options, timed_cores, MOST_INSTANCES if is_on_cpu else MOST_ON_DEVICE)
        # Each session may take what one took alone, and all together hold bodies of requests.
        memory = instances * footprint.peak_memory_bytes + HttpLimits().held_bytes
        return cls(
            options=options,
            entry=entry,
            digest=bundle.manifest.digest,
            cores=cores,
            gpus=options.gpus or (0 if is_on_cpu else 1),
            memory_bytes=math.ceil(memory / _MEMORY_STEP) * _MEMORY_STEP,
            load_s=footprint.load_ms / 1e3,
            per_second=timing.sentences_per_s * (cores / timed_cores if is_on_cpu else 1),
            running=cores if is_on_cpu else instances * timing.shape.batch,
        )

    @property
    def target_waiting(self) -> int:
        """How many requests wait where each waits for as long as is wanted."""
        return max(1, round(self.per_second * self.options.target_wait_s))

    @property
    def queue_limit(self) -> str:
        return f"over {self.target_waiting} waiting requests a pod"

    @property
    def memory(self) -> str:
        return f"{self.memory_bytes // 2**20}Mi"

    def metadata(self) -> dict[str, object]:
        return {"name": self.options.name, **self.options.place, "labels": self.labels()}

    def labels(self) -> dict[str, object]:
        return {
            "app.kubernetes.io/name": self.options.name,
            "app.kubernetes.io/version": __version__,
            "app.kubernetes.io/managed-by": "hasten",
        }

    def annotations(self, port: int) -> dict[str, object]:
        """Of the pods: another bundle is another template, so that its pods replace the old ones."""
        return {"hasten/bundle": self.digest, **scraping(port)}

    def resources(self) -> dict[str, object]:
        """Limits that are the requests, in whole cores: a pod keeps its cores to itself, where nodes allow it."""
        both = {"cpu": str(self.cores), "memory": self.memory}
        gpus = {_GPU: str(self.gpus)} if self.gpus else {}
        return {"requests": both, "limits": {**both, **gpus}}

    def environment(self) -> list[object]:
        """Every pod runs the same variant: one that cannot does not become ready, instead of answering otherwise."""
        options = self.options
        values = {"HASTEN_VARIANT": self.entry.name, "HASTEN_DRAIN": f"{options.drain_s:g}s"}
        if options.threads or options.instances:
            instances = options.instances or 1
            values |= {"HASTEN_INSTANCES": str(instances), "HASTEN_THREADS": str(self.cores // instances)}
        if self.gpus:
            # Triton would keep what it compiles in a home directory, which the user has not.
            values["TRITON_CACHE_DIR"] = f"{CACHE}/triton"
        listed = variables(values)
        if options.keys_secret:
            key = {"name": options.keys_secret, "key": "api-keys"}
            listed.append({"name": "HASTEN_API_KEYS", "valueFrom": {"secretKeyRef": key}})
        return listed

    def probes(self, port: int) -> dict[str, object]:
        def ask(path: str, **times: int) -> dict[str, object]:
            return {"httpGet": {"path": path, "port": port}, **times}

        allowed_s = max(_STARTUP_LEAST_S, _STARTUP_FACTOR * self.load_s)
        tries = math.ceil(allowed_s / _STARTUP_PERIOD_S)
        return {
            "startupProbe": ask(READY_PATH, periodSeconds=_STARTUP_PERIOD_S, timeoutSeconds=3, failureThreshold=tries),
            "readinessProbe": ask(READY_PATH, periodSeconds=5, timeoutSeconds=3, failureThreshold=2),
            "livenessProbe": ask(LIVE_PATH, periodSeconds=10, timeoutSeconds=5, failureThreshold=3),
        }

    @property
    def size(self) -> str:
        size = f"{counted(self.cores, 'core')} and {self.memory}"
        return f"{counted(self.gpus, 'GPU')}, {size}" if self.gpus else size

    @property
    def timed_on(self) -> str:
        return "a GPU" if self.gpus else counted(self.cores, "core")

    @property
    def server_image(self) -> str:
        return GPU_SERVER_IMAGE if self.gpus else SERVER_IMAGE

    def check_gpus(self) -> None:
        """Of our server; tritonserver's own backends compute on all that they see."""
        if self.gpus > 1:
            raise PlanError(
                f"--gpu {self.gpus}: a server computes on one GPU", hint="--replicas runs more pods, with one each"
            )

    def about_gpus(self, *, is_tolerant: bool = True) -> str:
        """For who reads on what pods run."""
        if not self.gpus:
            return ""
        about = _ABOUT_GPUS.format(taint=_TOLERATED if is_tolerant else _NOT_TOLERATED)
        return about + (_ABOUT_TENSORRT if self.entry.backend == _TENSORRT else "")

    def tolerations(self) -> dict[str, object]:
        """Nodes with GPUs are often kept free of pods that ask for none."""
        taint = {"key": _GPU, "operator": "Exists", "effect": "NoSchedule"}
        return {"tolerations": [taint]} if self.gpus else {}

    def affinity(self) -> dict[str, object]:
        """Nodes that have the instructions go first, where Node Feature Discovery says which do."""
        names = [_NODE_FEATURES[name] for name in self.entry.instructions if name in _NODE_FEATURES]
        if not names:
            return {}
        labels = [f"feature.node.kubernetes.io/cpu-cpuid.{name}" for name in names]
        preferred = [
            {"weight": 100, "preference": {"matchExpressions": [{"key": label, "operator": "Exists"}]}}
            for label in labels
        ]
        return {"affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}}}


def counted(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number > 1 else ''}"


def _arranged(options: PodOptions, timed_cores: int, most: int) -> tuple[int, int]:
    """Cores, and sessions at most: threads × instances as given, else as many cores as were timed, shared out there."""
    if options.threads or options.instances:
        instances = options.instances or 1
        return instances * (options.threads or max(1, timed_cores // instances)), instances
    return timed_cores, 2 ** (min(timed_cores, most).bit_length() - 1)


def variables(values: Mapping[str, str]) -> list[object]:
    return [{"name": name, "value": value} for name, value in values.items()]


def listening(port: int, grpc_port: int) -> list[object]:
    """Where a server listens and what it may write, whatever it serves."""
    ports = {"HASTEN_PORT": str(port), "HASTEN_GRPC_PORT": str(grpc_port)}
    return variables({"HASTEN_HOST": "0.0.0.0", **ports, "HASTEN_CACHE": CACHE})


def scraping(port: int) -> dict[str, object]:
    return {
        "prometheus.io/scrape": "true",
        "prometheus.io/port": str(port),
        "prometheus.io/path": METRICS_PATH,
    }


def spread(labels: Mapping[str, object]) -> list[object]:
    """Pods with these labels, over zones and over nodes, as far as there are any."""
    selector = {"matchLabels": dict(labels)}
    return [
        {"maxSkew": 1, "topologyKey": key, "whenUnsatisfiable": "ScheduleAnyway", "labelSelector": selector}
        for key in ("topology.kubernetes.io/zone", "kubernetes.io/hostname")
    ]


# What the server writes: what it measured here, and whatever a library puts aside.
WRITABLE = {"cache": CACHE, "tmp": "/tmp"}


def volumes() -> list[object]:
    return [{"name": name, "emptyDir": {}} for name in WRITABLE]


def mounts() -> list[object]:
    return [{"name": name, "mountPath": path} for name, path in WRITABLE.items()]


def security(*, is_read_only: bool = True) -> dict[str, object]:
    """As the "restricted" Pod Security Standard asks, and nothing is written but what is mounted for it."""
    return {
        "runAsNonRoot": True,
        "runAsUser": USER,
        "runAsGroup": USER,
        "readOnlyRootFilesystem": is_read_only,
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def lingering() -> dict[str, object]:
    return {"lifecycle": {"preStop": {"sleep": {"seconds": LINGER_S}}}}


def baked_image(pod: Pod) -> str:
    """The image that the Dockerfile makes: another bundle has another name, so that none is mistaken for another."""
    return pod.options.image or f"hasten-{pod.options.name}:{pod.digest[:12]}"

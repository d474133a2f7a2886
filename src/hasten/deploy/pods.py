"""Size a pod by the bundle's benchmark, and build the parts that Kubernetes and KServe manifests share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from hasten.bundle import Bundle, VariantEntry
from hasten.core.errors import PlanError
from hasten.core.variant import CPU
from hasten.core.version import __version__
from hasten.deploy.pod_options import LINGER_S, PodOptions
from hasten.server.http.state import HttpLimits
from hasten.server.models.instances import MAX_INSTANCES, MAX_ON_DEVICE

# The metric of the queue and the paths of the server (server/telemetry/metrics.py, server/health.py).
QUEUE_METRIC, METRICS_PATH = "hasten_queue_size", "/metrics"
LIVE_PATH, READY_PATH = "/v2/health/live", "/v2/health/ready"
# The values in docker/Dockerfile and docker/gpu.Dockerfile.
SERVER_IMAGE = f"hasten:{__version__}"
GPU_SERVER_IMAGE = f"{SERVER_IMAGE}-gpu"
CACHE, MODELS = "/var/cache/hasten", "/models"
USER = 10001

_STARTUP_PERIOD_S = 2
# The startup timeout, as a multiple of the benchmark's load time (for a cold node with a slow disk), and its minimum.
_STARTUP_FACTOR, _MIN_STARTUP_S = 60, 120
_MEMORY_STEP = 64 * 2**20
_GPU = "nvidia.com/gpu"
# The writable paths: the server's cache of measurements, and temporary files of libraries.
_WRITABLE = {"cache": CACHE, "tmp": "/tmp"}
VOLUMES = [{"name": name, "emptyDir": {}} for name in _WRITABLE]
VOLUME_MOUNTS = [{"name": name, "mountPath": path} for name, path in _WRITABLE.items()]
# Keeps a terminating pod serving until proxies stop sending requests.
PRE_STOP = {"lifecycle": {"preStop": {"sleep": {"seconds": LINGER_S}}}}

# Node Feature Discovery's names of the instructions that a variant may use.
_NODE_FEATURES = {
    "amx_int8": "AMXINT8",
    "amx_bf16": "AMXBF16",
    "avx512_vnni": "AVX512VNNI",
    "avx_vnni": "AVXVNNI",
    "avx512_bf16": "AVX512BF16",
    "neon": "ASIMD",
    "dotprod": "ASIMDDP",
}

_GPU_NOTES = f"""
Nodes need NVIDIA's device plugin, which provides `{_GPU}`; {{taint}}. If the plugin lets
several pods share a GPU (time slicing, MPS), each still requests 1. Use the image of `make image GPU=1`, or one that
has the same packages: ONNX Runtime for CUDA, PyTorch and Triton.
"""
_TOLERATED = "pods tolerate the taint of that name"
_NOT_TOLERATED = "nodes with the taint of that name are excluded, since Knative rejects tolerations by default"
_ENGINE_NOTES = {
    "tensorrt": "TensorRT is not on PyPI: install it in that image, too, or no pod becomes ready.\n",
    "tensorrt-rtx": "Install `hasten[tensorrt-rtx]` in that image, too, or no pod becomes ready.\n",
}


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod that serves a bundle: its variant, its resources and its throughput."""

    options: PodOptions
    entry: VariantEntry
    digest: str
    cores: int
    gpus: int
    memory_bytes: int
    load_s: float
    # The throughput at the benchmark's optimal shape, on these cores or on a GPU.
    rows_per_s: float
    # Requests that run at the same time: one per core or, on a GPU, a batch of the optimal shape per session.
    concurrency: int

    @classmethod
    def of(cls, bundle: Bundle, options: PodOptions) -> Pod:
        """Compute the resources of a pod from the benchmark of the variant that it runs."""
        entry = bundle.entry(options.variant) if options.variant else bundle.chosen
        if entry.device == CPU and options.gpus:
            raise PlanError(f"--gpu is not supported: {entry.name} runs on the CPU", hint="leave --gpu out")
        report = bundle.report
        footprint = next((item for item in report.bench.footprints if item.variant == entry.name), None)
        # The optimal shape is timed first.
        timing = next((item for item in report.bench.timings if item.variant == entry.name), None)
        if footprint is None or timing is None:
            raise PlanError(
                f"pods cannot be sized: the bundle's report has no benchmark of {entry.name}",
                hint="build the bundle again",
            )
        timed_cores = report.plan.threads or report.machine.cores
        is_on_cpu = entry.device == CPU
        cores, instances = _cores_and_sessions(options, timed_cores, MAX_INSTANCES if is_on_cpu else MAX_ON_DEVICE)
        # Each session may use the peak memory of the benchmark, and all share the buffers of request bodies.
        memory = instances * footprint.peak_memory_bytes + HttpLimits().buffered_bytes
        return cls(
            options=options,
            entry=entry,
            digest=bundle.manifest.digest,
            cores=cores,
            gpus=options.gpus or (0 if is_on_cpu else 1),
            memory_bytes=math.ceil(memory / _MEMORY_STEP) * _MEMORY_STEP,
            load_s=footprint.load_ms / 1e3,
            rows_per_s=timing.rows_per_s * (cores / timed_cores if is_on_cpu else 1),
            concurrency=cores if is_on_cpu else instances * timing.shape.batch,
        )

    @property
    def target_queue_size(self) -> int:
        """Return the number of queued requests at which each waits for the target time."""
        return max(1, round(self.rows_per_s * self.options.target_wait_s))

    @property
    def scaling_rule(self) -> str:
        """Describe the queue size beyond which more pods are started."""
        return f"over {self.target_queue_size} queued requests per pod"

    @property
    def memory(self) -> str:
        """Return the memory as a quantity of Kubernetes."""
        return f"{self.memory_bytes // 2**20}Mi"

    def metadata(self) -> dict[str, object]:
        """Return the metadata of a resource."""
        return {"name": self.options.name, **self.options.namespace_field, "labels": self.labels()}

    def labels(self) -> dict[str, object]:
        """Return the recommended labels of Kubernetes."""
        return {
            "app.kubernetes.io/name": self.options.name,
            "app.kubernetes.io/version": __version__,
            "app.kubernetes.io/managed-by": "hasten",
        }

    def annotations(self, port: int) -> dict[str, object]:
        """Return the annotations of the pods, with the bundle's hash: another bundle replaces the pods."""
        scrape = {"prometheus.io/scrape": "true", "prometheus.io/port": str(port), "prometheus.io/path": METRICS_PATH}
        return {"hasten/bundle": self.digest, **scrape}

    def resources(self) -> dict[str, object]:
        """Return equal requests and limits in whole cores, so that nodes can give a pod exclusive cores."""
        requests = {"cpu": str(self.cores), "memory": self.memory}
        gpus = {_GPU: str(self.gpus)} if self.gpus else {}
        return {"requests": requests, "limits": {**requests, **gpus}}

    def environment(self) -> list[object]:
        """Return the variables, among them the variant: a pod that cannot run it does not become ready."""
        options = self.options
        values = {"HASTEN_VARIANT": self.entry.name, "HASTEN_DRAIN_TIMEOUT": f"{options.drain_timeout_s:g}s"}
        if options.threads or options.instances:
            instances = options.instances or 1
            values |= {"HASTEN_INSTANCES": str(instances), "HASTEN_THREADS": str(self.cores // instances)}
        if self.gpus:
            # By default, Triton caches kernels in the home directory, which the user does not have.
            values["TRITON_CACHE_DIR"] = f"{CACHE}/triton"
        entries = variables(values)
        if options.keys_secret:
            key = {"name": options.keys_secret, "key": "api-keys"}
            entries.append({"name": "HASTEN_API_KEYS", "valueFrom": {"secretKeyRef": key}})
        return entries

    def probes(self, port: int) -> dict[str, object]:
        """Return the probes of the container."""

        def probe(path: str, **times: int) -> dict[str, object]:
            return {"httpGet": {"path": path, "port": port}, **times}

        timeout_s = max(_MIN_STARTUP_S, _STARTUP_FACTOR * self.load_s)
        tries = math.ceil(timeout_s / _STARTUP_PERIOD_S)
        startup = {"periodSeconds": _STARTUP_PERIOD_S, "timeoutSeconds": 3, "failureThreshold": tries}
        return {
            "startupProbe": probe(READY_PATH, **startup),
            "readinessProbe": probe(READY_PATH, periodSeconds=5, timeoutSeconds=3, failureThreshold=2),
            "livenessProbe": probe(LIVE_PATH, periodSeconds=10, timeoutSeconds=5, failureThreshold=3),
        }

    @property
    def size(self) -> str:
        """Describe the resources of the pod."""
        size = f"{pluralize(self.cores, 'core')} and {self.memory}"
        return f"{pluralize(self.gpus, 'GPU')}, {size}" if self.gpus else size

    @property
    def server_image(self) -> str:
        """Return the image of the server without a bundle."""
        return GPU_SERVER_IMAGE if self.gpus else SERVER_IMAGE

    def image(self, *, has_bundle: bool) -> str:
        """Return the image; one with the bundle inside is tagged with the bundle's hash."""
        default = f"hasten-{self.options.name}:{self.digest[:12]}" if has_bundle else self.server_image
        return self.options.image or default

    def check_gpus(self) -> None:
        """Raise a PlanError if the pod has several GPUs: hasten's server uses one, unlike tritonserver."""
        if self.gpus > 1:
            raise PlanError(
                f"--gpu {self.gpus} is not supported: a server uses one GPU",
                hint="use --replicas to run more pods, with one GPU each",
            )

    def gpu_notes(self, *, is_tolerant: bool = True) -> str:
        """Describe the requirements of GPU nodes, as Markdown."""
        if not self.gpus:
            return ""
        notes = _GPU_NOTES.format(taint=_TOLERATED if is_tolerant else _NOT_TOLERATED)
        return notes + _ENGINE_NOTES.get(self.entry.backend, "")

    def scheduling(self, selector: Mapping[str, object]) -> dict[str, object]:
        """Return the fields that place and stop the pods, which have the labels of the selector.

        Pods are spread over zones and nodes if possible, tolerate the taint that keeps other pods off GPU nodes, and
        prefer nodes with the variant's instructions, as labelled by Node Feature Discovery.
        """
        matching = {"whenUnsatisfiable": "ScheduleAnyway", "labelSelector": {"matchLabels": selector}}
        zones = ("topology.kubernetes.io/zone", "kubernetes.io/hostname")
        fields: dict[str, object] = {
            "terminationGracePeriodSeconds": self.options.grace_s,
            # A Service named "hasten" would otherwise set HASTEN_PORT, which is an option of the server.
            "enableServiceLinks": False,
            "topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": key, **matching} for key in zones],
        }
        names = [_NODE_FEATURES[name] for name in self.entry.instructions if name in _NODE_FEATURES]
        terms = [{"key": f"feature.node.kubernetes.io/cpu-cpuid.{name}", "operator": "Exists"} for name in names]
        preferred = [{"weight": 100, "preference": {"matchExpressions": [term]}} for term in terms]
        if preferred:
            fields["affinity"] = {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}}
        if self.gpus:
            fields["tolerations"] = [{"key": _GPU, "operator": "Exists", "effect": "NoSchedule"}]
        return fields


def pluralize(number: int, noun: str) -> str:
    """Return the number and the noun, in plural if necessary."""
    return f"{number} {noun}{'s' if number > 1 else ''}"


def _cores_and_sessions(options: PodOptions, timed_cores: int, max_sessions: int) -> tuple[int, int]:
    """Return the cores and the maximum number of sessions: as set by the options, else as in the benchmark."""
    if options.threads or options.instances:
        instances = options.instances or 1
        return instances * (options.threads or max(1, timed_cores // instances)), instances
    return timed_cores, 2 ** (min(timed_cores, max_sessions).bit_length() - 1)


def variables(values: Mapping[str, str]) -> list[object]:
    """Return environment variables as entries of a manifest."""
    return [{"name": name, "value": value} for name, value in values.items()]


def listen_variables(port: int, grpc_port: int) -> list[object]:
    """Return the variables that are the same for all bundles: the addresses and the cache."""
    ports = {"HASTEN_PORT": str(port), "HASTEN_GRPC_PORT": str(grpc_port)}
    return variables({"HASTEN_HOST": "0.0.0.0", **ports, "HASTEN_CACHE": CACHE})


def security_context(*, is_read_only: bool = True) -> dict[str, object]:
    """Return a context for the "restricted" Pod Security Standard, by default with a read-only root."""
    return {
        "runAsNonRoot": True,
        "runAsUser": USER,
        "runAsGroup": USER,
        "readOnlyRootFilesystem": is_read_only,
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }

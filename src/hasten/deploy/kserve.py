"""Write an InferenceService that runs on hasten's server as a custom runtime, or on KServe's tritonserver."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hasten.bundle import Bundle
from hasten.bundle.manifest import SCHEMA
from hasten.core.errors import PlanError
from hasten.deploy import manifests, pods, tritonserver
from hasten.deploy.check_names import check_name
from hasten.deploy.manifests import Deployment, Manifest, build_instructions, dockerfile, manifest
from hasten.deploy.pod_options import Mode, PodOptions, Protocol, Service
from hasten.deploy.pods import Pod
from hasten.families import family_of_bundle

# The ports on which KServe expects a server to listen, and the path to which it downloads a storage address.
HTTP_PORT, GRPC_PORT, STORED = 8080, 9000, "/mnt/models"
# For the name of an InferenceService: Knative appends "-predictor-00001" to it.
_MAX_NAME_CHARS = 47
# The target when KServe scales by CPU usage: above it, queues grow long.
_CPU_PERCENT = 70
# Tritonserver's Python models exchange tensors in shared memory, which a container limits to 64 MB by default.
_SHARED = "shared-memory"


def write(bundle: Bundle, target: Path, options: PodOptions, service: Service, *, force: bool = False) -> Deployment:
    """Write all manifests atomically."""
    check_name("--name", options.name, _MAX_NAME_CHARS)
    files: dict[str, Manifest | str] = {}
    if service.is_hasten:
        pod = Pod.of(bundle, options)
        pod.check_gpus()
        image: str | None = pod.image(has_bundle=service.storage is None)
        files["servingruntime.yaml"] = serving_runtime(pod, image, service)
    else:
        pod, image = Pod.of(bundle, _with_tritonserver_variant(bundle, options)), options.image
        if options.keys_secret:
            raise PlanError("--keys-secret is not supported: tritonserver has no API keys", hint="leave it out")
    files["inferenceservice.yaml"] = inference_service(pod, image, service)
    if image and service.is_hasten and service.storage is None:
        files["Dockerfile"] = dockerfile(pod, image)
    files["README.md"] = _readme(pod, image, service)
    return manifests.write(target, pod, image, _scaling(pod, service)[1], files, force=force)


def _with_tritonserver_variant(bundle: Bundle, options: PodOptions) -> PodOptions:
    """Choose the variant that sizes the pods: the default of `hasten deploy tritonserver`, if it was benchmarked."""
    if options.variant is not None:
        return options
    name = family_of_bundle(bundle).tritonserver_variant(bundle, tritonserver.Options())
    is_timed = name in [entry.name for entry in bundle.manifest.variants]
    return replace(options, variant=name) if is_timed else options


def _runtime_name(pod: Pod, service: Service) -> str:
    """Return the name of the runtime.

    One runtime, and another for GPUs, serves all bundles in storage; an image with a bundle inside is its own runtime.
    """
    if not service.is_hasten:
        return "kserve-tritonserver"
    shared = "hasten-gpu" if pod.gpus else "hasten"
    return shared if service.storage else pod.options.name


def serving_runtime(pod: Pod, image: str | None, service: Service) -> Manifest:
    """Return the runtime, which can serve any bundle; the settings of a bundle are in its InferenceService."""
    container = {
        "name": "kserve-container",
        "image": image,
        **({"args": [STORED]} if service.storage else {}),
        "env": pods.listen_variables(HTTP_PORT, GRPC_PORT),
        # KServe's downloader gets the same security context, and writes files of its own.
        "securityContext": pods.security_context(is_read_only=service.storage is None),
        "volumeMounts": pods.VOLUME_MOUNTS,
    }
    namespace = {} if service.is_for_cluster else pod.options.namespace_field
    return manifest(
        "serving.kserve.io/v1alpha1",
        "ClusterServingRuntime" if service.is_for_cluster else "ServingRuntime",
        {"name": _runtime_name(pod, service), **namespace, "labels": {"app.kubernetes.io/managed-by": "hasten"}},
        {
            # An image with a bundle inside serves that bundle only: KServe must not select it for others.
            "supportedModelFormats": [{"name": "hasten", "version": str(SCHEMA), "autoSelect": bool(service.storage)}],
            "protocolVersions": [protocol.value for protocol in Protocol],
            "containers": [container],
            "volumes": pods.VOLUMES,
        },
    )


def inference_service(pod: Pod, image: str | None, service: Service) -> Manifest:
    """Return the InferenceService."""
    options, is_hasten = pod.options, service.is_hasten
    is_grpc = service.protocol is Protocol.GRPC
    model = {
        "modelFormat": {"name": "hasten", "version": str(SCHEMA)} if is_hasten else {"name": "triton"},
        "runtime": _runtime_name(pod, service),
        "protocolVersion": service.protocol.value,
        **({"storageUri": service.storage} if service.storage else {}),
        **({"image": image} if image and not is_hasten else {}),
        **({"env": pod.environment()} if is_hasten else {}),
        "ports": [{"name": "h2c", "containerPort": GRPC_PORT} if is_grpc else {"containerPort": HTTP_PORT}],
        "resources": pod.resources(),
        **({} if is_hasten else {"volumeMounts": [{"name": _SHARED, "mountPath": "/dev/shm"}]}),
        **_probes(pod, service),
    }
    labels = {"serving.kserve.io/inferenceservice": options.name}
    predictor = {
        "minReplicas": options.replicas,
        "maxReplicas": options.replica_limit,
        **_scaling(pod, service)[0],
        # Tritonserver exports its metrics on another port.
        "annotations": pod.annotations(HTTP_PORT) if is_hasten else {"hasten/bundle": pod.digest},
        # Knative rejects most of these fields.
        **({"enableServiceLinks": False} if service.mode is Mode.KNATIVE else pod.scheduling(labels)),
        **({} if is_hasten else {"volumes": [{"name": _SHARED, "emptyDir": {"medium": "Memory"}}]}),
        "model": model,
    }
    annotations = {"serving.kserve.io/deploymentMode": service.mode.value.capitalize()}
    if service.prometheus:
        annotations["serving.kserve.io/autoscalerClass"] = "keda"
    metadata = {**pod.metadata(), "annotations": annotations}
    return manifest("serving.kserve.io/v1beta1", "InferenceService", metadata, {"predictor": predictor})


def _probes(pod: Pod, service: Service) -> Manifest:
    """Return the probes, whose paths tritonserver has, too; Knative accepts a readiness probe only."""
    if service.mode is Mode.STANDARD:
        return {**pod.probes(HTTP_PORT), **pods.PRE_STOP}
    if service.protocol is Protocol.GRPC:
        return {"readinessProbe": {"grpc": {"port": GRPC_PORT}}}
    return {"readinessProbe": pod.probes(HTTP_PORT)["readinessProbe"]}


def _scaling(pod: Pod, service: Service) -> tuple[Manifest, str]:
    """Return the fields that scale the pods, and describe when more are started."""
    if service.prometheus:
        # KServe passes `value` to KEDA as the target per pod.
        labels = {"model": pod.options.name, **pod.options.namespace_field}
        matchers = ",".join(f'{name}="{value}"' for name, value in labels.items())
        metric = {
            "backend": "prometheus",
            "serverAddress": service.prometheus,
            "query": f"sum(avg_over_time({pods.QUEUE_METRIC}{{{matchers}}}[1m]))",
        }
        target = {"type": "Value", "value": str(pod.target_queue_size)}
        metrics = [{"type": "External", "external": {"metric": metric, "target": target}}]
        return {"autoScaling": {"metrics": metrics}}, pod.scaling_rule
    if service.mode is Mode.KNATIVE:
        in_flight = pod.target_queue_size + pod.concurrency
        fields = {"scaleMetric": "concurrency", "scaleTarget": in_flight}
        return fields, f"over {in_flight} requests in flight per pod"
    return {"scaleMetric": "cpu", "scaleTarget": _CPU_PERCENT}, f"over {_CPU_PERCENT} % CPU usage"


def _readme(pod: Pod, image: str | None, service: Service) -> str:
    options = pod.options
    is_hasten = service.is_hasten
    note = {
        Mode.STANDARD: "`--prometheus URL` scales by the queue instead, with KEDA." if is_hasten else "",
        Mode.KNATIVE: "Knative counts them.",
    }[service.mode]
    if service.prometheus:
        note = f"The cluster needs KEDA, and a Prometheus at `{service.prometheus}` that scrapes annotated pods."
    count = f"{options.replicas} pods."
    if options.is_scaled:
        rule = _scaling(pod, service)[1]
        count = f"{options.replicas} to {options.replica_limit} pods: more are started at {rule}. {note}"
    return f"""# {options.name} on KServe

Written by hasten for bundle `{pod.digest[:12]}`, variant `{pod.entry.name}`. Needs Kubernetes 1.30 and KServe 0.16 in
{service.mode.value} mode, or newer.

{_delivery_notes(pod, image, service)}
```
kubectl apply -k .
kubectl wait --for=condition=Ready inferenceservice/{options.name}
```

## Size and scaling

{pod.size} per pod, according to the bundle's benchmark. {count.strip()}
{_gpu_notes(pod, service)}"""


def _gpu_notes(pod: Pod, service: Service) -> str:
    if not pod.gpus:
        return ""
    is_by_cpu = pod.options.is_scaled and service.mode is Mode.STANDARD and not service.prometheus
    warning = "\nCPU usage does not reflect GPU usage: scale by the queue if possible.\n" if is_by_cpu else ""
    notes = pod.gpu_notes(is_tolerant=service.mode is Mode.STANDARD) if service.is_hasten else ""
    return f"{notes}{warning}"


def _delivery_notes(pod: Pod, image: str | None, service: Service) -> str:
    """Describe how the bundle reaches the pods, and the name of the model."""
    name = pod.options.name
    if not service.is_hasten:
        current = f" (now `{image}`)" if image else ""
        return f"""`{service.storage}` contains the repository that `hasten deploy tritonserver BUNDLE -o DIR` wrote.
Models are named like its folders. Models in Python need packages that NVIDIA's image lacks: build the `Dockerfile` in
DIR and pass the image's name as `--image`{current}. If DIR was written from another variant, with `--variant` or
`--runtime python`, pass that variant here as `--variant`: pods are sized by its benchmark.
"""
    usage = f"The model is named `{name}`: `POST /v2/models/{name}/infer`.\n"
    if image and service.storage is None:
        return f"{build_instructions(image)}\n{usage}"
    return f"""`{service.storage}` must contain the bundle's directory as `{name}/`. The runtime
`{_runtime_name(pod, service)}` serves any bundle{" for GPUs" if pod.gpus else ""} that is stored like this. {usage}"""

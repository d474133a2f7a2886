"""A bundle as an InferenceService: on our server as a runtime of its own, or on the tritonserver that KServe brings."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from hasten.bundle import Bundle
from hasten.bundle.manifest import SCHEMA
from hasten.core.errors import PlanError
from hasten.deploy import manifests, pods, tritonserver
from hasten.deploy.manifests import Deployment, to_yaml
from hasten.deploy.names import check_name
from hasten.deploy.pods import Pod, PodOptions
from hasten.deploy.tritonserver.options import choose
from hasten.deploy.tritonserver.writer import choose_writer

# Where KServe expects a server to listen, and puts what a storage address leads to.
HTTP_PORT, GRPC_PORT, STORED = 8080, 9000, "/mnt/models"
# Of an InferenceService: Knative adds "-predictor-00001" to it.
_MOST_LETTERS = 47
# Of the CPU, where KServe scales by it: as much as is left to a queue before it grows long.
_CPU_PERCENT = 70
# Tritonserver's Python models hand their tensors over in memory, of which a container has 64 MB otherwise.
_SHARED = "shared-memory"
_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*://\S+")


class Runtime(StrEnum):
    HASTEN = "hasten"
    TRITONSERVER = "tritonserver"


class Mode(StrEnum):
    """How KServe runs pods. Knative refuses much of what a pod may say."""

    STANDARD = "standard"
    KNATIVE = "knative"


class Protocol(StrEnum):
    HTTP = "v2"
    GRPC = "grpc-v2"


@dataclass(frozen=True, slots=True)
class Service:
    """What KServe alone asks."""

    runtime: Runtime = Runtime.HASTEN
    mode: Mode = Mode.STANDARD
    protocol: Protocol = Protocol.HTTP
    # Holds the bundle under the model's name, or the repository of tritonserver; without it the image holds the bundle.
    storage: str | None = None
    # Its address: KEDA then scales by the queue, which KServe cannot by itself.
    prometheus: str | None = None
    is_for_cluster: bool = False

    def __post_init__(self) -> None:
        for flag, address in {"--storage": self.storage, "--prometheus": self.prometheus}.items():
            if address is not None and not _ADDRESS.fullmatch(address):
                raise PlanError(
                    f"{flag} '{address}' is not an address", hint="write s3://…, gs://…, pvc://…, https://…"
                )
        if self.prometheus is not None and self.mode is Mode.KNATIVE:
            raise PlanError("KServe scales by a metric of Prometheus in standard mode alone", hint="--mode standard")
        if self.runtime is Runtime.HASTEN:
            return
        if self.storage is None:
            raise PlanError(
                "tritonserver reads a model repository from a storage address",
                hint="hasten deploy tritonserver BUNDLE -o DIR, upload DIR, and give its address as --storage",
            )
        if self.prometheus is not None or self.is_for_cluster:
            raise PlanError("--prometheus and --cluster-wide are about our own runtime", hint="leave them out")


def write(bundle: Bundle, target: Path, options: PodOptions, service: Service, *, force: bool = False) -> Deployment:
    """All of it, or nothing."""
    check_name("--name", options.name, _MOST_LETTERS)
    is_ours = service.runtime is Runtime.HASTEN
    pod = Pod.of(bundle, options if is_ours else _of_tritonserver(bundle, options))
    if options.keys_secret and not is_ours:
        raise PlanError("--keys-secret is about our own server: tritonserver knows no keys", hint="leave it out")
    if is_ours:
        pod.check_gpus()
    image = _image(pod, service)
    documents = {"servingruntime.yaml": serving_runtime(pod, image, service)} if is_ours else {}
    documents["inferenceservice.yaml"] = inference_service(pod, image, service)
    files = {name: to_yaml(document) for name, document in documents.items()}
    files["kustomization.yaml"] = to_yaml(manifests.kustomization(list(documents)))
    if image and is_ours and service.storage is None:
        files["Dockerfile"] = manifests.dockerfile(pod, image)
    files["README.md"] = _readme(pod, image, service)
    manifests.write(target, files, force=force)
    return Deployment.of(pod, target, files, image, _scales_by(pod, service))


def _of_tritonserver(bundle: Bundle, options: PodOptions) -> PodOptions:
    """Sized for what `hasten deploy tritonserver` takes where it is not told otherwise, if that was timed."""
    if options.variant is not None:
        return options
    writes, defaults = bundle.manifest.generation is not None, tritonserver.Options()
    taken = (choose_writer(bundle, defaults) if writes else choose(bundle, defaults).variant).name
    is_timed = taken in [entry.name for entry in bundle.manifest.variants]
    return replace(options, variant=taken) if is_timed else options


def _image(pod: Pod, service: Service) -> str | None:
    if service.runtime is Runtime.TRITONSERVER:
        return pod.options.image
    return pods.baked_image(pod) if service.storage is None else pod.options.image or pod.server_image


def _runtime_name(pod: Pod, service: Service) -> str:
    """One runtime serves whatever is stored elsewhere, and one what of it runs on GPUs, from another image; an image
    with a bundle inside is a runtime of its own.
    """
    if service.runtime is Runtime.TRITONSERVER:
        return "kserve-tritonserver"
    shared = "hasten-gpu" if pod.gpus else "hasten"
    return shared if service.storage else pod.options.name


def serving_runtime(pod: Pod, image: str | None, service: Service) -> dict[str, object]:
    """Our server, for any bundle; what is particular to one stands in its InferenceService."""
    container = {
        "name": "kserve-container",
        "image": image,
        **({"args": [STORED]} if service.storage else {}),
        "env": pods.listening(HTTP_PORT, GRPC_PORT),
        # KServe's downloader is given the same rights, and has files of its own to write.
        "securityContext": pods.security(is_read_only=service.storage is None),
        "volumeMounts": pods.mounts(),
    }
    place = {} if service.is_for_cluster else pod.options.place
    return manifests.document(
        "serving.kserve.io/v1alpha1",
        "ClusterServingRuntime" if service.is_for_cluster else "ServingRuntime",
        {"name": _runtime_name(pod, service), **place, "labels": {"app.kubernetes.io/managed-by": "hasten"}},
        {
            # An image with a bundle inside answers for that one alone: nobody else is to be given it.
            "supportedModelFormats": [{"name": "hasten", "version": str(SCHEMA), "autoSelect": bool(service.storage)}],
            "protocolVersions": [protocol.value for protocol in Protocol],
            "containers": [container],
            "volumes": pods.volumes(),
        },
    )


def inference_service(pod: Pod, image: str | None, service: Service) -> dict[str, object]:
    options, is_ours = pod.options, service.runtime is Runtime.HASTEN
    is_grpc = service.protocol is Protocol.GRPC
    model = {
        "modelFormat": {"name": "hasten", "version": str(SCHEMA)} if is_ours else {"name": "triton"},
        "runtime": _runtime_name(pod, service),
        "protocolVersion": service.protocol.value,
        **({"storageUri": service.storage} if service.storage else {}),
        **({"image": image} if image and not is_ours else {}),
        **({"env": pod.environment()} if is_ours else {}),
        "ports": [{"name": "h2c", "containerPort": GRPC_PORT} if is_grpc else {"containerPort": HTTP_PORT}],
        "resources": pod.resources(),
        **({} if is_ours else {"volumeMounts": [{"name": _SHARED, "mountPath": "/dev/shm"}]}),
        **_probes(pod, service),
    }
    predictor = {
        "minReplicas": options.replicas,
        "maxReplicas": options.max_replicas,
        **_scaling(pod, service),
        # Tritonserver's own numbers are elsewhere.
        "annotations": pod.annotations(HTTP_PORT) if is_ours else {"hasten/bundle": pod.digest},
        # A Service called "hasten" would otherwise set HASTEN_PORT, which is an option of ours.
        "enableServiceLinks": False,
        **_scheduling(pod, service),
        **({} if is_ours else {"volumes": [{"name": _SHARED, "emptyDir": {"medium": "Memory"}}]}),
        "model": model,
    }
    annotations = {"serving.kserve.io/deploymentMode": service.mode.value.capitalize()}
    if service.prometheus:
        annotations["serving.kserve.io/autoscalerClass"] = "keda"
    metadata = {**pod.metadata(), "annotations": annotations}
    return manifests.document("serving.kserve.io/v1beta1", "InferenceService", metadata, {"predictor": predictor})


def _probes(pod: Pod, service: Service) -> dict[str, object]:
    """Tritonserver answers at the same paths."""
    if service.mode is Mode.STANDARD:
        return {**pod.probes(HTTP_PORT), **pods.lingering()}
    if service.protocol is Protocol.GRPC:
        return {"readinessProbe": {"grpc": {"port": GRPC_PORT}}}
    return {"readinessProbe": pod.probes(HTTP_PORT)["readinessProbe"]}


def _scheduling(pod: Pod, service: Service) -> dict[str, object]:
    if service.mode is Mode.KNATIVE:
        return {}
    labels = {"serving.kserve.io/inferenceservice": pod.options.name}
    return {
        "terminationGracePeriodSeconds": pod.options.grace_s,
        "topologySpreadConstraints": pods.spread(labels),
        **pod.affinity(),
        **pod.tolerations(),
    }


def _scaling(pod: Pod, service: Service) -> dict[str, object]:
    if service.prometheus:
        # KServe hands `value` to KEDA as what each pod may have of the sum.
        labels = {"model": pod.options.name, **pod.options.place}
        matched = ",".join(f'{name}="{value}"' for name, value in labels.items())
        metric = {
            "backend": "prometheus",
            "serverAddress": service.prometheus,
            "query": f"sum(avg_over_time({pods.QUEUE_METRIC}{{{matched}}}[1m]))",
        }
        target = {"type": "Value", "value": str(pod.target_waiting)}
        return {"autoScaling": {"metrics": [{"type": "External", "external": {"metric": metric, "target": target}}]}}
    if service.mode is Mode.KNATIVE:
        # Those that wait, and those that run.
        return {"scaleMetric": "concurrency", "scaleTarget": pod.target_waiting + pod.running}
    return {"scaleMetric": "cpu", "scaleTarget": _CPU_PERCENT}


def _scales_by(pod: Pod, service: Service) -> str:
    if service.prometheus:
        return pod.queue_limit
    if service.mode is Mode.KNATIVE:
        return f"over {pod.target_waiting + pod.running} requests under way a pod"
    return f"over {_CPU_PERCENT} % of the CPU in use"


def _readme(pod: Pod, image: str | None, service: Service) -> str:
    options = pod.options
    is_ours = service.runtime is Runtime.HASTEN
    needs = {
        Mode.STANDARD: "`--prometheus URL` scales by the queue instead, through KEDA." if is_ours else "",
        Mode.KNATIVE: "Knative counts them.",
    }[service.mode]
    if service.prometheus:
        needs = f"The cluster needs KEDA, and a Prometheus at `{service.prometheus}` that scrapes annotated pods."
    count = f"{options.replicas} pods."
    if options.is_scaled:
        count = f"{options.replicas} to {options.max_replicas} pods: more with {_scales_by(pod, service)}. {needs}"
    return f"""# {options.name} on KServe

Written by hasten for bundle `{pod.digest[:12]}`, variant `{pod.entry.name}`. Needs Kubernetes 1.30 and KServe 0.16 in
{service.mode.value} mode, or newer.

{_bringing(pod, image, service)}
```
kubectl apply -k .
kubectl wait --for=condition=Ready inferenceservice/{options.name}
```

## Size and scaling

{pod.size} for each pod, by the bundle's benchmark. {count.strip()}
{_about_gpus(pod, service)}"""


def _about_gpus(pod: Pod, service: Service) -> str:
    if not pod.gpus:
        return ""
    is_by_cpu = pod.options.is_scaled and service.mode is Mode.STANDARD and not service.prometheus
    warning = "\nThe CPU says little about how busy a GPU is: scale by the queue where you can.\n" if is_by_cpu else ""
    about = pod.about_gpus(is_tolerant=service.mode is Mode.STANDARD) if service.runtime is Runtime.HASTEN else ""
    return f"{about}{warning}"


def _bringing(pod: Pod, image: str | None, service: Service) -> str:
    """How the bundle comes there, and by what name it is asked."""
    name = pod.options.name
    if service.runtime is Runtime.TRITONSERVER:
        given = f" (now `{image}`)" if image else ""
        return f"""`{service.storage}` holds the model repository that `hasten deploy tritonserver BUNDLE -o DIR` wrote.
Models go by the names of its folders. Those in Python need packages that NVIDIA's image does not have: build the
`Dockerfile` in DIR, and give the image's name as `--image`{given}. Where DIR was written from another variant, by
`--variant` or `--runtime python`, give it here as `--variant`: pods are as big as its benchmark says.
"""
    asked = f"The model goes by `{name}`: `POST /v2/models/{name}/infer`.\n"
    if image and service.storage is None:
        return f"{manifests.building(image)}\n{asked}"
    return f"""`{service.storage}` holds the bundle in a folder `{name}/`: upload its directory as that. The runtime
`{_runtime_name(pod, service)}` serves any bundle{" for GPUs" if pod.gpus else ""} that is stored so. {asked}"""

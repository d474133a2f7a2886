"""A bundle as a Deployment that grows with its queue: manifests that `kubectl apply -k` takes as they are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hasten.bundle import Bundle
from hasten.deploy import manifests, pods
from hasten.deploy.manifests import Deployment, to_yaml
from hasten.deploy.names import check_object
from hasten.deploy.pods import Pod, PodOptions
from hasten.server.settings import Settings

HTTP_PORT = Settings().port
GRPC_PORT = HTTP_PORT + 1


@dataclass(frozen=True, slots=True)
class Delivery:
    """How the bundle comes into the pods: inside their image, or from a claim that holds it under the model's name."""

    volume_claim: str | None = None

    def __post_init__(self) -> None:
        if self.volume_claim is not None:
            check_object("--volume-claim", self.volume_claim)


def write(bundle: Bundle, target: Path, options: PodOptions, delivery: Delivery, *, force: bool = False) -> Deployment:
    """All of it, or nothing."""
    pod = Pod.of(bundle, options)
    pod.check_gpus()
    claim = delivery.volume_claim
    image = options.image or pod.server_image if claim else pods.baked_image(pod)
    documents = all_manifests(pod, image, delivery)
    files = {name: to_yaml(document) for name, document in documents.items()}
    files["kustomization.yaml"] = to_yaml(manifests.kustomization(list(documents)))
    if options.is_scaled:
        files["prometheus-adapter.yaml"] = to_yaml(adapter_rules())
    if claim is None:
        files["Dockerfile"] = manifests.dockerfile(pod, image)
    files["README.md"] = _readme(pod, image, delivery)
    manifests.write(target, files, force=force)
    return Deployment.of(pod, target, files, image, pod.queue_limit)


def all_manifests(pod: Pod, image: str, delivery: Delivery) -> dict[str, dict[str, object]]:
    """By the file each goes into."""
    found = {"deployment.yaml": deployment(pod, image, delivery), "service.yaml": service(pod)}
    found["disruption.yaml"] = disruption(pod)
    if pod.options.is_scaled:
        found["autoscaler.yaml"] = autoscaler(pod)
    return found


def deployment(pod: Pod, image: str, delivery: Delivery) -> dict[str, object]:
    options = pod.options
    selector = _selector(pod)
    # Where there is an autoscaler, the number is its own: applying the manifest again would undo it.
    replicas = {} if options.is_scaled else {"replicas": options.replicas}
    spec = {
        **replicas,
        "selector": selector,
        # New pods come before old ones go.
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": "25%", "maxUnavailable": 0}},
        "template": {
            "metadata": {"labels": pod.labels(), "annotations": pod.annotations(HTTP_PORT)},
            "spec": {
                "terminationGracePeriodSeconds": options.grace_s,
                # A Service called "hasten" would otherwise set HASTEN_PORT, which is an option of ours.
                "enableServiceLinks": False,
                "automountServiceAccountToken": False,
                "topologySpreadConstraints": pods.spread(selector["matchLabels"]),
                **pod.affinity(),
                **pod.tolerations(),
                "containers": [_container(pod, image, delivery)],
                "volumes": [*_bundle_volume(delivery), *pods.volumes()],
            },
        },
    }
    return manifests.document("apps/v1", "Deployment", pod.metadata(), spec)


def _container(pod: Pod, image: str, delivery: Delivery) -> dict[str, object]:
    bundle = [{"name": "models", "mountPath": pods.MODELS, "readOnly": True}] if delivery.volume_claim else []
    return {
        "name": "hasten",
        "image": image,
        "args": [f"{pods.MODELS}/{pod.options.name}"],
        "env": [*pods.listening(HTTP_PORT, GRPC_PORT), *pod.environment()],
        "ports": [{"name": "http", "containerPort": HTTP_PORT}, {"name": "grpc", "containerPort": GRPC_PORT}],
        "resources": pod.resources(),
        **pod.probes(HTTP_PORT),
        **pods.lingering(),
        "securityContext": pods.security(),
        "volumeMounts": [*bundle, *pods.mounts()],
    }


def _bundle_volume(delivery: Delivery) -> list[object]:
    claim = delivery.volume_claim
    return [{"name": "models", "persistentVolumeClaim": {"claimName": claim, "readOnly": True}}] if claim else []


def service(pod: Pod) -> dict[str, object]:
    ports = [
        {"name": "http", "port": HTTP_PORT, "targetPort": "http", "appProtocol": "http"},
        {"name": "grpc", "port": GRPC_PORT, "targetPort": "grpc", "appProtocol": "kubernetes.io/h2c"},
    ]
    return manifests.document(
        "v1", "Service", pod.metadata(), {"selector": _selector(pod)["matchLabels"], "ports": ports}
    )


def autoscaler(pod: Pod) -> dict[str, object]:
    """Up at once, by as much as there are or four; down slowly, since a queue is empty long before it is not needed."""
    options = pod.options
    target = {"type": "AverageValue", "averageValue": str(pod.target_waiting)}
    spec = {
        "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": options.name},
        "minReplicas": options.replicas,
        "maxReplicas": options.max_replicas,
        "metrics": [{"type": "Pods", "pods": {"metric": {"name": pods.QUEUE_METRIC}, "target": target}}],
        "behavior": {
            "scaleUp": {
                "stabilizationWindowSeconds": 0,
                "policies": [
                    {"type": "Percent", "value": 100, "periodSeconds": 15},
                    {"type": "Pods", "value": 4, "periodSeconds": 15},
                ],
            },
            "scaleDown": {
                "stabilizationWindowSeconds": 300,
                "policies": [{"type": "Percent", "value": 10, "periodSeconds": 60}],
            },
        },
    }
    return manifests.document("autoscaling/v2", "HorizontalPodAutoscaler", pod.metadata(), spec)


def disruption(pod: Pod) -> dict[str, object]:
    """A tenth of the pods at a time, rounded up: nodes can always be emptied."""
    spec = {
        "maxUnavailable": "10%",
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
        "selector": _selector(pod),
    }
    return manifests.document("policy/v1", "PodDisruptionBudget", pod.metadata(), spec)


def adapter_rules() -> dict[str, object]:
    """Values for prometheus-adapter's chart: the queue of a pod, over a minute, since it changes all the time."""
    rule = {
        "seriesQuery": f'{pods.QUEUE_METRIC}{{namespace!="",pod!=""}}',
        "resources": {"overrides": {"namespace": {"resource": "namespace"}, "pod": {"resource": "pod"}}},
        "name": {"matches": f"^{pods.QUEUE_METRIC}$", "as": pods.QUEUE_METRIC},
        "metricsQuery": "sum(avg_over_time(<<.Series>>{<<.LabelMatchers>>}[1m])) by (<<.GroupBy>>)",
    }
    return {"rules": {"custom": [rule]}}


def _selector(pod: Pod) -> dict[str, dict[str, object]]:
    """What never changes: a Deployment's selector cannot."""
    return {"matchLabels": {"app.kubernetes.io/name": pod.options.name}}


def _readme(pod: Pod, image: str, delivery: Delivery) -> str:
    options = pod.options
    where = f" -n {options.namespace}" if options.namespace else ""
    if delivery.volume_claim:
        bring = f"""The claim `{delivery.volume_claim}` holds the bundle under `{options.name}/`, readable for user
10001, and many nodes may mount it at once (`ReadOnlyMany` or `ReadWriteMany`). After a new bundle was put there, write
the manifests again: its hash changes, and pods are replaced.
"""
    else:
        bring = f"""{manifests.building(image)}
Another bundle has another tag, so that applying its manifests replaces the pods one after the other.
"""
    scaled = f"""
## Scaling

Between {options.replicas} and {options.max_replicas} pods, more where each has over {pod.target_waiting} requests \
waiting: that is {1e3 * options.target_wait_s:g} ms of
the {pod.per_second:.0f} sentences a second that the benchmark measured on {pod.timed_on}. The cluster needs

- Prometheus that scrapes annotated pods and labels what it finds with `namespace` and `pod`;
- prometheus-adapter with the rule in `prometheus-adapter.yaml` (values of its Helm chart), which offers
  `{pods.QUEUE_METRIC}` as a metric of pods. To see it:
  `kubectl get --raw "/apis/custom.metrics.k8s.io/v1beta1/namespaces/NAMESPACE/pods/*/{pods.QUEUE_METRIC}"`
"""
    keys = f"""
## Keys

`kubectl create secret generic {options.keys_secret}{where} --from-file=api-keys=FILE`, a key a line. `/metrics` asks
for one too: give your Prometheus one (`authorization` in its scrape configuration).
"""
    open_door = """
## Keys

None are asked for: whoever reaches the Service may ask, and load and unload its models. `--keys-secret` changes that.
"""
    return f"""# {options.name} on Kubernetes

Written by hasten for bundle `{pod.digest[:12]}`, variant `{pod.entry.name}`. Needs Kubernetes 1.30 or newer.

{bring}
```
kubectl apply -k .
kubectl rollout status deployment/{options.name}{where}
```

The model goes by `{options.name}`: `POST http://{options.name}:{HTTP_PORT}/v2/models/{options.name}/infer`, \
`POST /predict`, gRPC on {GRPC_PORT}.
gRPC keeps its connection: clients balance themselves, or a mesh does.

## Size

{pod.size} for each pod: the cores it was timed on (or `--threads` × `--instances`), and the peak
that was measured, for each session, with room for the bodies of requests. Every pod runs `{pod.entry.name}`; on a node
that cannot, it does not become ready, and its log says why.
{pod.about_gpus()}{scaled if options.is_scaled else ""}{keys if options.keys_secret else open_door}
## Stopping

A pod that is to go is sent requests for up to {pods.LINGER_S} s more, then answers what it took for up to \
{options.drain_s:g} s: {options.grace_s} s at most.
"""

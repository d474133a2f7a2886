"""Write the manifests of a Deployment that is scaled by its queue, ready for `kubectl apply -k`."""

from __future__ import annotations

from pathlib import Path

from hasten.bundle import Bundle
from hasten.deploy import manifests, pods
from hasten.deploy.check_names import check_object
from hasten.deploy.manifests import Deployment, Manifest, build_instructions, dockerfile, manifest, to_yaml
from hasten.deploy.pod_options import LINGER_S, PodOptions
from hasten.deploy.pods import Pod
from hasten.server.settings import Settings

HTTP_PORT = Settings().port
GRPC_PORT = HTTP_PORT + 1


def write(
    bundle: Bundle, target: Path, options: PodOptions, volume_claim: str | None, *, force: bool = False
) -> Deployment:
    """Write all manifests atomically; the bundle is in the image, or under the model's name in the volume claim."""
    if volume_claim is not None:
        check_object("--volume-claim", volume_claim)
    pod = Pod.of(bundle, options)
    pod.check_gpus()
    image = pod.image(has_bundle=volume_claim is None)
    files: dict[str, Manifest | str] = {
        "deployment.yaml": deployment(pod, image, volume_claim),
        "service.yaml": service(pod),
        "disruption.yaml": disruption(pod),
    }
    if options.is_scaled:
        files["autoscaler.yaml"] = autoscaler(pod)
        files["prometheus-adapter.yaml"] = to_yaml(adapter_rules())
    if volume_claim is None:
        files["Dockerfile"] = dockerfile(pod, image)
    files["README.md"] = _readme(pod, image, volume_claim)
    return manifests.write(target, pod, image, pod.scaling_rule, files, force=force)


def deployment(pod: Pod, image: str, volume_claim: str | None) -> Manifest:
    """Return the Deployment."""
    options = pod.options
    selector = _selector(pod)
    # An autoscaler sets the number of replicas: applying the manifest again must not reset it.
    replicas = {} if options.is_scaled else {"replicas": options.replicas}
    spec = {
        **replicas,
        "selector": selector,
        # New pods start before old ones stop.
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": "25%", "maxUnavailable": 0}},
        "template": {
            "metadata": {"labels": pod.labels(), "annotations": pod.annotations(HTTP_PORT)},
            "spec": {
                **pod.scheduling(selector["matchLabels"]),
                "automountServiceAccountToken": False,
                "containers": [_container(pod, image, volume_claim)],
                "volumes": [*_bundle_volume(volume_claim), *pods.VOLUMES],
            },
        },
    }
    return manifest("apps/v1", "Deployment", pod.metadata(), spec)


def _container(pod: Pod, image: str, volume_claim: str | None) -> Manifest:
    bundle = [{"name": "models", "mountPath": pods.MODELS, "readOnly": True}] if volume_claim else []
    return {
        "name": "hasten",
        "image": image,
        "args": [f"{pods.MODELS}/{pod.options.name}"],
        "env": [*pods.listen_variables(HTTP_PORT, GRPC_PORT), *pod.environment()],
        "ports": [{"name": "http", "containerPort": HTTP_PORT}, {"name": "grpc", "containerPort": GRPC_PORT}],
        "resources": pod.resources(),
        **pod.probes(HTTP_PORT),
        **pods.PRE_STOP,
        "securityContext": pods.security_context(),
        "volumeMounts": [*bundle, *pods.VOLUME_MOUNTS],
    }


def _bundle_volume(volume_claim: str | None) -> list[object]:
    claim = volume_claim
    return [{"name": "models", "persistentVolumeClaim": {"claimName": claim, "readOnly": True}}] if claim else []


def service(pod: Pod) -> Manifest:
    """Return the Service."""
    ports = [
        {"name": "http", "port": HTTP_PORT, "targetPort": "http", "appProtocol": "http"},
        {"name": "grpc", "port": GRPC_PORT, "targetPort": "grpc", "appProtocol": "kubernetes.io/h2c"},
    ]
    return manifest("v1", "Service", pod.metadata(), {"selector": _selector(pod)["matchLabels"], "ports": ports})


def autoscaler(pod: Pod) -> Manifest:
    """Return the autoscaler: fast up, by 100 % or four pods; slowly down, as pods with an empty queue may be busy."""
    options = pod.options
    target = {"type": "AverageValue", "averageValue": str(pod.target_queue_size)}
    spec = {
        "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": options.name},
        "minReplicas": options.replicas,
        "maxReplicas": options.replica_limit,
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
    return manifest("autoscaling/v2", "HorizontalPodAutoscaler", pod.metadata(), spec)


def disruption(pod: Pod) -> Manifest:
    """Return the disruption budget: a tenth of the pods, rounded up, so that nodes can always be drained."""
    spec = {
        "maxUnavailable": "10%",
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
        "selector": _selector(pod),
    }
    return manifest("policy/v1", "PodDisruptionBudget", pod.metadata(), spec)


def adapter_rules() -> Manifest:
    """Return values for prometheus-adapter's chart: a pod's queue size, averaged over a minute."""
    rule = {
        "seriesQuery": f'{pods.QUEUE_METRIC}{{namespace!="",pod!=""}}',
        "resources": {"overrides": {"namespace": {"resource": "namespace"}, "pod": {"resource": "pod"}}},
        "name": {"matches": f"^{pods.QUEUE_METRIC}$", "as": pods.QUEUE_METRIC},
        "metricsQuery": "sum(avg_over_time(<<.Series>>{<<.LabelMatchers>>}[1m])) by (<<.GroupBy>>)",
    }
    return {"rules": {"custom": [rule]}}


def _selector(pod: Pod) -> dict[str, dict[str, object]]:
    """Return the selector, of constant labels only: the selector of a Deployment is immutable."""
    return {"matchLabels": {"app.kubernetes.io/name": pod.options.name}}


def _readme(pod: Pod, image: str, volume_claim: str | None) -> str:
    options = pod.options
    namespace = f" -n {options.namespace}" if options.namespace else ""
    if volume_claim:
        delivery_notes = f"""The claim `{volume_claim}` must contain the bundle in `{options.name}/`, readable
for user 10001, and allow several nodes to mount it (`ReadOnlyMany` or `ReadWriteMany`). After replacing the bundle,
write the manifests again: its hash changes, so that pods are replaced.
"""
    else:
        delivery_notes = f"""{build_instructions(image)}
Each bundle has its own tag, so that applying the manifests of another bundle replaces the pods by a rolling update.
"""
    device = "a GPU" if pod.gpus else pods.pluralize(pod.cores, "core")
    scaling = f"""
## Scaling

Between {options.replicas} and {options.replica_limit} pods: more are started when over {pod.target_queue_size} \
requests per pod are queued,
the number processed in {1e3 * options.target_wait_s:g} ms at the {pod.rows_per_s:.0f} sequences/s that the benchmark \
measured on {device}. The cluster needs

- Prometheus that scrapes annotated pods and adds the labels `namespace` and `pod`;
- prometheus-adapter with the rule in `prometheus-adapter.yaml` (values of its Helm chart), which provides
  `{pods.QUEUE_METRIC}` as a metric of pods. To read it:
  `kubectl get --raw "/apis/custom.metrics.k8s.io/v1beta1/namespaces/NAMESPACE/pods/*/{pods.QUEUE_METRIC}"`
"""
    keys = f"""
## Keys

`kubectl create secret generic {options.keys_secret}{namespace} --from-file=api-keys=FILE`, with a key per line.
`/metrics` requires a key, too: configure one in Prometheus (`authorization` in its scrape configuration).
"""
    no_keys = """
## Keys

No API keys are required: every client that reaches the Service can send requests, and load and unload its models. Use
`--keys-secret` to require keys.
"""
    return f"""# {options.name} on Kubernetes

Written by hasten for bundle `{pod.digest[:12]}`, variant `{pod.entry.name}`. Needs Kubernetes 1.30 or newer.

{delivery_notes}
```
kubectl apply -k .
kubectl rollout status deployment/{options.name}{namespace}
```

The model is named `{options.name}`: `POST http://{options.name}:{HTTP_PORT}/v2/models/{options.name}/infer`, \
`POST /predict`, gRPC on {GRPC_PORT}.
gRPC keeps its connection open: balance the load in the clients or with a service mesh.

## Size

{pod.size} per pod: the cores of the benchmark (or `--threads` × `--instances`), and for each session the
measured peak memory, plus room for request bodies. Every pod runs `{pod.entry.name}`; on a node that cannot run it, a
pod does not become ready, and its log gives the reason.
{pod.gpu_notes()}{scaling if options.is_scaled else ""}{keys if options.keys_secret else no_keys}
## Stopping

A terminating pod accepts requests for {LINGER_S} s more, then has up to {options.drain_timeout_s:g} s to answer the \
accepted ones: {options.grace_s} s at most.
"""

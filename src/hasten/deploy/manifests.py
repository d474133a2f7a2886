"""Manifests as files: the YAML, what binds them together, the image they run, and all of it written at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hasten.core.errors import missing_package, translate_os_errors
from hasten.deploy import written
from hasten.deploy.pods import MODELS, USER, Pod


def dockerfile(pod: Pod, image: str) -> str:
    name, made_by = pod.options.name, "make image GPU=1" if pod.gpus else "make image"
    return f"""# The server with the bundle inside: docker build --file Dockerfile --tag {image} BUNDLE
# BUNDLE is the bundle's directory, BASE what `{made_by}` of hasten builds.
ARG BASE={pod.server_image}
FROM ${{BASE}}
COPY --chown={USER}:{USER} . {MODELS}/{name}
CMD ["{MODELS}/{name}"]
"""


def document(version: str, kind: str, metadata: Mapping[str, object], spec: Mapping[str, object]) -> dict[str, object]:
    return {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec}


def kustomization(resources: Sequence[str]) -> dict[str, object]:
    """Without a namespace: each says its own, and Kustomize would give one to what belongs to the whole cluster."""
    about = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization"}
    return {**about, "resources": list(resources)}


def building(image: str) -> str:
    return f"""```
docker build --file Dockerfile --tag {image} BUNDLE    # the bundle's directory
docker push {image}    # where your nodes do not build images themselves
```
"""


def to_yaml(document: Mapping[str, object]) -> str:
    try:
        import yaml
    except ImportError as error:
        raise missing_package("pyyaml", "writing manifests", "deploy") from error

    class Plain(yaml.SafeDumper):
        """Says twice what stands twice, instead of pointing from one place to the other."""

        def ignore_aliases(self, data: object) -> bool:
            return True

    text: str = yaml.dump(document, Dumper=Plain, sort_keys=False, allow_unicode=True, width=120)
    return text


@dataclass(frozen=True, slots=True)
class Deployment:
    """What was written, and what it asks of a cluster."""

    path: Path
    files: tuple[str, ...]
    name: str
    # None where the runtime brings its own.
    image: str | None
    variant: str
    cores: int
    memory_bytes: int
    gpus: int
    # None where the number of pods is fixed.
    scales_by: str | None

    @classmethod
    def of(cls, pod: Pod, target: Path, files: Mapping[str, str], image: str | None, scales_by: str) -> Deployment:
        options = pod.options
        scaling = scales_by if options.is_scaled else None
        size = (pod.cores, pod.memory_bytes, pod.gpus)
        return cls(target, tuple(files), options.name, image, pod.entry.name, *size, scaling)


def write(target: Path, files: Mapping[str, str], *, force: bool) -> None:
    with written(target, force=force) as staging:
        with translate_os_errors(f"writing {target}"):
            for name, text in files.items():
                (staging.path / name).write_text(text, encoding="utf-8")
        staging.put_in_place()

"""Write manifests: their YAML, the Kustomization, and the Dockerfile of the image that they run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hasten.core.errors import missing_package, translate_os_errors
from hasten.deploy import atomic_output
from hasten.deploy.pods import MODELS, USER, Pod

Manifest = Mapping[str, object]


def dockerfile(pod: Pod, image: str) -> str:
    """Return the Dockerfile of an image with the server and the bundle."""
    name, command = pod.options.name, "make image GPU=1" if pod.gpus else "make image"
    return f"""# The server with the bundle inside: docker build --file Dockerfile --tag {image} BUNDLE
# BUNDLE is the bundle's directory, BASE the image that hasten's `{command}` builds.
ARG BASE={pod.server_image}
FROM ${{BASE}}
COPY --chown={USER}:{USER} . {MODELS}/{name}
CMD ["{MODELS}/{name}"]
"""


def manifest(version: str, kind: str, metadata: Mapping[str, object], spec: Mapping[str, object]) -> Manifest:
    """Return a manifest."""
    return {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec}


def build_instructions(image: str) -> str:
    """Return the commands that build and push the image, as Markdown."""
    return f"""```
docker build --file Dockerfile --tag {image} BUNDLE    # the bundle's directory
docker push {image}    # unless your nodes build images themselves
```
"""


def to_yaml(document: Manifest) -> str:
    """Return the manifest as YAML."""
    try:
        import yaml
    except ImportError as error:
        raise missing_package("pyyaml", "writing manifests", "deploy") from error

    class Plain(yaml.SafeDumper):
        """Repeats equal values instead of writing aliases."""

        def ignore_aliases(self, data: object) -> bool:
            return True

    text: str = yaml.dump(document, Dumper=Plain, sort_keys=False, allow_unicode=True, width=120)
    return text


@dataclass(frozen=True, slots=True)
class Deployment:
    """The files that were written, and the resources that they request."""

    path: Path
    files: tuple[str, ...]
    name: str
    # None if the runtime has its own image.
    image: str | None
    variant: str
    cores: int
    memory_bytes: int
    gpus: int
    # None if the number of pods is fixed.
    scales_by: str | None


def write(
    target: Path, pod: Pod, image: str | None, scaling_rule: str, files: Mapping[str, Manifest | str], *, force: bool
) -> Deployment:
    """Write the files atomically; the manifests come first, and a Kustomization lists them."""
    resources = [name for name, content in files.items() if not isinstance(content, str)]
    # Without a namespace, which Kustomize would also set on resources of the whole cluster.
    header = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization"}
    contents = {name: files[name] for name in resources}
    contents |= {"kustomization.yaml": {**header, "resources": resources}, **files}
    with atomic_output(target, force=force) as staging:
        with translate_os_errors(f"writing {target}"):
            for name, content in contents.items():
                text = content if isinstance(content, str) else to_yaml(content)
                (staging.path / name).write_text(text, encoding="utf-8")
        staging.put_in_place()
    return Deployment(
        path=target,
        files=tuple(contents),
        name=pod.options.name,
        image=image,
        variant=pod.entry.name,
        cores=pod.cores,
        memory_bytes=pod.memory_bytes,
        gpus=pod.gpus,
        scales_by=scaling_rule if pod.options.is_scaled else None,
    )

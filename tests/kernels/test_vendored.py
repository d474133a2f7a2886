"""A tritonserver repository contains the fused kernels, and its model answers like the original."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import safetensors

from hasten.backends import Artifact, RunOptions
from hasten.backends.fused import BACKEND
from hasten.backends.fused.session import FusedSession
from hasten.backends.torch import ModuleSession
from hasten.core.plan import Plan
from hasten.core.tensors import Batch, Signature
from hasten.core.variant import Variant
from hasten.deploy.tritonserver import Options, Repository, Runtime, write_models
from hasten.deploy.tritonserver.models import run
from support.fakes.engine_bundle import with_variant
from support.fakes.triton_backend import stub
from support.models.fused_encoders import DEVICE, open_session

VARIANT = Variant.parse("fused-fp16@cuda")


@pytest.fixture(scope="module")
def loaded(tiny_classifier: Any) -> Any:
    from hasten.builder.sources.locate import find_model
    from hasten.builder.sources.pytorch_model import load_model

    plan = Plan(model=str(tiny_classifier("bert")))
    return load_model(find_model(plan), plan)


@pytest.fixture(scope="module")
def repository(
    loaded: Any, tiny_classifier: Any, quick_build: Any, tmp_path_factory: pytest.TempPathFactory
) -> Repository:
    folder = tmp_path_factory.mktemp("fused")
    (folder / "made").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FusedSession, "tune", lambda *_: None)
        artifact = BACKEND.make(loaded.source, VARIANT, folder / "made")
    bundle = quick_build(tiny_classifier("bert"), variants=["onnxruntime-fp32"], batch_size=(1, 2, 4))
    files = {file.name: file.read_bytes() for file in (artifact.path(), folder / "made" / "fused.json")}
    directory = tmp_path_factory.mktemp("models")
    return write_models(with_variant(bundle, folder, VARIANT, files), directory, Options(runtime=Runtime.PYTHON))


def rows(request: stub.Request, signature: Signature) -> Batch:
    mask = request.inputs["attention_mask"] != 0
    names = [spec.name for spec in signature.inputs if spec.name != "attention_mask"]
    return Batch(
        {name: request.inputs[name][mask].astype(np.int32) for name in names}, mask.sum(axis=1).astype(np.int32)
    )


def test_vendored_model_matches_original(repository: Repository, loaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All requests run in one batch, whatever their lengths; on the CPU through Triton's interpreter."""
    if DEVICE == "cpu":
        monkeypatch.setattr(type(BACKEND), "open", lambda _, artifact, __: open_session(artifact))
    warm_up_sizes: list[tuple[int, int]] = []
    samples, batch_sizes = FusedSession.samples, []
    compute = FusedSession.run
    # Two of the sizes: all of them take the interpreter minutes.
    monkeypatch.setattr(
        FusedSession, "samples", lambda session, *sizes: warm_up_sizes.append(sizes) or samples(session, *sizes)[:2]
    )
    monkeypatch.setattr(
        FusedSession, "run", lambda session, batch: batch_sizes.append(len(batch)) or compute(session, batch)
    )
    reference = ModuleSession(
        loaded.module, Artifact(VARIANT, loaded.signature, repository.directory, {}), RunOptions(1)
    )
    requests = [stub.ask(*lengths, names=repository.tokens, outputs=("logits",)) for lengths in ((2, 30), (9,))]
    with stub.running(repository.directory / repository.model) as model:
        assert batch_sizes == [1, 1]
        answers = model.execute(requests)
    assert batch_sizes == [1, 1, 3]
    assert warm_up_sizes == [(run._TOKENS, repository.max_rows)]
    for request, answer in zip(requests, answers, strict=True):
        expected = reference.run(rows(request, loaded.signature))["logits"]
        assert answer.error is None
        # Computed in half precision on a GPU; on the CPU the weights are rounded to it.
        np.testing.assert_allclose(answer.outputs["logits"], expected, atol=2e-2)


def test_vendored_modules_are_complete(repository: Repository) -> None:
    folder = repository.directory / repository.model / "1"
    files = (folder / "hasten" / "kernels").rglob("[a-z]*.py")
    kernels = [".".join(file.relative_to(folder).with_suffix("").parts) for file in files]
    names = ["hasten.backends.fused", "hasten.deploy.tritonserver.models.run", *sorted(kernels)]
    # Third-party packages may be on a path that an isolated interpreter does not have.
    third_party = sorted({str(Path(module.__file__).parents[1]) for module in (msgspec, np, safetensors)})
    program = (
        f"import importlib, sys; sys.path[:] = [{str(folder)!r}, *sys.path, *{third_party}]\n"
        f"files = {{importlib.import_module(name).__file__ for name in {names}}}\n"
        f"assert all(file.startswith({str(folder)!r}) for file in files), files\n"
        "assert 'transformers' not in sys.modules"
    )
    result = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert len(kernels) > 10

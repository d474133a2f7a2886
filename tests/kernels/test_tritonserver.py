"""The fused kernels in a repository for tritonserver: the files that were shipped, and the model asked as it asks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import safetensors

from encoders import DEVICE, opened
from engines import with_variant
from hasten.backends import Artifact, RunOptions
from hasten.backends.fused import BACKEND
from hasten.backends.fused.session import FusedSession
from hasten.backends.torch import ModuleSession
from hasten.core.plan import Plan
from hasten.core.tensors import Batch, Signature
from hasten.core.variant import Variant
from hasten.deploy.tritonserver import Options, Repository, Runtime, write_models
from hasten.deploy.tritonserver.models import run
from tritonserver import stub

VARIANT = Variant.parse("fused-fp16@cuda")


@pytest.fixture(scope="module")
def loaded(tiny_classifier: Any) -> Any:
    from hasten.builder.load import load_model
    from hasten.builder.source import find_model

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
    place = tmp_path_factory.mktemp("models")
    return write_models(with_variant(bundle, folder, VARIANT, files), place, Options(runtime=Runtime.PYTHON))


def rows(request: stub.Request, signature: Signature) -> Batch:
    mask = request.inputs["attention_mask"] != 0
    names = [spec.name for spec in signature.inputs if spec.name != "attention_mask"]
    return Batch(
        {name: request.inputs[name][mask].astype(np.int32) for name in names}, mask.sum(axis=1).astype(np.int32)
    )


def test_it_answers_like_the_original(repository: Repository, loaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All requests in one batch, whatever their lengths; here through Triton's interpreter."""
    if DEVICE == "cpu":
        monkeypatch.setattr(type(BACKEND), "open", lambda _, artifact, __: opened(artifact))
    made_ready: list[tuple[int, int]] = []
    offered, ran = FusedSession.samples, []
    compute = FusedSession.run
    # Two of the sizes: through the interpreter all of them take minutes.
    monkeypatch.setattr(
        FusedSession, "samples", lambda own, *sizes: made_ready.append(sizes) or offered(own, *sizes)[:2]
    )
    monkeypatch.setattr(FusedSession, "run", lambda own, batch: ran.append(len(batch)) or compute(own, batch))
    theirs = ModuleSession(loaded.module, Artifact(VARIANT, loaded.signature, repository.directory, {}), RunOptions(1))
    asked = [stub.ask(*lengths, names=repository.tokens, outputs=("logits",)) for lengths in ((2, 30), (9,))]
    with stub.running(repository.directory / repository.model) as model:
        assert ran == [1, 1]
        answers = model.execute(asked)
    assert ran == [1, 1, 3]
    assert made_ready == [(run._TOKENS, repository.max_rows)]
    for request, answer in zip(asked, answers, strict=True):
        expected = theirs.run(rows(request, loaded.signature))["logits"]
        assert answer.error is None
        # In half precision on a GPU; its weights are so here, too.
        np.testing.assert_allclose(answer.outputs["logits"], expected, atol=2e-2)


def test_nothing_of_ours_is_missing(repository: Repository) -> None:
    folder = repository.directory / repository.model / "1"
    kernels = [f"hasten.kernels.{file.stem}" for file in (folder / "hasten" / "kernels").glob("[a-z]*.py")]
    names = ["hasten.backends.fused", "hasten.deploy.tritonserver.models.run", *sorted(kernels)]
    # What others wrote may lie on a path that an isolated interpreter does not know of.
    others = sorted({str(Path(module.__file__).parents[1]) for module in (msgspec, np, safetensors)})
    program = (
        f"import importlib, sys; sys.path[:] = [{str(folder)!r}, *sys.path, *{others}]\n"
        f"files = {{importlib.import_module(name).__file__ for name in {names}}}\n"
        f"assert all(file.startswith({str(folder)!r}) for file in files), files\n"
        "assert 'transformers' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(kernels) > 10

"""Test the search for lower precision: candidates, verdicts, recipes and budgets."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest

import hasten
from hasten.builder.search.select import pareto_front
from hasten.bundle import Bundle
from hasten.bundle.manifest import sha256
from hasten.cli import main
from hasten.core.errors import AccuracyError, PlanError, UnsupportedError
from hasten.core.report import Status
from hasten.quantize.recipe import FILE, Method, Recipe, read_recipe

REFINED = "onnxruntime-int8+attention+smooth+split"


@pytest.fixture(scope="module")
def searched(tiny_model: Any, quick_build: Any) -> Bundle:
    """Build with every variant that the search tries on this machine, without a gate."""
    model = tiny_model("bert", "ForSequenceClassification")
    return quick_build(model, data=None, keep="all", min_agreement=0.0, bench_budget_s=0.5)


@pytest.fixture(scope="module")
def named(tiny_model: Any, quick_build: Any) -> Bundle:
    """Build variants that no search tries."""
    variants = ["onnxruntime-int8+blocks", "onnxruntime-int8+minmax"]
    model = tiny_model("bert", "ForSequenceClassification")
    return quick_build(model, data=None, keep="all", min_agreement=0.0, bench_budget_s=0.5, variants=variants)


def graph_of(bundle: Bundle, name: str) -> Path:
    return bundle.artifact(bundle.entry(name)).path()


def test_search_tries_all_modifiers(searched: Bundle) -> None:
    tried = {candidate.variant: candidate for candidate in searched.report.candidates}
    for name in ("onnxruntime-int8", REFINED, f"{REFINED}+tanhgelu"):
        assert tried[name].status in (Status.ELIGIBLE, Status.CHOSEN), tried[name].reason
    assert {entry.name for entry in searched.manifest.variants} <= set(tried)
    assert searched.report.pareto_front
    notes = {stage.name: stage.notes for stage in searched.report.stages}
    assert any("set aside for calibration" in note for note in notes["reference"])


def test_dynamic_int8_is_judged_at_every_batch_size(searched: Bundle, named: Bundle) -> None:
    candidates = (*searched.report.candidates, *named.report.candidates)
    verdicts = {candidate.variant: candidate.verdict for candidate in candidates}
    assert [at.size for at in verdicts[REFINED].by_batch] == [1, 8, 32]
    assert verdicts["onnxruntime-int8+minmax"].by_batch == ()
    assert searched.entry(REFINED).depends_on_batch
    assert not named.entry("onnxruntime-int8+blocks").depends_on_batch


def test_every_quantized_variant_runs(searched: Bundle, named: Bundle) -> None:
    for bundle in (searched, named):
        for entry in bundle.manifest.variants:
            with hasten.load(bundle.path, entry.name, threads=1) as predict:
                assert [set(answer) for answer in predict(["one answer", "another"])] == [{"label", "score"}] * 2


@pytest.mark.parametrize("name", [f"{REFINED}+tanhgelu", "onnxruntime-int8+minmax", "onnxruntime-int4+blocks"])
def test_recipe_reproduces_the_graph(searched: Bundle, name: str, quick_build: Any, texts_file: Path) -> None:
    """Bit for bit, and without calibration rows."""
    model = Path(searched.manifest.model.id)
    is_searched = name in [entry.name for entry in searched.manifest.variants]
    first = searched if is_searched else quick_build(model, variants=[name], data=None, min_agreement=0.0)
    recipe = first.path / "variants" / name / FILE
    again = quick_build(model, recipe=recipe, min_agreement=0.0)
    assert [entry.name for entry in again.manifest.variants] == [name]
    assert sha256(graph_of(again, name)) == sha256(graph_of(first, name))
    assert read_recipe(again.path / "variants" / name / FILE) == read_recipe(recipe)
    # So no rows are set aside for calibration.
    assert again.chosen.agreement.rows == len(texts_file.read_text().splitlines())


@pytest.mark.slow
def test_nncf_recipe_needs_the_calibration_rows(searched: Bundle, quick_build: Any) -> None:
    if "openvino-int8" not in {entry.name for entry in searched.manifest.variants}:
        pytest.skip("openvino-int8 was not made here")
    recipe = searched.path / "variants" / "openvino-int8" / FILE
    model = Path(searched.manifest.model.id)
    with pytest.raises(PlanError, match="calibrated on other rows"):
        quick_build(model, recipe=recipe, min_agreement=0.0)
    again = quick_build(model, recipe=recipe, data=None, min_agreement=0.0)
    weights = graph_of(again, "openvino-int8").with_suffix(".bin")
    assert sha256(weights) == sha256(graph_of(searched, "openvino-int8").with_suffix(".bin"))


def test_recipe_of_another_model_is_rejected(tiny_model: Any, quick_build: Any, tmp_path: Path) -> None:
    recipe = Recipe(variant="onnxruntime-int8+keep1", method=Method.DYNAMIC, target="amx", keep=("/no/such/MatMul",))
    recipe.write(tmp_path / FILE)
    with pytest.raises(PlanError, match="/no/such/MatMul in float, which the graph does not have"):
        quick_build(tiny_model("distilbert", "ForSequenceClassification"), recipe=tmp_path / FILE, min_agreement=0.0)


def test_named_variant_keeps_matmuls_in_float(tiny_model: Any, quick_build: Any) -> None:
    model = tiny_model("roberta", "ForSequenceClassification")
    bundle = quick_build(model, variants=["onnxruntime-int8+attention+keep3"], min_agreement=0.0)
    recipe = read_recipe(bundle.path / "variants" / bundle.chosen.name / FILE)
    assert len(recipe.keep) == 3
    with pytest.raises(PlanError, match=r"\+keep500 would leave nothing to quantize: there are \d+"):
        quick_build(model, variants=["onnxruntime-int8+keep500"], min_agreement=0.0)


def test_failed_gate_prints_the_numbers_and_leaves_no_bundle(
    tiny_embedder: Any, no_leftovers: Path, tmp_path: Path, corpus: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    texts_file = tmp_path / "texts.jsonl"
    texts_file.write_text("".join(json.dumps({"text": text}) + "\n" for text in corpus))
    command = ["build", str(tiny_embedder()), "-o", str(no_leftovers)]
    options = [
        "--variants",
        "onnxruntime-int4+blocks",
        "--data",
        str(texts_file),
        "--min-agreement",
        "1",
        "--threads",
        "1",
    ]
    code = main([*command, *options])
    printed = capsys.readouterr()
    assert code == AccuracyError.exit_code
    assert "onnxruntime-int4+blocks" in printed.out + printed.err


def test_further_variants_are_skipped_when_the_budget_is_spent(tiny_model: Any, quick_build: Any) -> None:
    bundle = quick_build(tiny_model("bert", "ForSequenceClassification"), search_budget_s=1e-6)
    skipped = [candidate for candidate in bundle.report.candidates if candidate.status is Status.SKIPPED]
    assert REFINED in {candidate.variant for candidate in skipped}
    assert "--search-budget" in skipped[0].reason


def test_full_disk_fails_one_variant_and_not_the_build(
    tiny_model: Any, quick_build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of failed variants and of variants that are not stored are removed early."""
    written: list[Path] = []
    folders: set[str] = set()

    def fill(_: Path, file: Path, *__: object, **___: object) -> None:
        file.write_bytes(b"half of it")
        written.append(file)
        raise OSError(errno.ENOSPC, "No space left on device")

    def list_folders(*arguments: Any) -> Any:
        """Record the state before the bundle is written and the working directory removed."""
        folders.update(entry.name for entry in written[0].parent.parent.iterdir())
        return pareto_front(*arguments)

    monkeypatch.setattr("hasten.builder.search.variant_builder.make_graph", fill)
    monkeypatch.setattr("hasten.builder.pipeline.pareto_front", list_folders)
    bundle = quick_build(tiny_model("bert", "ForSequenceClassification"), search_budget_s=1e-6)
    candidates = {candidate.variant: candidate for candidate in bundle.report.candidates}
    assert candidates["onnxruntime-int8"].status is Status.FAILED
    assert candidates["onnxruntime-int8"].reason.startswith("the disk is full: making onnxruntime-int8 in ")
    stored = {entry.name for entry in bundle.manifest.variants}
    assert "onnxruntime-fp32" in stored
    assert written[0].parent.name not in folders
    tried = {name for name, candidate in candidates.items() if candidate.status is not Status.UNAVAILABLE}
    assert tried & folders == stored


def test_recipe_is_made_for_its_own_target(searched: Bundle, quick_build: Any, tmp_path: Path) -> None:
    """On any machine: int8 made for a CPU whose sums saturate runs everywhere."""
    name, model = "onnxruntime-int8", Path(searched.manifest.model.id)
    Recipe(variant=name, method=Method.DYNAMIC, target="avx2", reduce_range=True).write(tmp_path / FILE)
    assert quick_build(model, recipe=tmp_path / FILE, min_agreement=0.0).chosen.instructions == ()
    Recipe(variant=name, method=Method.DYNAMIC, target="avx512_vnni").write(tmp_path / FILE)
    assert "avx512_vnni" in quick_build(model, recipe=tmp_path / FILE, min_agreement=0.0).chosen.instructions
    with pytest.raises(PlanError, match="--target avx2 contradicts the recipe, which is for avx512_vnni"):
        quick_build(model, recipe=tmp_path / FILE, target="avx2")


def test_openvino_int8_needs_the_instructions_of_its_target(searched: Bundle) -> None:
    """Its weights are limited to 7 bits only if the target's sums saturate."""
    entries = {entry.name: entry for entry in searched.manifest.variants}
    if "openvino-int8" not in entries:
        pytest.skip("openvino-int8 was not made here")
    assert entries["openvino-int8"].instructions == entries[REFINED].instructions


def test_search_with_few_rows_skips_calibrated_variants(tiny_model: Any, quick_build: Any, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "one"}\n{"text": "another"}\n')
    bundle = quick_build(tiny_model("bert", "ForSequenceClassification"), data=rows, min_agreement=0.0)
    candidates = {candidate.variant: candidate for candidate in bundle.report.candidates}
    assert candidates["onnxruntime-int8+attention"].status in (Status.ELIGIBLE, Status.CHOSEN)
    assert candidates[REFINED].status is Status.SKIPPED
    assert candidates[REFINED].reason == "not tried: 2 rows are too few to set some aside for calibration"


def test_missing_package_is_rejected_before_the_weights_are_read(
    tiny_model: Any, quick_build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hasten.builder.search.search.find_spec", lambda _: None)
    monkeypatch.setattr("hasten.builder.encoder_build.load_model", lambda *_: pytest.fail("the weights were read"))
    with pytest.raises(UnsupportedError, match="openvino-int8 needs the package 'nncf'") as caught:
        quick_build(tiny_model("bert", "ForSequenceClassification"), variants=["openvino-int8"])
    assert caught.value.hint == "pip install 'hasten[nncf]'"

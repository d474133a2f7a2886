"""From one command to a variant of lower precision: found, judged, written down and made again."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest

import hasten
from hasten.builder.choose import front
from hasten.bundle import Bundle
from hasten.bundle.manifest import sha256
from hasten.cli import main
from hasten.core.errors import AccuracyError, PlanError, UnsupportedError
from hasten.core.report import Status
from hasten.quantize.recipe import FILE, Method, Recipe, read_recipe

MENDED = "onnxruntime-int8+attention+smooth+split"


@pytest.fixture(scope="module")
def searched(tiny_model: Any, quick_build: Any) -> Bundle:
    """Everything the search tries on this machine, whatever it answers."""
    model = tiny_model("bert", "ForSequenceClassification")
    return quick_build(model, data=None, keep="all", min_agreement=0.0, bench_budget_s=0.5)


def graph_of(bundle: Bundle, name: str) -> Path:
    return bundle.artifact(bundle.entry(name)).path()


def test_all_ways_are_tried(searched: Bundle) -> None:
    tried = {candidate.variant: candidate for candidate in searched.report.candidates}
    for name in ("onnxruntime-int8", MENDED, f"{MENDED}+gelu", "onnxruntime-int8+blocks", "onnxruntime-int8+minmax"):
        assert tried[name].status in (Status.ELIGIBLE, Status.CHOSEN), tried[name].reason
    assert {entry.name for entry in searched.manifest.variants} <= set(tried)
    assert searched.report.front
    notes = {stage.name: stage.notes for stage in searched.report.stages}
    assert any("set aside to calibrate on" in note for note in notes["reference"])


def test_dynamic_int8_is_judged_at_every_batch_size(searched: Bundle) -> None:
    verdicts = {candidate.variant: candidate.verdict for candidate in searched.report.candidates}
    assert [at.size for at in verdicts[MENDED].by_batch] == [1, 8, 32]
    assert verdicts["onnxruntime-int8+minmax"].by_batch == ()
    assert searched.entry(MENDED).depends_on_batch
    assert not searched.entry("onnxruntime-int8+blocks").depends_on_batch


def test_every_quantized_variant_answers(searched: Bundle) -> None:
    for entry in searched.manifest.variants:
        with hasten.load(searched.path, entry.name, threads=1) as predict:
            assert [set(answer) for answer in predict(["one answer", "another"])] == [{"label", "score"}] * 2


@pytest.mark.parametrize("name", [f"{MENDED}+gelu", "onnxruntime-int8+minmax", "onnxruntime-int4+blocks"])
def test_a_recipe_makes_the_same_graph_again(searched: Bundle, name: str, quick_build: Any, texts_file: Path) -> None:
    """To the last bit, and without the rows it was found on."""
    recipe = searched.path / "variants" / name / FILE
    again = quick_build(Path(searched.manifest.model.id), recipe=recipe, min_agreement=0.0)
    assert [entry.name for entry in again.manifest.variants] == [name]
    assert sha256(graph_of(again, name)) == sha256(graph_of(searched, name))
    assert read_recipe(again.path / "variants" / name / FILE) == read_recipe(recipe)
    # So none are set aside for it.
    assert again.chosen.agreement.rows == len(texts_file.read_text().splitlines())


@pytest.mark.slow
def test_nncf_needs_its_rows_again(searched: Bundle, quick_build: Any) -> None:
    if "openvino-int8" not in {entry.name for entry in searched.manifest.variants}:
        pytest.skip("openvino-int8 was not made here")
    recipe = searched.path / "variants" / "openvino-int8" / FILE
    model = Path(searched.manifest.model.id)
    with pytest.raises(PlanError, match="calibrated on other rows"):
        quick_build(model, recipe=recipe, min_agreement=0.0)
    again = quick_build(model, recipe=recipe, data=None, min_agreement=0.0)
    weights = graph_of(again, "openvino-int8").with_suffix(".bin")
    assert sha256(weights) == sha256(graph_of(searched, "openvino-int8").with_suffix(".bin"))


def test_a_recipe_that_does_not_fit_the_model_is_refused(tiny_model: Any, quick_build: Any, tmp_path: Path) -> None:
    recipe = Recipe(variant="onnxruntime-int8+keep1", method=Method.DYNAMIC, target="amx", keep=("/no/such/MatMul",))
    recipe.write(tmp_path / FILE)
    with pytest.raises(PlanError, match="/no/such/MatMul in float, which the graph does not have"):
        quick_build(tiny_model("distilbert", "ForSequenceClassification"), recipe=tmp_path / FILE, min_agreement=0.0)


def test_asked_for_by_name(tiny_model: Any, quick_build: Any) -> None:
    model = tiny_model("roberta", "ForSequenceClassification")
    bundle = quick_build(model, variants=["onnxruntime-int8+attention+keep3"], min_agreement=0.0)
    recipe = read_recipe(bundle.path / "variants" / bundle.chosen.name / FILE)
    assert len(recipe.keep) == 3
    with pytest.raises(PlanError, match=r"\+keep500 would leave nothing to quantize: there are \d+ products"):
        quick_build(model, variants=["onnxruntime-int8+keep500"], min_agreement=0.0)


def test_where_nothing_passes_the_numbers_are_told_and_no_bundle_is_left(
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


def test_without_time_the_rest_is_skipped(tiny_model: Any, quick_build: Any) -> None:
    bundle = quick_build(tiny_model("bert", "ForSequenceClassification"), budget_s=1e-6)
    skipped = [candidate for candidate in bundle.report.candidates if candidate.status is Status.SKIPPED]
    assert MENDED in {candidate.variant for candidate in skipped}
    assert "--budget" in skipped[0].reason


def test_a_disk_that_is_full_for_one_may_have_room_for_others(
    tiny_model: Any, quick_build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And it is emptied as soon as that is possible: of what did not work, and of what is not stored."""
    written: list[Path] = []
    folders: set[str] = set()

    def fill(_: Path, file: Path, *__: object, **___: object) -> None:
        file.write_bytes(b"half of it")
        written.append(file)
        raise OSError(errno.ENOSPC, "No space left on device")

    def look(*given: Any) -> Any:
        """Before the bundle is written, and all of it removed."""
        folders.update(entry.name for entry in written[0].parent.parent.iterdir())
        return front(*given)

    monkeypatch.setattr("hasten.builder.attempt.make_graph", fill)
    monkeypatch.setattr("hasten.builder.build.front", look)
    bundle = quick_build(tiny_model("bert", "ForSequenceClassification"), budget_s=1e-6)
    found = {candidate.variant: candidate for candidate in bundle.report.candidates}
    assert found["onnxruntime-int8"].status is Status.FAILED
    assert found["onnxruntime-int8"].reason.startswith("the disk is full: making onnxruntime-int8 in ")
    stored = {entry.name for entry in bundle.manifest.variants}
    assert "onnxruntime-fp32" in stored
    assert written[0].parent.name not in folders
    tried = {name for name, candidate in found.items() if candidate.status is not Status.UNAVAILABLE}
    assert tried & folders == stored


def test_a_recipe_is_for_the_target_it_says(searched: Bundle, quick_build: Any, tmp_path: Path) -> None:
    """Whatever machine repeats it: made for one that saturates, it runs anywhere."""
    name, model = "onnxruntime-int8", Path(searched.manifest.model.id)
    Recipe(variant=name, method=Method.DYNAMIC, target="avx2", reduce_range=True).write(tmp_path / FILE)
    assert quick_build(model, recipe=tmp_path / FILE, min_agreement=0.0).chosen.instructions == ()
    Recipe(variant=name, method=Method.DYNAMIC, target="avx512_vnni").write(tmp_path / FILE)
    assert "avx512_vnni" in quick_build(model, recipe=tmp_path / FILE, min_agreement=0.0).chosen.instructions
    with pytest.raises(PlanError, match="--target avx2 contradicts the recipe, which is for avx512_vnni"):
        quick_build(model, recipe=tmp_path / FILE, target="avx2")


def test_int8_for_openvino_says_what_it_needs_too(searched: Bundle) -> None:
    """Its weights keep to seven bits only where the target asks for it."""
    entries = {entry.name: entry for entry in searched.manifest.variants}
    if "openvino-int8" not in entries:
        pytest.skip("openvino-int8 was not made here")
    assert entries["openvino-int8"].instructions == entries[MENDED].instructions


def test_few_rows_are_searched_with_what_needs_none(tiny_model: Any, quick_build: Any, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "one"}\n{"text": "another"}\n')
    bundle = quick_build(tiny_model("bert", "ForSequenceClassification"), data=rows, min_agreement=0.0)
    found = {candidate.variant: candidate for candidate in bundle.report.candidates}
    assert found["onnxruntime-int8+attention"].status in (Status.ELIGIBLE, Status.CHOSEN)
    assert found[MENDED].status is Status.SKIPPED
    assert found[MENDED].reason == "not tried: of 2 rows none can be set aside to calibrate on"


def test_a_package_that_is_missing_is_told_before_the_work(
    tiny_model: Any, quick_build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hasten.builder.search.find_spec", lambda _: None)
    monkeypatch.setattr("hasten.builder.build.load_model", lambda *_: pytest.fail("the weights were read"))
    with pytest.raises(UnsupportedError, match="openvino-int8 needs the package 'nncf'") as caught:
        quick_build(tiny_model("bert", "ForSequenceClassification"), variants=["openvino-int8"])
    assert caught.value.hint == "pip install 'hasten[nncf]'"

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from hasten.bundle import Bundle, Manifest, open_bundle
from hasten.bundle.manifest import SCHEMA
from hasten.core.errors import BundleError
from hasten.core.plan import Gate
from hasten.core.variant import Precision, Variant

Edit = Callable[[dict], object]


def edit_json(bundle: Bundle, edit: Edit) -> None:
    """Change the manifest as a text editor would, without updating the digest."""
    file = bundle.path / "manifest.json"
    raw = json.loads(file.read_bytes())
    edit(raw)
    file.write_text(json.dumps(raw))


def open_chosen(path: Path) -> None:
    opened = open_bundle(path)
    opened.artifact(opened.chosen)


def check_at(path: Path) -> None:
    open_bundle(path).check()


def test_manifest_round_trip(bundle: Bundle) -> None:
    assert open_bundle(bundle.path).manifest == bundle.manifest
    assert open_bundle(str(bundle.path)).path == bundle.path


def test_first_variant_is_chosen(bundle: Bundle) -> None:
    assert bundle.chosen.name == "onnxruntime-int8"
    assert bundle.chosen.variant == Variant("onnxruntime", Precision.INT8)


def test_digest_depends_on_the_content(make_manifest: Callable[..., Manifest]) -> None:
    sealed = make_manifest().sealed()
    assert len(sealed.digest) == 64
    assert sealed.sealed() == sealed
    assert replace(sealed, created="2026-01-03").sealed().digest != sealed.digest


def test_manifest_without_newer_fields_is_valid(bundle: Bundle) -> None:
    def age(raw: dict) -> None:
        del raw["signature"]["mask_id"]
        del raw["gate"]["metric"]
        for entry in raw["variants"]:
            del entry["depends_on_batch"]
            del entry["instructions"]
        content = {name: value for name, value in raw.items() if name != "digest"}
        raw["digest"] = hashlib.sha256(
            json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
        ).hexdigest()

    edit_json(bundle, age)
    assert open_bundle(bundle.path).manifest.signature == bundle.manifest.signature
    assert not open_bundle(bundle.path).manifest.chosen.depends_on_batch


@pytest.mark.parametrize("gate", [{"min_agreement": 1}, {"min_agreement": 0}, {"max_drop": 1}, {"max_drop": 0}])
def test_integer_gate_does_not_change_the_digest(
    tmp_path: Path,
    write_bundle: Callable[..., Bundle],
    make_manifest: Callable[..., Manifest],
    gate: dict[str, float],
) -> None:
    """`hasten.build(…, min_agreement=1)` passes an int."""
    written = write_bundle(tmp_path / "whole", make_manifest(gate=Gate(**gate)))
    assert open_bundle(written.path).manifest == written.manifest


def test_missing_directory_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="no such directory") as caught:
        open_bundle(tmp_path / "nothing")
    assert "hasten build" in (caught.value.hint or "")


def test_directory_without_manifest_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"is not a bundle: it has no manifest\.json"):
        open_bundle(tmp_path)


def test_file_is_not_a_bundle(bundle: Bundle) -> None:
    with pytest.raises(BundleError, match="no bundle at"):
        open_bundle(bundle.path / "manifest.json")


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[1]", b"7", b"null", b'"text"', b"{}", b'{"schema": 1}', b'{"hasten": "\xff"}', b"[" * 99_999],
    ids=["empty", "cut", "list", "number", "null", "string", "no schema", "no fields", "not UTF-8", "too deep"],
)
def test_malformed_manifest_is_rejected(bundle: Bundle, content: bytes) -> None:
    (bundle.path / "manifest.json").write_bytes(content)
    with pytest.raises(BundleError, match=r"manifest\.json is damaged"):
        open_bundle(bundle.path)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.999])
def test_truncated_manifest_is_rejected(bundle: Bundle, share: float) -> None:
    file = bundle.path / "manifest.json"
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(BundleError, match=r"manifest\.json is damaged"):
        open_bundle(bundle.path)


WRONG: dict[str, Edit] = {
    "variants a string": lambda raw: raw.update(variants="onnxruntime-int8"),
    "files null": lambda raw: raw.update(files=None),
    "number a string": lambda raw: raw["gate"].update(min_agreement="0.995"),
    "field missing": lambda raw: raw.pop("signature"),
    "unknown precision": lambda raw: raw["variants"][0].update(precision="fp7"),
    "unknown dtype": lambda raw: raw["signature"]["inputs"][0].update(dtype="complex64"),
    "gate past one": lambda raw: raw["gate"].update(min_agreement=7.0),
    "half a core": lambda raw: raw["machine"].update(cores=2.5),
    "schema a string": lambda raw: raw.update(schema="1"),
    "schema null": lambda raw: raw.update(schema=None),
    "schema 0": lambda raw: raw.update(schema=0),
    "schema -1": lambda raw: raw.update(schema=-1),
}


@pytest.mark.parametrize("edit", WRONG.values(), ids=WRONG)
def test_wrong_types_and_values_are_rejected(bundle: Bundle, edit: Edit) -> None:
    edit_json(bundle, edit)
    with pytest.raises(BundleError, match=r"manifest\.json is damaged"):
        open_bundle(bundle.path)


def test_newer_format_requires_newer_hasten(bundle: Bundle) -> None:
    edit_json(bundle, lambda raw: raw.update(schema=SCHEMA + 1, whatever="comes"))
    with pytest.raises(
        BundleError, match=f"has bundle format {SCHEMA + 1}; this hasten reads up to {SCHEMA}"
    ) as caught:
        open_bundle(bundle.path)
    assert caught.value.hint == "pip install -U hasten"


EDITS: dict[str, Edit] = {
    "labels swapped": lambda raw: raw["task"].update(labels=["good", "fair", "bad"]),
    "gate lowered": lambda raw: raw["gate"].update(min_agreement=0.5),
    "variants reordered": lambda raw: raw.update(variants=raw["variants"][::-1]),
    "file dropped": lambda raw: raw["files"].popitem(),
    "digest emptied": lambda raw: raw.update(digest=""),
    "digest dropped": lambda raw: raw.pop("digest"),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_edited_manifest_is_rejected(bundle: Bundle, edit: Edit) -> None:
    edit_json(bundle, edit)
    with pytest.raises(BundleError, match=r"manifest\.json was changed after it was built"):
        open_bundle(bundle.path)


def test_manifest_without_variants_is_rejected(bundle: Bundle, reseal: Callable[..., None]) -> None:
    reseal(bundle, variants=())
    with pytest.raises(BundleError, match="lists no variant"):
        open_bundle(bundle.path)


UNSAFE = ["../outside", "graph/../../outside", "/etc/hostname", "..", "graph/\0"]


@pytest.mark.parametrize("path", UNSAFE)
@pytest.mark.parametrize("section", ["files", "graphs"])
def test_paths_outside_the_bundle_are_rejected(
    bundle: Bundle, reseal: Callable[..., None], section: str, path: str
) -> None:
    reseal(bundle, **{section: {**getattr(bundle.manifest, section), path: path}})
    with pytest.raises(BundleError, match="is unsafe"):
        open_bundle(bundle.path)


@pytest.mark.parametrize("path", ["../../../outside", "/etc/hostname", "../../graph/model.onnx"])
def test_variant_graph_outside_its_folder_is_rejected(bundle: Bundle, reseal: Callable[..., None], path: str) -> None:
    reseal(bundle, variants=(replace(bundle.chosen, graphs={"model": path}),))
    with pytest.raises(BundleError):
        open_chosen(bundle.path)


def test_variant_graph_without_hash_is_rejected(bundle: Bundle, reseal: Callable[..., None]) -> None:
    (bundle.path / "variants" / bundle.chosen.name / "planted.onnx").write_bytes(b"anything")
    reseal(bundle, variants=(replace(bundle.chosen, graphs={"model": "planted.onnx"}),))
    with pytest.raises(BundleError, match=r"planted\.onnx"):
        open_chosen(bundle.path)


def test_graph_without_hash_is_rejected(bundle: Bundle, reseal: Callable[..., None]) -> None:
    (bundle.path / "graph" / "planted.onnx").write_bytes(b"anything")
    reseal(bundle, graphs={"model": "graph/planted.onnx"})
    with pytest.raises(BundleError, match=r"planted\.onnx"):
        open_bundle(bundle.path).graph()


def test_link_to_outside_file_is_rejected(bundle: Bundle, tmp_path: Path) -> None:
    """It is rejected although its content has the right hash: the target may change."""
    inside, outside = bundle.path / "graph/model.onnx", tmp_path / "outside.onnx"
    inside.rename(outside)
    inside.symlink_to(outside)
    with pytest.raises(BundleError, match=r"names the path 'graph/model\.onnx', which leaves the bundle"):
        open_bundle(bundle.path)


def test_link_to_outside_directory_is_rejected(bundle: Bundle, tmp_path: Path) -> None:
    (bundle.path / "graph").rename(tmp_path / "outside")
    (bundle.path / "graph").symlink_to(tmp_path / "outside")
    with pytest.raises(BundleError, match="which leaves the bundle"):
        open_bundle(bundle.path)


def test_link_cycle_is_rejected(bundle: Bundle) -> None:
    (bundle.path / "graph/model.onnx").unlink()
    (bundle.path / "graph/model.onnx").symlink_to("model.onnx")
    with pytest.raises(BundleError, match=r"graph/model\.onnx"):
        check_at(bundle.path)


def test_bundle_may_be_opened_through_a_link(bundle: Bundle, tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to(bundle.path)
    open_bundle(tmp_path / "latest").check()


def test_link_that_moves_meanwhile_does_not_change_an_open_bundle(bundle: Bundle, tmp_path: Path) -> None:
    link = tmp_path / "latest"
    link.symlink_to(bundle.path)
    opened = open_bundle(link)
    link.unlink()
    link.symlink_to(tmp_path / "another")
    opened.check()
    assert opened.report == bundle.report

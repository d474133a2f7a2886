from __future__ import annotations

import errno
import io
import stat
import zipfile
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

from hasten.backends import MODEL, Artifact
from hasten.bundle import Bundle, BundleWriter, Manifest, open_bundle
from hasten.bundle.write import check_target
from hasten.core.errors import BundleError, HastenError, PlanError, StageError
from hasten.core.report import Candidate, Report, Status, Verdict
from hasten.tasks import TASKS, Encoded, TaskSpec

WriteBundle = Callable[..., Bundle]
OUTPUTS = {"logits": np.arange(6, dtype=np.float32).reshape(2, 3)}


def names_in(directory: Path) -> list[str]:
    return sorted(file.name for file in directory.iterdir())


def files_in(directory: Path) -> set[str]:
    return {file.relative_to(directory).as_posix() for file in directory.rglob("*") if file.is_file()}


# --- what is written is what is read


def test_bundle_has_expected_files_and_hashes(bundle: Bundle) -> None:
    assert files_in(bundle.path) == {
        "manifest.json",
        "report.json",
        "graph/model.onnx",
        "graph/model.onnx.data",
        "variants/onnxruntime-int8/model.onnx",
        "variants/onnxruntime-int8/model.onnx.data",
        "variants/onnxruntime-fp32/model.onnx",
        "variants/onnxruntime-fp32/model.onnx.data",
        "tokenizer/tokenizer.json",
        "reference/inputs.jsonl",
        "reference/outputs.npz",
    }
    hashes = {name: sha256((bundle.path / name).read_bytes()).hexdigest() for name in files_in(bundle.path)}
    del hashes["manifest.json"]
    assert bundle.manifest.files == hashes


def test_bundle_round_trip(bundle: Bundle, report: Report, reference_rows: list[dict[str, object]]) -> None:
    opened = open_bundle(bundle.path)
    opened.check()
    assert opened == bundle
    assert opened.report == report
    assert opened.reference().rows == tuple(reference_rows)
    assert np.array_equal(opened.reference().outputs["logits"], OUTPUTS["logits"])
    assert list(opened.reference().outputs) == ["logits"]
    assert opened.tokenizer().encode(["a b"]).batch.tokens == 4


def test_artifacts_are_inside_the_bundle(bundle: Bundle) -> None:
    artifact = bundle.artifact(bundle.entry("onnxruntime-fp32"))
    assert artifact.path(MODEL) == bundle.path / "variants/onnxruntime-fp32/model.onnx"
    assert artifact.variant.name == "onnxruntime-fp32"
    assert artifact.size_bytes == len(b"graph" + b"weights")
    graph = bundle.graph()
    assert graph.path(MODEL).read_bytes() == b"graph"
    assert graph.variant.name == "graph-fp32"


def test_bundle_can_be_moved(bundle: Bundle, tmp_path: Path) -> None:
    moved = open_bundle(bundle.path.rename(tmp_path / "moved"))
    moved.check()
    assert moved.artifact(moved.chosen).path(MODEL).is_file()


def test_variant_subdirectories_are_kept(tmp_path: Path, make_manifest: Callable[..., Manifest]) -> None:
    manifest = make_manifest("onnxruntime-fp32")
    folder = tmp_path / "artifact" / "deep" / "er"
    folder.mkdir(parents=True)
    (folder / "weights.bin").write_bytes(b"w")
    with BundleWriter(tmp_path / "out") as writer:
        writer.add_variant(Artifact(manifest.chosen.variant, manifest.signature, tmp_path / "artifact", {}))
        written = writer.commit(manifest)
    assert list(written.manifest.files) == ["variants/onnxruntime-fp32/deep/er/weights.bin"]


def test_unknown_variant_error_lists_the_known_ones(bundle: Bundle) -> None:
    with pytest.raises(PlanError, match="has no variant 'onnxruntime-fp16': did you mean") as caught:
        bundle.entry("onnxruntime-fp16")
    assert caught.value.hint == "it has: onnxruntime-int8, onnxruntime-fp32"


@pytest.mark.parametrize(
    "row",
    [
        {"text": "one\nline\r\nafter\x0banother\x0c\x1c\x85"},
        {"text": "line \u2028 and paragraph \u2029 separators"},
        {"text": "中文 😀 e\u0301 \ufeff\u200b\x00"},
        {"text": "a", "score": 0.1, "label": ["good", 2], "extra": None},
        # Only texts are refused for it; other columns of a user's file go through as they are.
        {"text": "a", "id": "\ud800"},
    ],
)
def test_reference_rows_round_trip(tmp_path: Path, make_manifest: Callable[..., Manifest], row: dict) -> None:
    with BundleWriter(tmp_path / "out") as writer:
        writer.add_reference([row, {"text": "b"}], OUTPUTS)
        written = writer.commit(make_manifest())
    assert written.reference().rows == (row, {"text": "b"})


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_report_of_non_finite_variant_round_trip(
    tmp_path: Path, write_bundle: WriteBundle, report: Report, encoded: Callable[..., Encoded], bad: float
) -> None:
    """A variant with non-finite outputs is in the report, although JSON has no NaN."""
    outputs, spec = {"logits": np.full((2, 3), bad, np.float32)}, TaskSpec("text-classification", ("a", "b", "c"))
    agreement = TASKS.get(spec.name).agree(outputs, OUTPUTS, encoded(2), spec)
    verdict = Verdict("openvino-fp16", False, "some outputs are not finite numbers", agreement)
    rejected = Candidate("openvino-fp16", Status.INACCURATE, verdict.reason, verdict)
    written = write_bundle(tmp_path / "refused", measured=replace(report, candidates=(rejected,)))
    (candidate,) = open_bundle(written.path).report.candidates
    assert candidate.reason == "some outputs are not finite numbers"
    assert candidate.verdict is not None
    assert not candidate.verdict.agreement.is_finite


# --- damage


USES: dict[str, Callable[[Bundle], object]] = {
    "report.json": lambda bundle: bundle.report,
    "graph/model.onnx": lambda bundle: bundle.graph(),
    "graph/model.onnx.data": lambda bundle: bundle.graph(),
    "variants/onnxruntime-int8/model.onnx.data": lambda bundle: bundle.artifact(bundle.chosen),
    "tokenizer/tokenizer.json": lambda bundle: bundle.tokenizer(),
    "reference/inputs.jsonl": lambda bundle: bundle.reference(),
    "reference/outputs.npz": lambda bundle: bundle.reference(),
}


@pytest.mark.parametrize(("name", "use"), USES.items(), ids=USES)
def test_missing_file_is_rejected(bundle: Bundle, name: str, use: Callable[[Bundle], object]) -> None:
    (bundle.path / name).unlink()
    for attempt in (use, Bundle.check):
        with pytest.raises(BundleError, match=f"is incomplete: {name} is missing"):
            attempt(bundle)


@pytest.mark.parametrize(("name", "use"), USES.items(), ids=USES)
def test_changed_file_is_rejected(bundle: Bundle, name: str, use: Callable[[Bundle], object]) -> None:
    file = bundle.path / name
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    for attempt in (use, Bundle.check):
        with pytest.raises(BundleError, match=f"was changed after it was built: {name} does not match its hash"):
            attempt(bundle)


def test_variant_is_usable_if_another_is_damaged(bundle: Bundle) -> None:
    (bundle.path / "variants/onnxruntime-int8/model.onnx").unlink()
    assert bundle.artifact(bundle.entry("onnxruntime-fp32")).path().is_file()


def test_extra_file_is_rejected(bundle: Bundle) -> None:
    (bundle.path / "graph/notes.txt").write_text("mine")
    with pytest.raises(BundleError, match=r"has a file that its manifest does not list: graph/notes\.txt"):
        bundle.check()


@pytest.mark.parametrize(("name", "use"), [("graph/x", "graph"), ("variants/onnxruntime-int8/x", "variant")])
def test_file_without_a_hash_is_rejected_before_a_runtime_opens_the_folder(bundle: Bundle, name: str, use: str) -> None:
    """A graph may name it as its weights."""
    (bundle.path / name).write_bytes(b"weights")
    with pytest.raises(BundleError, match=f"has a file that its manifest does not list: {name}"):
        bundle.graph() if use == "graph" else bundle.artifact(bundle.chosen)


@pytest.mark.parametrize("target", ["/etc", "/nowhere"])
def test_extra_link_is_rejected(bundle: Bundle, target: str) -> None:
    (bundle.path / "graph/more").symlink_to(target)
    with pytest.raises(BundleError, match="has a file that its manifest does not list: graph/more"):
        bundle.check()


def test_variant_without_files_is_rejected(bundle: Bundle, reseal: Callable[..., None]) -> None:
    nameless = replace(bundle.chosen, name="onnxruntime-bf16")
    reseal(bundle, variants=(bundle.chosen, nameless))
    with pytest.raises(BundleError, match="variants/onnxruntime-bf16/"):
        open_bundle(bundle.path).artifact(nameless)


def saved(save: Callable[[io.BytesIO], object]) -> bytes:
    stream = io.BytesIO()
    save(stream)
    return stream.getvalue()


PICKLED = saved(lambda stream: np.savez(stream, logits=np.array([{"a": 1}], object)))
SOUND = saved(lambda stream: np.savez(stream, logits=np.ones(100)))


def oversized(shape: tuple[int, ...], size: int) -> bytes:
    """Return an archive whose array declares a shape and has this many bytes, all of them zero."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("logits.npy", "w") as entry:
        np.lib.format.write_array_header_1_0(entry, {"descr": "<f4", "fortran_order": False, "shape": shape})
        for _ in range(size // 2**20):
            entry.write(bytes(2**20))
    return stream.getvalue()


FORGED = {
    "zip bomb": ("reference/outputs.npz", oversized((2**24,), 2**26)),
    "huge array": ("reference/outputs.npz", oversized((2**44,), 2**20)),
    "pickled array": ("reference/outputs.npz", PICKLED),
    "bare pickle": ("reference/outputs.npz", b"\x80\x04N."),
    "no archive": ("reference/outputs.npz", b"anything"),
    "nothing": ("reference/outputs.npz", b""),
    "half an archive": ("reference/outputs.npz", SOUND[: len(SOUND) // 2]),
    "an array": ("reference/outputs.npz", saved(lambda stream: np.save(stream, np.ones(3)))),
    "rows cut short": ("reference/inputs.jsonl", b'{"text": "a'),
    "rows not UTF-8": ("reference/inputs.jsonl", b'{"text": "\xff"}\n'),
    "rows no objects": ("reference/inputs.jsonl", b"[1]\n[2]\n"),
    "no tokenizer": ("tokenizer/tokenizer.json", b"{}"),
    "no report": ("report.json", b'{"plan": 3}'),
    "half a report": ("report.json", b'{"plan": '),
}


@pytest.mark.parametrize(("name", "content"), FORGED.values(), ids=FORGED)
def test_invalid_content_with_valid_hash_is_rejected(
    bundle: Bundle, reseal: Callable[..., None], name: str, content: bytes
) -> None:
    (bundle.path / name).write_bytes(content)
    reseal(bundle, files={**bundle.manifest.files, name: sha256(content).hexdigest()})
    changed = open_bundle(bundle.path)
    with pytest.raises(BundleError, match=Path(name).name):
        USES[name](changed)


def test_object_arrays_are_not_written(tmp_path: Path) -> None:
    with BundleWriter(tmp_path / "out") as writer, pytest.raises(ValueError, match=r"[Oo]bject arrays"):
        writer.add_reference([{"text": "a"}], {"logits": np.array([{}], object)})  # type: ignore[dict-item]


# --- all or nothing


@pytest.mark.parametrize("error", [RuntimeError("a stage failed"), KeyboardInterrupt()])
def test_exception_leaves_no_files(tmp_path: Path, error: BaseException) -> None:
    target = tmp_path / "fresh" / "bundle"

    def build() -> None:
        with BundleWriter(target) as writer:
            writer.add_reference([{"text": "a"}], OUTPUTS)
            raise error

    with pytest.raises(type(error)):
        build()
    assert names_in(tmp_path) == []


def test_writer_without_commit_leaves_no_files(tmp_path: Path) -> None:
    with BundleWriter(tmp_path / "bundle") as writer:
        writer.add_reference([{"text": "a"}], OUTPUTS)
    assert names_in(tmp_path) == []


def test_target_is_absent_before_commit(tmp_path: Path, make_manifest: Callable[..., Manifest]) -> None:
    target = tmp_path / "bundle"
    with BundleWriter(target) as writer:
        writer.add_reference([{"text": "a"}], OUTPUTS)
        assert not target.exists()
        writer.commit(make_manifest())
        assert names_in(tmp_path) == ["bundle"]
    assert names_in(tmp_path) == ["bundle"]
    assert stat.S_IMODE(target.stat().st_mode) == 0o755


def test_relative_target_is_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_bundle: WriteBundle
) -> None:
    monkeypatch.chdir(tmp_path)
    assert write_bundle(Path("here")).path == tmp_path / "here"
    open_bundle("here").check()


@pytest.mark.parametrize("is_bundle", [True, False])
def test_commit_replaces_the_old_bundle(tmp_path: Path, write_bundle: WriteBundle, is_bundle: bool) -> None:
    target = tmp_path / "space" / "bundle"
    target.mkdir(parents=True)
    if is_bundle:
        write_bundle(target)
        (target / "graph/old.txt").touch()
    write_bundle(target).check()
    assert names_in(target.parent) == ["bundle"]


def test_commit_over_a_link_leaves_no_second_one(tmp_path: Path, write_bundle: WriteBundle, bundle: Bundle) -> None:
    space = tmp_path / "space"
    space.mkdir()
    (space / "latest").symlink_to(bundle.path)
    write_bundle(space / "latest").check()
    assert names_in(space) == ["latest"]


def test_failed_commit_restores_the_old_bundle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_bundle: WriteBundle
) -> None:
    target = tmp_path / "space" / "bundle"
    old = write_bundle(target)
    rename = Path.rename

    def fail_into_place(self: Path, to: Path) -> Path:
        if to == target and not self.name.endswith("-old"):
            raise OSError(errno.ENOSPC, "no space left")
        return rename(self, to)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", fail_into_place)
        with pytest.raises(StageError, match="disk is full"):
            write_bundle(target)
    assert names_in(target.parent) == ["bundle"]
    opened = open_bundle(target)
    opened.check()
    assert opened == old


# --- where a bundle may go


@pytest.mark.parametrize("name", ["new", "not/yet", "empty"])
def test_read_only_target_is_rejected_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "empty").mkdir()

    def refuse(path: Path | str, *_: object) -> None:
        assert Path(path).parent == tmp_path
        raise PermissionError(errno.EACCES, "Permission denied")

    # Root may write anywhere, and may run the tests.
    monkeypatch.setattr("os.mkdir", refuse)
    with pytest.raises(PlanError, match=f"{name} cannot be written: Permission denied") as caught:
        check_target(tmp_path / name, force=False)
    assert "-o" in (caught.value.hint or "")


@pytest.mark.parametrize("path", ["/proc/bundle", "/proc/not/yet", f"{'long' * 100}/bundle", "long" * 100])
def test_unwritable_target_is_rejected_before_the_work(tmp_path: Path, path: str) -> None:
    """Root cannot write there either, although permissions allow it."""
    with pytest.raises(PlanError, match="cannot be written"):
        check_target(tmp_path / path, force=False)


def test_root_directory_is_rejected_as_target() -> None:
    with pytest.raises(PlanError, match="is not empty and holds no bundle"):
        check_target(Path("/"), force=True)


@pytest.mark.parametrize("force", [False, True])
def test_absent_or_empty_target_is_accepted(tmp_path: Path, force: bool) -> None:
    check_target(tmp_path / "not" / "yet", force=force)
    (tmp_path / "empty").mkdir()
    check_target(tmp_path / "empty", force=force)


@pytest.mark.parametrize("force", [False, True])
def test_other_directories_are_never_replaced(tmp_path: Path, force: bool) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(PlanError, match="is a file"):
        check_target(tmp_path / "file", force=force)
    with pytest.raises(PlanError, match="is not empty and holds no bundle"):
        check_target(tmp_path, force=force)


def test_bundle_is_replaced_only_with_force(bundle: Bundle) -> None:
    with pytest.raises(PlanError, match="already holds a bundle") as caught:
        check_target(bundle.path, force=False)
    assert caught.value.hint == "--force replaces it"
    check_target(bundle.path, force=True)


def test_target_below_a_file_is_rejected_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(PlanError, match="file"):
        check_target(tmp_path / "file" / "bundle", force=False)


def test_writer_below_a_file_is_a_one_line_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(HastenError, match="file"), BundleWriter(tmp_path / "file" / "bundle"):
        pass


def test_files_created_at_the_target_meanwhile_are_kept(tmp_path: Path, make_manifest: Callable[..., Manifest]) -> None:
    target = tmp_path / "space" / "bundle"
    with BundleWriter(target, force=True) as writer:
        target.mkdir()
        (target / "thesis.txt").write_text("years of work")
        with pytest.raises(PlanError, match="holds no bundle"):
            writer.commit(make_manifest())
    assert (target / "thesis.txt").read_text() == "years of work"
    assert names_in(target.parent) == ["bundle"]


def test_manifest_of_another_program_is_not_a_bundle(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"name": "a web application"}')
    with pytest.raises(PlanError, match="holds no bundle"):
        check_target(tmp_path, force=True)


def test_files_beside_the_manifest_are_ignored(bundle: Bundle) -> None:
    (bundle.path / ".DS_Store").touch()
    (bundle.path / "README.md").touch()
    bundle.check()

"""The directories of the models: a configuration each, and what runs it."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import msgspec

from hasten.backends import MODEL, Artifact
from hasten.backends.tensorrt.planning import Record, read_record
from hasten.bundle import Bundle
from hasten.bundle.read import GRAPH_BACKEND, TOKENIZER
from hasten.core.errors import BundleError, StageError, UnsupportedError, translate_os_errors
from hasten.core.tensors import ATTENTION_MASK, Signature, TensorSpec
from hasten.core.variant import CPU, CUDA, Precision
from hasten.deploy.tritonserver import configs
from hasten.deploy.tritonserver.batching import Batching, batching
from hasten.deploy.tritonserver.models.answer import OPTIONS
from hasten.deploy.tritonserver.models.request import ABOUT
from hasten.deploy.tritonserver.models.request import TOKENIZER as TOKENIZER_FILE
from hasten.deploy.tritonserver.options import (
    FUSED,
    TENSORRT,
    Options,
    Repository,
    Runtime,
    choose,
    is_for_processors,
)
from hasten.deploy.tritonserver.packages import needed, pinned
from hasten.deploy.tritonserver.pbtxt import Message, Tensor, Value, to_text
from hasten.deploy.tritonserver.shipping import is_ours, ship
from hasten.tasks import TASKS, AnyTask, TaskSpec

ANSWER = "ANSWER"
VERSION = "1"
# Before it, MultiHeadAttention with fewer queries than keys, as in a pruned last layer, does not see the mask: wrong
# answers wherever a row is padded (tests/e2e/test_deploy_tritonserver.py). The graph has no such operator.
_LEAST = "1.21"
_LABELS = "labels.txt"
# What a model is called after, by the backend of its variant.
_WORDS = {"onnxruntime": "onnx", "graph": "onnx", "openvino": "openvino", TENSORRT: "tensorrt", FUSED: "fused"}
# The one that sessions of ours compute on, of those that the server sees.
_FIRST_GPU = (0,)
# Tasks whose answer is what the model gives, as it gives it: a row for each text.
_RAW = ("text-classification", "sentence-similarity", "feature-extraction")
_CLASSES = "text-classification"
MODEL_PY = '''"""Written by hasten: the code is in the folder beside it."""

import sys
from pathlib import Path

# First: whatever is installed in the image, this is the version that the repository was written with.
sys.path.insert(0, str(Path(__file__).parent))

from hasten.deploy.tritonserver.models.{module} import TritonPythonModel

__all__ = ["TritonPythonModel"]
'''


def write_models(bundle: Bundle, directory: Path, options: Options) -> Repository:
    """Fill a directory that is there with the directories of the models."""
    bundle.check()  # whatever lies in the folder of a variant is copied
    for spec in (*bundle.manifest.signature.inputs, *bundle.manifest.signature.outputs):
        if not spec.name.isidentifier():  # files are called so
            raise BundleError(f"{bundle.path} is unsafe: it names the tensor '{spec.name}'")
    task = f"hasten.tasks.{bundle.manifest.task.name.replace('-', '_')}"
    if not is_ours(task):
        raise UnsupportedError(
            f"the task '{bundle.manifest.task.name}' is another package's, and its code cannot be shipped"
        )
    artifact = choose(bundle, options)
    variant = artifact.variant
    if variant.device == CUDA or is_for_processors(variant):
        options = replace(options, device=variant.device)
    with translate_os_errors(f"writing {directory}"):
        return _Writer(bundle, directory, options, artifact).write()


@dataclass(frozen=True)
class _Writer:
    bundle: Bundle
    directory: Path
    options: Options
    artifact: Artifact

    def write(self) -> Repository:
        self._write_model()
        if self.is_ensemble:
            self._write_tokenize()
            self._write_ensemble()
        else:
            self._write_answer()
        return Repository(
            directory=self.directory,
            runtime=self.options.runtime,
            variant=self.artifact.variant.name,
            model=self.name("model"),
            tokenize=self.name("tokenize") if self.is_ensemble else None,
            inference=self.name("inference"),
            inputs=self.texts,
            outputs=self.answers,
            is_raw=self.is_raw,
            tokens=tuple(spec.name for spec in self.taken),
            max_rows=self.max_texts,
            least_onnxruntime=self.least_onnxruntime,
            packages=self.packages,
            device=self.options.device,
            place=str(self.record.place) if self.record is not None else "",
        )

    def name(self, part: str) -> str:
        return f"{self.options.name}_{_WORDS[self.artifact.variant.backend]}_{part}"

    @cached_property
    def signature(self) -> Signature:
        """The manifest's, in the types of an engine where it is one."""
        own = self.artifact.signature
        if self.record is None:
            return own
        told = {**self.record.inputs, **self.record.outputs}
        inputs, outputs = (
            tuple(replace(spec, dtype=told.get(spec.name, spec.dtype)) for spec in specs)
            for specs in (own.inputs, own.outputs)
        )
        return replace(own, inputs=inputs, outputs=outputs)

    @property
    def spec(self) -> TaskSpec:
        return self.bundle.manifest.task

    @property
    def task(self) -> AnyTask:
        return TASKS.get(self.spec.name)

    @property
    def is_python(self) -> bool:
        return self.options.runtime is Runtime.PYTHON

    @property
    def is_raw(self) -> bool:
        return self.spec.name in _RAW

    @property
    def is_ensemble(self) -> bool:
        """What sees padding cannot be padded by the tokenizer: rows of one length must be found first."""
        return self.is_raw and self.signature.ignores_padding

    @property
    def has_batch(self) -> bool:
        return configs.is_batched(self.signature)

    @cached_property
    def record(self) -> Record | None:
        """Of an engine: what it takes and gives is known without loading it, and loading it takes its GPU."""
        is_engine = self.artifact.variant.backend == TENSORRT
        return read_record(self.artifact.path().with_suffix(".json")) if is_engine else None

    @cached_property
    def batching(self) -> Batching:
        found = batching(self.bundle.report, self.artifact.variant.name, self.options.max_delay_us)
        most = self.options.max_rows or found.max_rows
        if self.record is not None:
            most = min(most, *(profile.max.batch for profile in self.record.order.profiles))
        return replace(found, max_rows=most)

    @property
    def max_texts(self) -> int:
        """Of a request."""
        return 0 if self.options.is_flat else self.batching.max_rows

    @cached_property
    def taken(self) -> tuple[TensorSpec, ...]:
        """What the graph takes, which may be less than the manifest says; a session of ours leaves the rest out."""
        if self.is_python:
            return self.signature.inputs
        if self.record is not None:
            return tuple(spec for spec in self.signature.inputs if spec.name in self.record.inputs)
        import onnxruntime

        settings = onnxruntime.SessionOptions()
        settings.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        try:
            path = str(self.artifact.path(MODEL))
            session = onnxruntime.InferenceSession(path, settings, providers=["CPUExecutionProvider"])
        except Exception as error:  # the binding raises its own unrelated classes
            raise StageError(f"ONNX Runtime cannot load {self.artifact.variant}: {error}") from error
        names = {entry.name for entry in session.get_inputs()}
        return tuple(spec for spec in self.signature.inputs if spec.name in names)

    @property
    def fields(self) -> dict[str, bool]:
        """What an item consists of, and whether it may be left out."""
        if self.task.fields == ("text",):
            return {"text": False, **({"text_pair": True} if self.task.takes_pairs and self.is_raw else {})}
        # Of several scores for a document no ranking can be made: such a model is asked about pairs.
        names = ("text", "text_pair") if self.spec.name == "text-ranking" and len(self.spec.labels) > 1 else None
        return dict.fromkeys(names or self.task.fields, False)

    @property
    def texts(self) -> tuple[Tensor, ...]:
        """What is asked: strings, one for each item, lists among them as JSON."""
        dims = (-1,) if self.options.is_flat else (1,)
        fields = self.fields if self.is_ensemble else {**self.fields, OPTIONS: True}
        return tuple(Tensor(name.upper(), "BYTES", dims, is_optional) for name, is_optional in fields.items())

    @property
    def answers(self) -> tuple[Tensor, ...]:
        """The tensors of the model, with the mask that tells its tokens from padding; or JSON."""
        has_batch = not self.options.is_flat
        if not self.is_raw:
            return (Tensor(self.options.output or ANSWER, "BYTES", (1,) if has_batch else (-1,)),)
        specs = list(self.signature.outputs)
        if any(spec.is_per_token for spec in specs):
            specs += [spec for spec in self.signature.inputs if spec.name == ATTENTION_MASK]
        first, *others = (configs.tensor(spec, has_batch=has_batch) for spec in specs)
        first = replace(first, name=self.options.output or first.name, labels=self.labels)
        return (first, *others)

    @property
    def labels(self) -> str:
        return _LABELS if self.spec.name == _CLASSES else ""

    @property
    def least_onnxruntime(self) -> str:
        is_fused = not self.is_python and self.artifact.variant.backend not in (GRAPH_BACKEND, TENSORRT)
        return _LEAST if is_fused else ""

    @property
    def packages(self) -> tuple[str, ...]:
        names = ["tokenizers", *([] if self.is_ensemble else ["msgspec"])]
        if self.is_python:
            names += needed(self.artifact.variant)
        return pinned(self.bundle, names)

    @property
    def gpus(self) -> tuple[int, ...]:
        """The server's own backends run on all that it sees."""
        return _FIRST_GPU if self.is_python and self.options.device == CUDA else ()

    @property
    def is_exact_on_gpu(self) -> bool:
        """Whether the server's ONNX Runtime computes fp32 there; a session of ours sees to that by itself."""
        is_theirs = not self.is_python and self.record is None
        return is_theirs and self.options.device == CUDA and self.artifact.variant.precision is Precision.FP32

    @property
    def around(self) -> dict[str, Value]:
        """What the models beside the graph have in common: Python, on the CPU, many requests at a time."""
        device = CPU if self.options.device is not None else None
        return {
            "backend": "python",
            "instance_group": configs.instances(self.options.instances, device),
            **({"dynamic_batching": self._waiting(0.5 if self.is_ensemble else 1.0)} if self.max_texts else {}),
        }

    @property
    def cached(self) -> dict[str, Value]:
        return {"response_cache": {"enable": True}} if self.options.cache else {}

    def _waiting(self, share: float) -> Message:
        """A request goes through two models, and waits in both no longer than it may in all."""
        return replace(self.batching, delay_us=int(self.batching.delay_us * share)).to_message()

    def _write_model(self) -> None:
        options, signature, artifact, has_batch = self.options, self.signature, self.artifact, self.has_batch
        # What asks it has put requests together already, unless it is asked for one at a time.
        share = 1.0 if options.is_flat else 0.5 if self.is_ensemble else 0.0
        samples, files = configs.warmup(self.bundle.report.plan.shapes, signature, self.taken)
        profiles = len(self.record.order.profiles) if self.record is not None else 0
        platform = "onnxruntime_onnx" if self.record is None else "tensorrt_plan"
        rest: dict[str, Value] = {
            **({"backend": "python"} if self.is_python else {"platform": platform}),
            "instance_group": configs.instances(options.instances, options.device, profiles=profiles, gpus=self.gpus),
            **({"dynamic_batching": self._waiting(share)} if has_batch else {}),
            "model_warmup": samples,
        }
        if self.is_exact_on_gpu:
            rest["optimization"] = configs.without_tf32()
        if not self.is_python:
            rest["default_model_filename"] = artifact.graphs[MODEL]
            if options.threads is not None:
                rest["parameters"] = [{"key": "intra_op_thread_count", "value": {"string_value": str(options.threads)}}]
        message = configs.model(
            self.name("model"),
            [configs.tensor(spec, has_batch=has_batch, is_ragged=self.is_python and has_batch) for spec in self.taken],
            [configs.tensor(spec, has_batch=has_batch, labels=self.labels) for spec in signature.outputs],
            self.batching.max_rows if has_batch else 0,
            rest,
        )
        folder = self._begin(message)
        (folder.parent / "warmup").mkdir()
        for name, content in files.items():
            (folder.parent / "warmup" / name).write_bytes(content)
        where = folder / "variant" if self.is_python else folder
        where.mkdir(exist_ok=True)
        for file in artifact.directory.iterdir():
            # Beside an engine lies what another is built from, which the server has no use for.
            if file.is_file() and (self.record is None or file == artifact.path()):
                shutil.copyfile(file, where / file.name)
        if self.is_python:
            about = {
                "variant": artifact.variant.name,
                "graphs": dict(artifact.graphs),
                "instances": options.instances,
                "threads": options.threads,
                "limits": self._limits(),
                "max_rows": self.batching.max_rows,
            }
            self._write_code(folder, "run", about, [f"hasten.backends.{artifact.variant.backend}"])

    def _write_tokenize(self) -> None:
        has_batch = not self.options.is_flat
        tokens = [configs.tensor(spec, has_batch=has_batch) for spec in self.taken]
        folder = self._begin(configs.model(self.name("tokenize"), self.texts, tokens, self.max_texts, self.around))
        self._copy_tokenizer(folder)
        # Only tasks that put something before a text have such an option.
        prompt = getattr(self.task.options(self.spec, {}), "prompt", "")
        self._write_code(folder, "tokenize", {"tokenizer": self.bundle.manifest.tokenizer, "prompt": prompt}, [])

    def _write_ensemble(self) -> None:
        tokens = {spec.name: spec.name for spec in self.taken}
        texts = {text.name: text.name for text in self.texts}
        given = {spec.name: answer.name for spec, answer in zip(self.signature.outputs, self.answers, strict=False)}
        steps = [(self.name("tokenize"), texts, tokens), (self.name("model"), tokens, given)]
        rest = {**configs.ensemble(steps), **self.cached}
        self._begin(configs.model(self.name("inference"), self.texts, self.answers, self.max_texts, rest))

    def _write_answer(self) -> None:
        rest = {**self.around, **self.cached}
        folder = self._begin(configs.model(self.name("inference"), self.texts, self.answers, self.max_texts, rest))
        self._copy_tokenizer(folder)
        about = {
            "tokenizer": self.bundle.manifest.tokenizer,
            "task": self.spec,
            "model": self.name("model"),
            "inputs": [spec.name for spec in self.taken],
            "outputs": [answer.name for answer in self.answers],
            "fields": list(self.fields),
            "max_rows": self.batching.max_rows,
            "is_raw": self.is_raw,
            "is_flat": self.options.is_flat,
        }
        self._write_code(folder, "answer", about, [f"hasten.tasks.{self.spec.name.replace('-', '_')}"])

    def _limits(self) -> dict[str, int]:
        """The number of tokens, and of their types, that the model has."""
        tokenizer = self.bundle.tokenizer()
        types = tokenizer.encode([("a", "a")]).batch.values.get("token_type_ids")
        return {"input_ids": tokenizer.size, **({} if types is None else {"token_type_ids": int(types.max()) + 1})}

    def _begin(self, message: Message) -> Path:
        """The directory of a model with its configuration; the folder of its one version is returned."""
        place = self.directory / str(message["name"])
        folder = place / VERSION
        folder.mkdir(parents=True)
        # Git and archives lose a folder that is empty, as an ensemble's is, and the server wants it.
        (folder / ".keep").touch()
        (place / "config.pbtxt").write_text(to_text(message), encoding="utf-8")
        if f'"{_LABELS}"' in to_text(message):
            names = [" ".join(label.split()) for label in self.spec.labels]
            (place / _LABELS).write_text("".join(f"{name}\n" for name in names), encoding="utf-8")
        return folder

    def _copy_tokenizer(self, folder: Path) -> None:
        self.bundle.tokenizer()  # its hash is checked, and that it opens
        shutil.copyfile(self.bundle.path / TOKENIZER, folder / TOKENIZER_FILE)

    def _write_code(self, folder: Path, module: str, about: Mapping[str, object], modules: Sequence[str]) -> None:
        (folder / "model.py").write_text(MODEL_PY.format(module=module), encoding="utf-8")
        entry = next((one for one in self.bundle.manifest.variants if one.name == self.artifact.variant.name), None)
        needs = {
            "signature": self.signature,
            "least_onnxruntime": self.least_onnxruntime,
            "instructions": () if entry is None else entry.instructions,
        }
        content = msgspec.json.encode({**needs, **about})
        (folder / ABOUT).write_bytes(msgspec.json.format(content, indent=1))
        ship([f"hasten.deploy.tritonserver.models.{module}", *modules], folder)

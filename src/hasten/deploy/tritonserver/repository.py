"""Write the models of an encoder: the model itself, its tokenizer, and the inference model that clients call."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from hasten.backends import MODEL
from hasten.backends.tensorrt.engine_spec import EngineRecord, read_record
from hasten.bundle import Bundle
from hasten.bundle.read import GRAPH_BACKEND
from hasten.core.errors import BundleError, StageError, UnsupportedError, translate_os_errors
from hasten.core.tensors import ATTENTION_MASK, Signature, TensorSpec
from hasten.core.variant import CPU, CUDA, Precision
from hasten.deploy.tritonserver import configs
from hasten.deploy.tritonserver.batching import Batching, derive_batching
from hasten.deploy.tritonserver.model_directory import LABELS_FILE, ModelWriter, Repository
from hasten.deploy.tritonserver.models.answer import OPTIONS
from hasten.deploy.tritonserver.packages import RUNTIME_PACKAGES, pin_versions
from hasten.deploy.tritonserver.pbtxt import Message, Tensor, Value
from hasten.deploy.tritonserver.variant_choice import FUSED, TENSORRT, choose_variant, is_cpu_variant
from hasten.deploy.tritonserver.vendoring import find_source
from hasten.deploy.tritonserver_options import Options, Runtime
from hasten.tasks import TASKS, AnyTask, TaskSpec

ANSWER = "ANSWER"
# In older versions, MultiHeadAttention with fewer queries than keys, as in a pruned last layer, ignores the mask:
# padded rows get wrong answers (tests/e2e/test_deploy_tritonserver.py). The unfused graph has no such operator.
_MIN_ONNXRUNTIME = "1.21"
# The part of a model's name that stands for the backend of its variant.
_BACKEND_WORDS = {"onnxruntime": "onnx", "graph": "onnx", "openvino": "openvino", TENSORRT: "tensorrt", FUSED: "fused"}
# Tasks whose answers are the model's output tensors, with a row for each text.
_RAW_TASKS = ("text-classification", "sentence-similarity", "feature-extraction")
_CLASSIFICATION = "text-classification"


def write_models(bundle: Bundle, directory: Path, options: Options) -> Repository:
    """Write the models of an encoder into an existing directory."""
    bundle.check()  # every file in the variant's folder is copied
    for spec in (*bundle.manifest.signature.inputs, *bundle.manifest.signature.outputs):
        if not spec.name.isidentifier():  # tensor names become file names
            raise BundleError(f"{bundle.path} is unsafe: it names the tensor '{spec.name}'")
    task = f"hasten.tasks.{bundle.manifest.task.name.replace('-', '_')}"
    if find_source(task) is None:
        raise UnsupportedError(
            f"the task '{bundle.manifest.task.name}' comes from another package, whose code cannot be vendored"
        )
    artifact = choose_variant(bundle, options)
    variant = artifact.variant
    if variant.device == CUDA or is_cpu_variant(variant):
        options = replace(options, device=variant.device)
    record = None
    if variant.backend == TENSORRT:
        record = read_record(artifact.path().with_suffix(".json"))
        artifact = replace(artifact, signature=_engine_signature(artifact.signature, record))
    is_fused = options.runtime is Runtime.NATIVE and variant.backend not in (GRAPH_BACKEND, TENSORRT)
    least_onnxruntime = _MIN_ONNXRUNTIME if is_fused else ""
    with translate_os_errors(f"writing {directory}"):
        return _EncoderWriter(bundle, directory, options, artifact, least_onnxruntime, record).write()


def _engine_signature(signature: Signature, record: EngineRecord) -> Signature:
    """Return the signature with the types of the engine."""
    dtypes = {**record.inputs, **record.outputs}
    inputs, outputs = (
        tuple(replace(spec, dtype=dtypes.get(spec.name, spec.dtype)) for spec in specs)
        for specs in (signature.inputs, signature.outputs)
    )
    return replace(signature, inputs=inputs, outputs=outputs)


@dataclass(frozen=True)
class _EncoderWriter(ModelWriter):
    # Describes a TensorRT engine without loading it on its GPU; None for other variants.
    record: EngineRecord | None = None

    def write(self) -> Repository:
        packages = ["tokenizers", *([] if self.is_ensemble else ["msgspec"])]
        if self.is_python:
            packages += RUNTIME_PACKAGES[self.artifact.variant.backend, self.artifact.variant.device]
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
            tokens=tuple(spec.name for spec in self.graph_inputs),
            max_rows=self.max_texts,
            least_onnxruntime=self.least_onnxruntime,
            packages=pin_versions(self.bundle, packages),
            device=self.options.device,
            platform="" if self.record is None else str(self.record.platform),
        )

    def name(self, part: str) -> str:
        return f"{self.options.name}_{_BACKEND_WORDS[self.artifact.variant.backend]}_{part}"

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
        return self.spec.name in _RAW_TASKS

    @property
    def is_ensemble(self) -> bool:
        """Return whether a tokenizer and a model in sequence suffice.

        The tokenizer pads, so a model whose outputs depend on padding needs its rows grouped by length first.
        """
        return self.is_raw and self.signature.ignores_padding

    @cached_property
    def batching(self) -> Batching:
        batching = derive_batching(self.bundle.report, self.artifact.variant.name, self.options.max_delay_us)
        max_rows = self.options.max_rows or batching.max_rows
        if self.record is not None:
            max_rows = min(max_rows, *(profile.max.batch for profile in self.record.spec.profiles))
        return replace(batching, max_rows=max_rows)

    @property
    def max_texts(self) -> int:
        """Return the maximum number of texts of a request; 0 means that the tensors have no batch axis."""
        return 0 if self.options.is_flat else self.batching.max_rows

    @cached_property
    def graph_inputs(self) -> tuple[TensorSpec, ...]:
        """Return the inputs of the graph, which may be fewer than the manifest's; hasten's sessions drop the others."""
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
        """Return the fields of an item, and for each whether it is optional."""
        if self.task.fields == ("text",):
            return {"text": False, **({"text_pair": True} if self.task.takes_pairs and self.is_raw else {})}
        # Several scores per document do not define a ranking: such a model scores pairs instead.
        names = ("text", "text_pair") if self.spec.name == "text-ranking" and len(self.spec.labels) > 1 else None
        return dict.fromkeys(names or self.task.fields, False)

    @property
    def texts(self) -> tuple[Tensor, ...]:
        """Return the inputs of a request: a string for each item and field; lists are encoded as JSON."""
        dims = (-1,) if self.options.is_flat else (1,)
        fields = self.fields if self.is_ensemble else {**self.fields, OPTIONS: True}
        return tuple(Tensor(name.upper(), "BYTES", dims, is_optional) for name, is_optional in fields.items())

    @property
    def answers(self) -> tuple[Tensor, ...]:
        """Return the outputs of a request: the model's tensors, with the mask if they are per token, or JSON."""
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
        return LABELS_FILE if self.spec.name == _CLASSIFICATION else ""

    @property
    def python_config(self) -> dict[str, Value]:
        """Return the configuration of the Python models beside the model, which run on the CPU."""
        device = CPU if self.options.device is not None else None
        return {
            "backend": "python",
            "instance_group": configs.instances(self.options.instances, device),
            **({"dynamic_batching": self._queue_config(0.5 if self.is_ensemble else 1.0)} if self.max_texts else {}),
        }

    @property
    def cache_config(self) -> dict[str, Value]:
        return {"response_cache": {"enable": True}} if self.options.cache else {}

    def _queue_config(self, share: float) -> Message:
        """Return the batching of one model: a request passes two models, which share the permitted delay."""
        return replace(self.batching, delay_us=int(self.batching.delay_us * share)).to_message()

    def _write_model(self) -> None:
        options, signature, artifact = self.options, self.signature, self.artifact
        has_batch = configs.is_batched(signature)
        # The inference model has batched the requests already, unless it handles one at a time.
        share = 1.0 if options.is_flat else 0.5 if self.is_ensemble else 0.0
        samples, files = configs.warmup(self.bundle.report.plan.shapes, signature, self.graph_inputs)
        profiles = len(self.record.spec.profiles) if self.record is not None else 0
        platform = "onnxruntime_onnx" if self.record is None else "tensorrt_plan"
        # The server's own backends can use all GPUs, hasten's sessions only the first of those visible to the server.
        gpus = (0,) if self.is_python and options.device == CUDA else ()
        settings: dict[str, Value] = {
            **({"backend": "python"} if self.is_python else {"platform": platform}),
            "instance_group": configs.instances(options.instances, options.device, profiles=profiles, gpus=gpus),
            **({"dynamic_batching": self._queue_config(share)} if has_batch else {}),
            "model_warmup": samples,
        }
        if not self.is_python:
            # hasten's sessions disable TF32 themselves.
            is_fp32 = self.record is None and artifact.variant.precision is Precision.FP32
            if is_fp32 and options.device == CUDA:
                settings["optimization"] = configs.WITHOUT_TF32
            settings["default_model_filename"] = artifact.graphs[MODEL]
            if options.threads is not None:
                threads = {"string_value": str(options.threads)}
                settings["parameters"] = [{"key": "intra_op_thread_count", "value": threads}]
        is_ragged = self.is_python and has_batch
        message = configs.model(
            self.name("model"),
            [configs.tensor(spec, has_batch=has_batch, is_ragged=is_ragged) for spec in self.graph_inputs],
            [configs.tensor(spec, has_batch=has_batch, labels=self.labels) for spec in signature.outputs],
            self.batching.max_rows if has_batch else 0,
            settings,
        )
        folder = self.create(message)
        (folder.parent / "warmup").mkdir()
        for name, content in files.items():
            (folder.parent / "warmup" / name).write_bytes(content)
        target = folder / "variant" if self.is_python else folder
        target.mkdir(exist_ok=True)
        for file in artifact.directory.iterdir():
            # The files beside an engine are for rebuilding it; the server does not need them.
            if file.is_file() and (self.record is None or file == artifact.path()):
                shutil.copyfile(file, target / file.name)
        if self.is_python:
            config = {**self.session_config, "limits": self._limits(), "max_rows": self.batching.max_rows}
            self.write_code(folder, "run", config, [f"hasten.backends.{artifact.variant.backend}"])

    def _write_tokenize(self) -> None:
        has_batch = not self.options.is_flat
        tokens = [configs.tensor(spec, has_batch=has_batch) for spec in self.graph_inputs]
        name = self.name("tokenize")
        folder = self.create(configs.model(name, self.texts, tokens, self.max_texts, self.python_config))
        self.copy_tokenizer(folder)
        # Only tasks that prepend a prompt to a text have this option.
        prompt = getattr(self.task.options(self.spec, {}), "prompt", "")
        self.write_code(folder, "tokenize", {"tokenizer": self.bundle.manifest.tokenizer, "prompt": prompt}, [])

    def _write_ensemble(self) -> None:
        tokens = {spec.name: spec.name for spec in self.graph_inputs}
        texts = {text.name: text.name for text in self.texts}
        outputs = {spec.name: answer.name for spec, answer in zip(self.signature.outputs, self.answers, strict=False)}
        steps = [(self.name("tokenize"), texts, tokens), (self.name("model"), tokens, outputs)]
        settings = {**configs.ensemble(steps), **self.cache_config}
        self.create(configs.model(self.name("inference"), self.texts, self.answers, self.max_texts, settings))

    def _write_answer(self) -> None:
        settings = {**self.python_config, **self.cache_config}
        name = self.name("inference")
        folder = self.create(configs.model(name, self.texts, self.answers, self.max_texts, settings))
        self.copy_tokenizer(folder)
        config = {
            "tokenizer": self.bundle.manifest.tokenizer,
            "task": self.spec,
            "model": self.name("model"),
            "inputs": [spec.name for spec in self.graph_inputs],
            "outputs": [answer.name for answer in self.answers],
            "fields": list(self.fields),
            "max_rows": self.batching.max_rows,
            "is_raw": self.is_raw,
            "is_flat": self.options.is_flat,
        }
        self.write_code(folder, "answer", config, [f"hasten.tasks.{self.spec.name.replace('-', '_')}"])

    def _limits(self) -> dict[str, int]:
        """Return the sizes of the vocabulary and, if the model has token types, of their table."""
        tokenizer = self.bundle.tokenizer()
        types = tokenizer.encode([("a", "a")]).batch.values.get("token_type_ids")
        return {"input_ids": tokenizer.size, **({} if types is None else {"token_type_ids": int(types.max()) + 1})}

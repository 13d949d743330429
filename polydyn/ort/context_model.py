"""EPContext models: ONNX models whose only node is a compiled program. ONNX Runtime runs them without Python."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onnx import ModelProto, ValueInfoProto, helper

import polydyn
from polydyn.build.compiler import architecture_of
from polydyn.errors import UnsupportedError
from polydyn.graph.dtypes import numpy_dtype
from polydyn.ort.library import NAME
from polydyn.ort.partition import CROSSING_DTYPES
from polydyn.ort.program_file import check_embeddable
from polydyn.runtime.artifact import ABI, Artifact

IR_VERSION, OPSET = 8, 17
"""Versions in the model: old ones, because a runtime rejects versions that are newer than itself."""


def context_model(artifact: Artifact, name: str, program_file: str) -> ModelProto:
    """Return the model of a program, whose file is in the same folder.

    UnsupportedError: the program needs Python or a device, or has a tensor that ONNX Runtime stores in another way.
    """
    check_embeddable(artifact)
    manifest = artifact.manifest
    inputs, outputs = ([_value_info(x) for x in manifest[kind]] for kind in ("inputs", "outputs"))
    node = helper.make_node(
        "EPContext", [x.name for x in inputs], [x.name for x in outputs], name=name, domain="com.microsoft",
        source=NAME, ep_cache_context=program_file, embed_mode=0, main_context=1, ep_sdk_version=polydyn.__version__,
    )  # fmt: skip
    graph = helper.make_graph([node], name, inputs, outputs)
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="polydyn")
    helper.set_model_props(model, {f"ep_compatibility_info.{NAME}": compatibility(manifest)})
    return model


def compatibility(manifest: Mapping[str, Any]) -> str:
    """Return the text by which the provider recognises programs that it can run, ``compatibility_text`` in C."""
    return f"polydyn abi {ABI} {architecture_of(manifest['target'])}"


def _value_info(argument: Mapping[str, Any]) -> ValueInfoProto:
    dtype = argument["dtype"]
    if dtype not in CROSSING_DTYPES:
        raise UnsupportedError(
            f"'{argument['name']}' is {dtype}", tensor=argument["name"], rule="onnxruntime",
            remedy=f"tensors of {', '.join(CROSSING_DTYPES)}",
        )  # fmt: skip
    shape = [int(d) if d.isdecimal() else None if d.startswith("?") else d for d in argument["shape"]]
    return helper.make_tensor_value_info(argument["name"], helper.np_dtype_to_tensor_dtype(numpy_dtype(dtype)), shape)

"""Operators of docs/operators.md that no case of this package has, with the reason."""

from __future__ import annotations

from collections.abc import Mapping

_GROUPS: Mapping[str, str] = {
    "another benchmark times it (benchmarks/dynamic.py)": "If Loop Scan com.microsoft::DynamicQuantizeLSTM",
    "nothing is computed, or all of it before a call": "MelWeightMatrix Constant BitCast Optional OptionalGetElement "
    "OptionalHasElement",
    "random numbers": "Bernoulli Multinomial RandomNormal RandomNormalLike RandomUniform RandomUniformLike",
    "sequences, which the import removes": "ConcatFromSequence SequenceAt SequenceConstruct SequenceEmpty "
    "SequenceErase SequenceInsert SequenceLength SequenceMap SplitToSequence",
    "texts, or maps": "ai.onnx.ml::CategoryMapper ai.onnx.ml::ZipMap",
    "ONNX Runtime has no kernel of its own for it": "CausalConvWithState LinearAttention SwiGLU "
    "ai.onnx.preview::FlexAttention ai.onnx.preview.training::Adagrad ai.onnx.preview.training::Adam "
    "ai.onnx.preview.training::Momentum ai.onnx.ml::TreeEnsemble com.microsoft::BiasSoftmax "
    "com.microsoft::BiasSplitGelu com.microsoft::SimplifiedLayerNormalization com.microsoft::MoE "
    "com.microsoft::BiasAdd com.microsoft::NhwcConv com.microsoft::GroupNorm com.microsoft::SkipGroupNorm",
    "the same kernels as an operator that has cases": "ai.onnx.ml::SVMClassifier com.microsoft::QLinearReduceMean "
    "com.microsoft::QEmbedLayerNormalization com.microsoft::QLinearConv com.microsoft::NhwcMaxPool",
    "polydyn's own": "polydyn::Atan2 polydyn::CumLogSumExp polydyn::CumMax polydyn::CumMin polydyn::Erfc "
    "polydyn::Expm1 polydyn::FromBits polydyn::Gather polydyn::GatherElements polydyn::Log1p polydyn::SignBit",
}
LEFT_OUT: Mapping[str, str] = {name: why for why, names in _GROUPS.items() for name in names.split()}
"""Maps an operator to the reason."""

"""Names of `spconv.pytorch.quantization`, none of which works: triops has no quantised sparse convolution."""

from triops.spconv.missing import missing

_NAMES = (
    "get_default_spconv_qconfig_mapping",
    "get_default_spconv_trt_ptq_qconfig",
    "get_default_spconv_trt_qat_qconfig",
    "get_spconv_backend_config",
    "get_spconv_convert_custom_config",
    "get_spconv_fmod_to_qat_mapping",
    "get_spconv_prepare_custom_config",
    "get_spconv_qat_to_static_mapping",
    "prepare_spconv_torch_inference",
    "quantize_per_tensor",
    "remove_conv_add_dq",
    "transform_qdq",
)
globals().update({name: missing("spconv.pytorch.quantization", name, "It has no quantised layers.") for name in _NAMES})

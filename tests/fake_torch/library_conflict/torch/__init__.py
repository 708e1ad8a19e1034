"""A library of the system's CUDA was loaded in place of the one that came with torch."""
raise ImportError(
    "/site-packages/torch/lib/../../nvidia/cusparse/lib/libcusparse.so.12: undefined symbol: __nvJitLinkComplete_12_4, version libnvJitLink.so.12"
)

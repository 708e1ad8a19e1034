"""The C library is older than the one the wheel was built for."""
raise ImportError("/lib64/libc.so.6: version `GLIBC_2.28' not found (required by torch/lib/libc10.so)")

"""headers.bzl for Bazel with modules."""

load(":headers.bzl", "jaxlib_headers")

def _jaxlib(_):
    jaxlib_headers(name = "jaxlib_headers")

jaxlib = module_extension(implementation = _jaxlib)

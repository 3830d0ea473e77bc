"""The headers of XLA's foreign function interface, from the jaxlib of the python3 on the PATH.

Another Python: `bazel build --repo_env=MX_JAX_PYTHON=/path/to/python ...`.
"""

_BUILD = """
package(default_visibility = ["//visibility:public"])

cc_library(
    name = "ffi",
    hdrs = glob(["include/xla/ffi/api/*.h"]),
    includes = ["include"],
)
"""

_FIND = """
import importlib.util as util, pathlib
print(pathlib.Path(util.find_spec("jaxlib").origin).parent / "include")
"""

def _jaxlib_headers(repository):
    named = repository.os.environ.get("MX_JAX_PYTHON")
    python = repository.path(named) if named else repository.which("python3")
    if python == None:
        fail("No python3 on the PATH; set --repo_env=MX_JAX_PYTHON=/path/to/python")
    found = repository.execute([python, "-c", _FIND])
    if found.return_code != 0:
        fail("{} has no jaxlib, whose headers are needed: {}".format(python, found.stderr))
    repository.symlink(found.stdout.strip(), "include")
    repository.file("BUILD", _BUILD)

jaxlib_headers = repository_rule(
    implementation = _jaxlib_headers,
    environ = ["MX_JAX_PYTHON", "PATH"],
    local = True,
)

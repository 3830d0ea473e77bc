"""One case of `benchmarks.decode` in llama.cpp: runs in the Python that has llama-cpp-python.

Reads a number a line, decodes that many tokens one by one from the same place, and answers with the
seconds that they took. llama.cpp's own functions are called, without the package's Python, and its
greedy sampler: a step ends with the likeliest token, as it does here.
"""

import ctypes
import json
import sys
import time


def main() -> None:
    import llama_cpp

    path, threads, context = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    # Loading writes pages of text to stderr.
    quiet = llama_cpp.llama_log_callback(lambda *arguments: None)
    llama_cpp.llama_log_set(quiet, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(
        path.encode(), llama_cpp.llama_model_default_params()
    )
    options = llama_cpp.llama_context_default_params()
    options.n_ctx, options.n_threads, options.n_threads_batch = context, threads, threads
    handle = llama_cpp.llama_init_from_model(model, options)
    greedy = llama_cpp.llama_sampler_init_greedy()

    def decode(token: int) -> int:
        array = (llama_cpp.llama_token * 1)(token)
        if llama_cpp.llama_decode(handle, llama_cpp.llama_batch_get_one(array, 1)):
            raise SystemExit("llama_decode failed")
        return llama_cpp.llama_sampler_sample(greedy, handle, -1)

    print("{}", flush=True)
    for line in sys.stdin:
        memory = llama_cpp.llama_get_memory(handle)
        llama_cpp.llama_memory_seq_rm(memory, 0, -1, -1)
        token = 1
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(int(line)):
            token = decode(token)
        spent = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
        print(json.dumps(spent), flush=True)


if __name__ == "__main__":
    main()

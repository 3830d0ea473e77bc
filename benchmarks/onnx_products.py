"""ONNX Runtime's products by weights of 4 bits, as a peer of those by packed weights.

`MatMulNBits` by blocks of 32 with a float32 scale each; at accuracy level 4 it rounds activations
to 8 bits and multiplies integers.
"""

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

BLOCK, ACCURACY = 32, 4


def int4_products(x: np.ndarray, many: int) -> Callable[[], Any]:
    """A function that multiplies a row by many weights, each of its own node, on one thread.

    Args:
      x: `[1, k]`; every weight is `[k, k]`, of random codes.
      many: how many weights.

    Raises:
      ImportError: onnx or onnxruntime is not installed.
    """
    onnxruntime, onnx = map(importlib.import_module, ("onnxruntime", "onnx"))
    helper, from_array = onnx.helper, onnx.numpy_helper.from_array

    k = x.shape[1]
    rng = np.random.default_rng(0)
    facts = {"K": k, "N": k, "bits": 4, "block_size": BLOCK, "accuracy_level": ACCURACY}
    nodes, weights, outputs = [], [], []
    for i in range(many):
        codes = rng.integers(0, 256, (k, k // BLOCK, BLOCK // 2), np.uint8)
        scales = rng.uniform(0.01, 0.02, k * k // BLOCK).astype(np.float32)
        weights += [from_array(codes, f"w{i}"), from_array(scales, f"s{i}")]
        inputs = ["x", f"w{i}", f"s{i}"]
        nodes.append(
            helper.make_node("MatMulNBits", inputs, [f"y{i}"], domain="com.microsoft", **facts)
        )
        outputs.append(helper.make_tensor_value_info(f"y{i}", onnx.TensorProto.FLOAT, [1, k]))
    row = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1, k])
    graph = helper.make_graph(nodes, "products", [row], outputs, weights)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return lambda: session.run(None, {"x": x})

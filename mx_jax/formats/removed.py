"""What left the package, by its former name; whoever is asked for one says so until 0.3."""

REMOVED: dict[str, str] = {
    "generate": "run `python examples/generate MODEL --prompt TEXT` in a clone, docs/generate.md",
    "CacheFormat": "nn.KVCache in an attention of your own, docs/generate.md",
    "Certificate": "checkpoint.transcode proves what it says, or raises; it gives the MXArray",
    "Console": "print(step.records) of a captured step is a table",
    "Csv": "json.dumps(record.as_json()) for each record of step.records.all()",
    "Jsonl": "json.dumps(record.as_json()) for each record of step.records.all()",
    "Memory": "inspect.Records: what step.records is",
    "Sink": "step.records of a captured step has all; take them out and clear() them",
    "Scalar": "a loss is logged by whatever logs it; record.step says of what step a record is",
    "TensorBoard": "log record.stats of each record of step.records.all() by record.path",
    "diff": "`inspect B --reference A` prints each tensor's SQNR against A's, inf where equal",
    "html": "`python -m mx_jax inspect FILE` prints a table, with --json JSON",
    "resume": "save again: an earlier checkpoint stays until the new one is whole",
    "report": "print(step.records) of a captured step; `python -m mx_jax inspect` of a checkpoint",
    "cudnn": "xla_scaled multiplies by jax.lax.scaled_dot on Blackwell",
    "gpu": "a table has what was measured; `python -m benchmarks.gpu` measures",
    "at_step": "capture(step, every=10, step=lambda *args: ...) takes the step from the arguments",
    "saturated_fraction": "checkpoint.plausibility(q).saturated; of a captured cast `saturation`",
    "scalar": "a loss is logged by whatever logs it; record.step says of what step a record is",
    "tag": "jax.named_scope names products; loops are counted",
    "tree": "convert.function(loss, rules, weights=0) names layers by their places in the model",
    "register": "a call shows what layers of your own multiply: give convert.report arguments",
    "all_to_all": "sharding.dispatch sends rows to experts; jax.tree.map(jax.lax.all_to_all, ...)",
    "ppermute": "jax.tree.map of jax.lax.ppermute over an MXArray moves codes and scales",
    "Kind": "a call shows what layers of your own multiply: give convert.report arguments",
    "Slot": "a call shows what layers of your own multiply: give convert.report arguments",
    "numbered": "a rule's pattern has the numbers, r'.*block_(0|31)/.*', or its filter reads them",
    "every": "a rule's filter reads the number in the path, docs/convert.md",
    "dynamic_update_slice": "nn.KVCache takes new rows; elsewhere write values, and quantize them",
    "explain_call": "inspect.explain says it of a function: print(explain(function, *args))",
    "evidence_of": "inspect.explain says what was measured; versions of mx_jax and JAX decide it",
    "DelayedDotGeneral": "float8 with scales of earlier steps is Flax's: flax.linen.fp8_ops",
    "Schedule": "copy examples/recipes/schedule.py",
    "fp_quant_mxfp4": "its weights take rotated inputs: dequantize with FP-Quant, then quantize",
    "fp_quant_nvfp4": "its weights take rotated inputs: dequantize with FP-Quant, then quantize",
    "from_qarray": "copy examples/integrations/qwix_qarray.py",
    "gaussian": "a function of one's own, from a block's values to its scale, is a ScaleRule",
    "gradient_bias": "copy benchmarks/bias.py",
    "GradientBias": "copy benchmarks/bias.py",
    "passes": "copy benchmarks/bias.py",
    "heal": "copy examples/recipes/schedule.py",
    "mask_clipped": "gradients pass what was clipped; a scale rule such as rceil clips nothing",
    "ms_eden": "copy MS_EDEN of examples/recipes/quartet_ii.py, and pass the value",
    "quartet": "mxfp4_hadamard and mxfp4_backward are MXFP4 with Hadamard transforms",
    "quartet_ii": "copy examples/recipes/quartet_ii.py, and pass quartet_ii() instead of the name",
    "AXISWISE": "operand('float8_rowwise_e4m3') of a MatmulSpec",
    "Cast": "operand('float8_tensorwise_e5m2') of a MatmulSpec, or None for high precision",
    "DISABLED": "None for an operand of a MatmulSpec",
    "Float8Config": "float8_tensorwise().with_(...), or a Recipe of three MatmulSpecs",
    "Budget": "copy examples/choose_formats.py",
    "Sensitivity": "copy examples/choose_formats.py",
    "sensitivity": "copy examples/choose_formats.py",
    "to_qarray": "copy examples/integrations/qwix_qarray.py",
    "dlhs": "grad_input",
    "drhs": "grad_weight",
    "fwd": "output",
    "plan": "docs/sharding.md shows how to compile your own step for devices that are not there",
}
"""By the name of a command, option, recipe, rule, layout or function: what takes its place."""


def whereabouts(name: object) -> str:
    """What an error adds about a name that left the package, or nothing."""
    place = REMOVED.get(str(name).strip().replace("-", "_"))
    return f", which left mx_jax in 0.2: {place}" if place else ""


def missing_attribute(module: str, name: str) -> AttributeError:
    """The error of a module that is asked for a name that it does not have."""
    return AttributeError(f"module {module!r} has no attribute {name!r}{whereabouts(name)}")

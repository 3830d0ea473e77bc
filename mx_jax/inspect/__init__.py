"""Making quantization visible: its error, and how a product will be computed."""

from mx_jax.inspect.bias_table import GradientBias as GradientBias
from mx_jax.inspect.budget import Budget as Budget
from mx_jax.inspect.error import saturated_fraction as saturated_fraction
from mx_jax.inspect.error import sqnr_db as sqnr_db
from mx_jax.inspect.evidence import evidence_of as evidence_of
from mx_jax.inspect.explain import explain as explain
from mx_jax.inspect.explain import explain_call as explain_call
from mx_jax.inspect.explanation import Explanation as Explanation
from mx_jax.inspect.gradients import gradient_bias as gradient_bias
from mx_jax.inspect.gradients import passes as passes
from mx_jax.inspect.sensitivities import sensitivity as sensitivity
from mx_jax.inspect.sensitivity_table import Sensitivity as Sensitivity

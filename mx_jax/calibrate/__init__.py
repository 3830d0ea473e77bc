"""Codes chosen by what a product does with them: scales by squared error, GPTQ."""

from mx_jax.calibrate.channels import Channels as Channels
from mx_jax.calibrate.channels import Features as Features
from mx_jax.calibrate.channels import Pair as Pair
from mx_jax.calibrate.channels import llama as llama
from mx_jax.calibrate.equalize import equalize as equalize
from mx_jax.calibrate.gptq import Gptq as Gptq
from mx_jax.calibrate.gptq import UncalibratedWarning as UncalibratedWarning
from mx_jax.calibrate.gptq import gptq as gptq
from mx_jax.calibrate.moments import Moments as Moments
from mx_jax.calibrate.moments import moments as moments
from mx_jax.calibrate.moments import tell_input as tell_input
from mx_jax.calibrate.rotate import rotate as rotate
from mx_jax.calibrate.scales import SearchedScales as SearchedScales
from mx_jax.calibrate.scales import Way as Way
from mx_jax.calibrate.scales import output_error as output_error
from mx_jax.calibrate.scales import search_scales as search_scales

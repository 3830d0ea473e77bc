"""Element, scale and block formats as frozen data. No arrays, no jax."""

from types import ModuleType as _ModuleType

from mx_jax.formats.block import BLOCK_FORMATS as BLOCK_FORMATS
from mx_jax.formats.block import FLOAT8_BLOCKWISE_2D_E4M3 as FLOAT8_BLOCKWISE_2D_E4M3
from mx_jax.formats.block import FLOAT8_BLOCKWISE_2D_E8M0 as FLOAT8_BLOCKWISE_2D_E8M0
from mx_jax.formats.block import FLOAT8_BLOCKWISE_E4M3 as FLOAT8_BLOCKWISE_E4M3
from mx_jax.formats.block import FLOAT8_BLOCKWISE_E8M0 as FLOAT8_BLOCKWISE_E8M0
from mx_jax.formats.block import FLOAT8_ROWWISE_E4M3 as FLOAT8_ROWWISE_E4M3
from mx_jax.formats.block import FLOAT8_ROWWISE_E5M2 as FLOAT8_ROWWISE_E5M2
from mx_jax.formats.block import FLOAT8_TENSORWISE_E4M3 as FLOAT8_TENSORWISE_E4M3
from mx_jax.formats.block import FLOAT8_TENSORWISE_E5M2 as FLOAT8_TENSORWISE_E5M2
from mx_jax.formats.block import INT8_ROWWISE as INT8_ROWWISE
from mx_jax.formats.block import MX_FORMATS as MX_FORMATS
from mx_jax.formats.block import MXFP4 as MXFP4
from mx_jax.formats.block import MXFP4_2D as MXFP4_2D
from mx_jax.formats.block import MXFP6_E2M3 as MXFP6_E2M3
from mx_jax.formats.block import MXFP6_E3M2 as MXFP6_E3M2
from mx_jax.formats.block import MXFP8_E4M3 as MXFP8_E4M3
from mx_jax.formats.block import MXFP8_E5M2 as MXFP8_E5M2
from mx_jax.formats.block import MXINT8 as MXINT8
from mx_jax.formats.block import NVFP4 as NVFP4
from mx_jax.formats.block import NVFP4_2D as NVFP4_2D
from mx_jax.formats.block import NVFP4_ONE_LEVEL as NVFP4_ONE_LEVEL
from mx_jax.formats.block import WHOLE as WHOLE
from mx_jax.formats.block import BlockFormat as BlockFormat
from mx_jax.formats.block import BlockSize as BlockSize
from mx_jax.formats.block import Whole as Whole
from mx_jax.formats.block import any_format as any_format
from mx_jax.formats.block import block_format as block_format
from mx_jax.formats.block import check_block_size as check_block_size
from mx_jax.formats.element import E2M1 as E2M1
from mx_jax.formats.element import E2M3 as E2M3
from mx_jax.formats.element import E3M2 as E3M2
from mx_jax.formats.element import E4M3 as E4M3
from mx_jax.formats.element import E4M3_SCALE as E4M3_SCALE
from mx_jax.formats.element import E4M3FNUZ as E4M3FNUZ
from mx_jax.formats.element import E5M2 as E5M2
from mx_jax.formats.element import E5M2FNUZ as E5M2FNUZ
from mx_jax.formats.element import E8M0 as E8M0
from mx_jax.formats.element import ELEMENT_FORMATS as ELEMENT_FORMATS
from mx_jax.formats.element import F32 as F32
from mx_jax.formats.element import F32_DIVISOR as F32_DIVISOR
from mx_jax.formats.element import INT8 as INT8
from mx_jax.formats.element import INT8_FULL as INT8_FULL
from mx_jax.formats.element import INTEGER8 as INTEGER8
from mx_jax.formats.element import SCALE_FORMATS as SCALE_FORMATS
from mx_jax.formats.element import ElementFormat as ElementFormat
from mx_jax.formats.element import ScaleFormat as ScaleFormat


def __dir__() -> list[str]:
    public = (name for name, value in globals().items() if not isinstance(value, _ModuleType))
    return sorted(name for name in public if not name.startswith("_"))

"""How often a TPU executes each bundle: of a kernel written here, and of programs by libtpu."""

from pathlib import Path

import jax
import pytest

from benchmarks.tpu_cost import kernels, slowness
from benchmarks.tpu_schedule import Schedule

# Three turns, whose counter goes through memory; a DMA in the first two; four delay slots.
KERNEL = """
     0   :  { %s1_s0 = smov.u32 0  ;;  %v2_v0 = vld [vmem:[%s1_s0] sm:$0xff] } /* Start region 1 */
   0x1 LB: > { %s3_s0 = sphi %s1_s0, %s9_s0 /* {} */  ;;  %s4_s2 = sadd.s32 1, %s3_s0 } /* check
of: {} */ /* Start region 7 :: Start/End empty region 8 */
   0x2   : > { %p5_p0 = scmp.lt.s32.totalorder %s3_s0, 2  ;;  %6 = sst [smem:[#a_spill]] %s4_s2 }
   0x3   : > { %7 = dma.hbm_to_vmem [thread:$0]  (%p5_p0), /*size_in_granules=*/8, /*vmem=*/%s8_s9 }
   0x4   : > { %s9_s0 = sld [smem:[#a_spill]]  ;;  %s10_s0 = int_to_ptr.smem %s9_s0 }
   0x5   : > { %p11_p1 = scmp.ge.s32.totalorder %s10_s0, 3 }
   0x6   :  { %12 = sbr.rel (!%p11_p1) target = $region7 }
   0x7   :  {}
   0x8   :  { %v13_v0 = vadd.f32 %v2_v0, %v2_v0 }
   0x9   :  {}
   0xa   :  { %14 = dma.general /*src=*/%s8_s9, /*size_in_granules=*/4, /*dst=*/%s15_s4 }
   0xb   :  { %s15_s4 = scalar_lea.hbm %s16_s5, 32 }
"""
# Calls it and one that is the same, in a branch that memory decides.
TOP = """
     0   :  { %s1_s0 = sld [smem:[#a]] }
   0x1   :  { %p2_p0 = scmp.eq.s32.totalorder %s1_s0, 0 }
   0x2   :  { %3 = sbr.rel (%p2_p0) target = $region4 }
   0x3   :  { %4 = inlined_call %s1_s0 /* %fusion.1 = fusion(%a) */ }
   0x4   :  { %5 = inlined_call %s1_s0 /* %fusion.2 = fusion(%fusion.1) */ } /* Start region 4 */
"""
PROGRAM = """
%one (p: u8[8]) -> u8[8] {
  ROOT %p = u8[8]{0} parameter(0)
%two (q: u8[8]) -> u8[8] {
  ROOT %q = u8[8]{0} parameter(0)
ENTRY %main (a: u8[8]) -> u8[8] {
  %a = u8[8]{0} parameter(0)
  %fusion.1 = u8[8]{0} fusion(%a), calls=%one, metadata={op_name="x"}
  ROOT %fusion.2 = u8[8]{0} fusion(%fusion.1), calls=%two
"""


def dump(folder: Path, name: str, text: str) -> None:
    (folder / f"1-{name}-02-final_bundles.txt").write_text(text)
    rows = "1 0\n" * (len(text.splitlines()) - 1 - text.count("\nof"))
    units = f"== CAPACITY:\nVALU, SALU\n 4 2\n== UTILIZATION:\n{rows}"
    (folder / f"1-{name}-00-final_hlo-static-per-bundle-utilization.txt").write_text(units)


def test_a_program(tmp_path: Path):
    with pytest.raises(ValueError, match=r"libtpu dumped no program: folder=.*its flags"):
        kernels(tmp_path, 4)
    dump(tmp_path, "TLP", TOP)
    hlo = tmp_path / "1-TLP-hlo.txt"
    hlo.write_text(PROGRAM.replace("%q = u8", "%q = s8"))
    dump(tmp_path, "fusion.1", KERNEL)
    with pytest.raises(ValueError, match=r"no bundles of kernel=fusion\.2"):
        kernels(tmp_path, 4)
    hlo.write_text(PROGRAM)
    top, kernel, twin = kernels(tmp_path, 4)
    assert twin == kernel._replace(name="fusion.2")
    assert (top.bundles, top.undecided, kernel.undecided, kernel.endless) == (5, 1, 0, False)
    assert (kernel.calls, kernel.bundles) == (1, 1 + 3 * 10 + 1)
    assert (kernel.read, kernel.written) == (2 * 8 * 32, 3 * 4 * 32)
    assert kernel.units == {"VALU": kernel.bundles / 4, "SALU": 0}


def test_loops():
    """Delay slots up to what is behind the loop; a loop of unknown length."""
    assert Schedule(KERNEL).run(None).counts == [1, *[3] * 7, *[1] * 4]
    execution = Schedule(KERNEL.replace("smov.u32 0 ", "sld [smem:[#a]] ")).run(4)
    assert execution.endless and execution.counts == [1] * 12


def test_products_at_two_rates():
    """Of three products the second is twice as fast as bfloat16."""
    run = jax.jit(lambda x, w, y: (x @ w, y @ y.T, x @ w.astype(x.dtype)))
    shapes = (((8, 32), "bfloat16"), ((32, 4), "bfloat16"), ((16, 24), "int8"))
    program = run.lower(*(jax.ShapeDtypeStruct(*each) for each in shapes)).as_text()
    ours, all_of_them = 16 * 16 * 24, 16 * 16 * 24 + 2 * 8 * 32 * 4
    assert slowness(program, {"i8": 2}) == 1 - ours / all_of_them / 2
    assert slowness(program, {}) == slowness("", {"i8": 2}) == 1

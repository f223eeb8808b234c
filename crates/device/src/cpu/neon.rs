//! Neon, which every 64-bit Arm has: four floats a vector.

use std::arch::aarch64::*;

const LANES: usize = 4;
/// Of 32 registers: 16 sums.
const WIDE: usize = 8;
type V = float32x4_t;

#[inline]
#[target_feature(enable = "neon")]
fn zero() -> V {
    vdupq_n_f32(0.0)
}

#[inline]
#[target_feature(enable = "neon")]
fn splat(x: f32) -> V {
    vdupq_n_f32(x)
}

#[inline]
#[target_feature(enable = "neon")]
fn load(x: &[f32; LANES]) -> V {
    // SAFETY: 16 bytes that can be read, at any alignment.
    unsafe { vld1q_f32(x.as_ptr()) }
}

#[inline]
#[target_feature(enable = "neon")]
fn load_bf16(x: &[u16; LANES]) -> V {
    // SAFETY: 8 bytes that can be read, at any alignment.
    let halves = unsafe { vld1_u16(x.as_ptr()) };
    vreinterpretq_f32_u32(vshll_n_u16::<16>(halves))
}

#[inline]
#[target_feature(enable = "neon")]
fn store(to: &mut [f32; LANES], v: V) {
    // SAFETY: 16 bytes that can be written, at any alignment.
    unsafe { vst1q_f32(to.as_mut_ptr(), v) }
}

#[inline]
#[target_feature(enable = "neon")]
fn mul(a: V, b: V) -> V {
    vmulq_f32(a, b)
}

#[inline]
#[target_feature(enable = "neon")]
fn fma(a: V, b: V, c: V) -> V {
    vfmaq_f32(c, a, b)
}

#[inline]
#[target_feature(enable = "neon")]
fn sum(v: V) -> f32 {
    vaddvq_f32(v)
}

/// Number k / 2 of four of the group's eight words: the first four for even k, else the last.
#[inline]
#[target_feature(enable = "neon")]
fn q4(codes: &[u8; 32], scale: V, bias: V, k: usize) -> V {
    let half = &codes.as_chunks::<16>().0[k % 2];
    // SAFETY: 16 bytes that can be read, at any alignment.
    let words = vreinterpretq_u32_u8(unsafe { vld1q_u8(half.as_ptr()) });
    let shifted = vshlq_u32(words, vdupq_n_s32(-4 * (k as i32 / 2)));
    let codes = vandq_u32(shifted, vdupq_n_u32(15));
    fma(vcvtq_f32_u32(codes), scale, bias)
}

#[inline]
#[target_feature(enable = "neon")]
fn q8(codes: &[u8; 64], scale: V, bias: V, k: usize) -> V {
    let eight = &codes.as_chunks::<8>().0[k / 2];
    // SAFETY: 8 bytes that can be read, at any alignment.
    let wide = vmovl_u8(unsafe { vld1_u8(eight.as_ptr()) });
    let four = if k.is_multiple_of(2) { vget_low_u16(wide) } else { vget_high_u16(wide) };
    fma(vcvtq_f32_u32(vmovl_u16(four)), scale, bias)
}

#[inline(always)]
fn prefetch(address: *const u8) {
    // SAFETY: a hint, which may name any address.
    unsafe {
        std::arch::asm!(
            "prfm pldl1keep, [{0}]",
            in(reg) address,
            options(nostack, preserves_flags, readonly)
        )
    }
}

super::kernels::kernels! { "neon" }

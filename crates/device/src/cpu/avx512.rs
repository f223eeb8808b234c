//! AVX-512 (F, BW, DQ, VL): sixteen floats a vector.

use std::arch::x86_64::*;

const LANES: usize = 16;
/// Of 32 registers: 16 sums, 2 rows of weights.
const WIDE: usize = 8;
type V = __m512;

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
fn zero() -> V {
    _mm512_setzero_ps()
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
fn splat(x: f32) -> V {
    _mm512_set1_ps(x)
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
fn load(x: &[f32; LANES]) -> V {
    // SAFETY: 64 bytes that can be read, at any alignment.
    unsafe { _mm512_loadu_ps(x.as_ptr()) }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
fn load_bf16(x: &[u16; LANES]) -> V {
    // SAFETY: 32 bytes that can be read, at any alignment.
    let halves = unsafe { _mm256_loadu_si256(x.as_ptr().cast()) };
    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(halves)))
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
fn store(to: &mut [f32; LANES], v: V) {
    // SAFETY: 64 bytes that can be written, at any alignment.
    unsafe { _mm512_storeu_ps(to.as_mut_ptr(), v) }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
fn mul(a: V, b: V) -> V {
    _mm512_mul_ps(a, b)
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
fn fma(a: V, b: V, c: V) -> V {
    _mm512_fmadd_ps(a, b, c)
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
fn sum(v: V) -> f32 {
    _mm512_reduce_add_ps(v)
}

/// The sixteen possible weights of the group stand in one vector, and the nibbles pick: a
/// permutation looks at the low four bits of each lane only.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
fn q4(codes: &[u8; 32], scale: V, bias: V, k: usize) -> V {
    let levels =
        _mm512_setr_ps(0., 1., 2., 3., 4., 5., 6., 7., 8., 9., 10., 11., 12., 13., 14., 15.);
    let weights = fma(levels, scale, bias);
    // SAFETY: 32 bytes that can be read, at any alignment.
    let words = unsafe { _mm256_loadu_si256(codes.as_ptr().cast()) };
    // Eight lanes for number 2 k of every word, eight for number 2 k + 1.
    let shift = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 4, 4, 4, 4, 4, 4, 4, 4);
    let first = _mm512_srlv_epi32(_mm512_broadcast_i64x4(words), shift);
    let codes = match k {
        0 => first,
        1 => _mm512_srli_epi32::<8>(first),
        2 => _mm512_srli_epi32::<16>(first),
        _ => _mm512_srli_epi32::<24>(first),
    };
    _mm512_permutexvar_ps(codes, weights)
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
fn q8(codes: &[u8; 64], scale: V, bias: V, k: usize) -> V {
    // SAFETY: 16 bytes that can be read, at any alignment.
    let bytes = unsafe { _mm_loadu_si128(codes.as_chunks::<16>().0[k].as_ptr().cast()) };
    fma(_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes)), scale, bias)
}

#[inline(always)]
fn prefetch(address: *const u8) {
    // SAFETY: a hint, which may name any address.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) }
}

super::kernels::kernels! { "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma" }

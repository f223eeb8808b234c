//! AVX2 with FMA: eight floats a vector.

use std::arch::x86_64::*;

const LANES: usize = 8;
/// Of 16 registers: 8 sums.
const WIDE: usize = 4;
type V = __m256;

#[inline]
#[target_feature(enable = "avx2,fma")]
fn zero() -> V {
    _mm256_setzero_ps()
}

#[inline]
#[target_feature(enable = "avx2,fma")]
fn splat(x: f32) -> V {
    _mm256_set1_ps(x)
}

#[inline]
#[target_feature(enable = "avx2,fma")]
fn load(x: &[f32; LANES]) -> V {
    // SAFETY: 32 bytes that can be read, at any alignment.
    unsafe { _mm256_loadu_ps(x.as_ptr()) }
}

#[inline]
#[target_feature(enable = "avx2,fma")]
fn load_bf16(x: &[u16; LANES]) -> V {
    // SAFETY: 16 bytes that can be read, at any alignment.
    let halves = unsafe { _mm_loadu_si128(x.as_ptr().cast()) };
    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(halves)))
}

#[inline]
#[target_feature(enable = "avx2,fma")]
fn store(to: &mut [f32; LANES], v: V) {
    // SAFETY: 32 bytes that can be written, at any alignment.
    unsafe { _mm256_storeu_ps(to.as_mut_ptr(), v) }
}

#[inline]
#[target_feature(enable = "avx2,fma")]
fn mul(a: V, b: V) -> V {
    _mm256_mul_ps(a, b)
}

#[inline]
#[target_feature(enable = "avx2,fma")]
fn fma(a: V, b: V, c: V) -> V {
    _mm256_fmadd_ps(a, b, c)
}

#[inline]
#[target_feature(enable = "avx2,fma")]
fn sum(v: V) -> f32 {
    let four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
    let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)))
}

/// Number k of each of the group's eight words.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn q4(codes: &[u8; 32], scale: V, bias: V, k: usize) -> V {
    // SAFETY: 32 bytes that can be read, at any alignment.
    let words = unsafe { _mm256_loadu_si256(codes.as_ptr().cast()) };
    let shifted = _mm256_srlv_epi32(words, _mm256_set1_epi32(4 * k as i32));
    let codes = _mm256_and_si256(shifted, _mm256_set1_epi32(15));
    fma(_mm256_cvtepi32_ps(codes), scale, bias)
}

#[inline]
#[target_feature(enable = "avx2,fma")]
fn q8(codes: &[u8; 64], scale: V, bias: V, k: usize) -> V {
    // SAFETY: 8 bytes that can be read, at any alignment.
    let bytes = unsafe { _mm_loadl_epi64(codes.as_chunks::<8>().0[k].as_ptr().cast()) };
    fma(_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes)), scale, bias)
}

#[inline(always)]
fn prefetch(address: *const u8) {
    // SAFETY: a hint, which may name any address.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) }
}

super::kernels::kernels! { "avx2,fma" }

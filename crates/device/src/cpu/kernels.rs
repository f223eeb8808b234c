//! The inner loops that every vector instruction set shares, written once.
//!
//! An instruction set's file defines a vector and a dozen operations on it; [`kernels!`] makes
//! its [`Kernels`] of them. It is a macro because `#[target_feature]` must stand on each
//! function: generics cannot carry it.
//!
//! Every output has its own accumulators, filled in order of the index, so a result depends
//! neither on the tile it was computed in nor on what was computed beside it.

use super::memory::Quantised;

/// A product with a quantised matrix: (w, cols, x, out).
pub type Linear = fn(Quantised, usize, &[&[f32]], &mut [f32]);
/// A product of a matrix of E and a vector: (matrix, vector, out).
pub type Product<E> = fn(&[E], &[f32], &mut [f32]);

/// The inner loops of one instruction set. Only [`super::isa`] hands them out, on machines that
/// have it.
pub struct Kernels {
    /// out[r, t] = W[r] . x[t] for all rows of a 4-bit `w`, `cols` long; `x` in the order of
    /// [`transpose`]. Rows of `out` are `x.len()` long.
    pub linear_q4: Linear,
    /// The same for 8 bit, with `x` as it is.
    pub linear_q8: Linear,
    /// out[r] = M[r] . x
    pub matvec: Product<f32>,
    /// The same for bf16.
    pub matvec_bf16: Product<u16>,
    /// out += sum over r of a[r] M[r], in order of r.
    pub combine: Product<f32>,
    /// The same for bf16.
    pub combine_bf16: Product<u16>,
    /// One token of the delta rule: `known` = S k comes in, S and o go out.
    pub delta: fn(step: &DeltaToken, known: &[f32], state: &mut [f32], o: &mut [f32]),
    /// out = silu(sum over j of x[j] w[.., j])
    pub conv: fn(x: Taps, w: &[[f32; 4]], out: &mut [f32]),
    /// x = x sigmoid(x)
    pub silu: fn(x: &mut [f32]),
    /// x = sigmoid(x)
    pub sigmoid: fn(x: &mut [f32]),
    /// x = exp(x - most), for x <= most; 0 instead of a subnormal number.
    pub exp: fn(x: &mut [f32], most: f32),
}

/// The four rows that a convolution reads, oldest first.
pub type Taps<'a> = [&'a [f32]; 4];

/// What the delta rule reads at one token: `decay` = exp(g).
pub struct DeltaToken<'a> {
    pub decay: f32,
    pub beta: f32,
    pub q: &'a [f32],
    pub k: &'a [f32],
    pub v: &'a [f32],
}

/// Reorders each group of 64 as 4-bit kernels read it: element 8 j + k goes to 8 k + j. A group's
/// nibbles are eight words of eight, so shifting all words by 4 k gives eight weights at once:
/// number k of every word.
pub fn transpose(x: &[f32], out: &mut [f32]) {
    for (x, out) in x.as_chunks::<64>().0.iter().zip(out.as_chunks_mut::<64>().0) {
        for k in 0..8 {
            for j in 0..8 {
                out[8 * k + j] = x[8 * j + k];
            }
        }
    }
}

/// exp(x) to about one unit in the last place; 0 below the smallest normal number (processors are
/// slow with less), and never more than 2.3e38. NaN stays. Plain arithmetic that compiles to vector code where it is inlined: range reduction by
/// powers of two, then a polynomial. Coefficients: Cephes, expf.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    const LN_2_HIGH: f32 = 0.693_359_4;
    const LN_2_LOW: f32 = -2.121_944_4e-4;
    /// Adding this leaves a whole number in the low bits.
    const ROUND: f32 = 12_582_912.0;
    let vanishes = x < -87.33;
    let x = if x > 88.3 { 88.3 } else { x };
    let x = if vanishes { -87.33 } else { x };
    let shifted = x.mul_add(std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = n.mul_add(-LN_2_LOW, n.mul_add(-LN_2_HIGH, x));
    let mut p = 1.987_569_1e-4_f32;
    for c in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
        p = p.mul_add(r, c);
    }
    let p = p.mul_add(r * r, r) + 1.0;
    let power = f32::from_bits(p.to_bits().wrapping_add(shifted.to_bits() << 23));
    if vanishes { 0.0 } else { power }
}

/// 1 / (1 + exp(-x)), as [`exp`].
#[inline(always)]
pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// x sigmoid(x), as [`exp`].
#[inline(always)]
pub fn silu(x: f32) -> f32 {
    x / (1.0 + exp(-x))
}

/// Makes `KERNELS` from a vector type `V` of `LANES` floats and, in scope, its operations:
/// `zero() splat(x) load(&[f32; LANES]) load_bf16(&[u16; LANES]) store(&mut [..], v)
/// mul(a, b) fma(a, b, c)` = a b + c, `sum(v)`, `prefetch(address)`, and `q4` and `q8(codes, scale, bias, k)`: the
/// k-th vector of a group's weights.
///
/// `WIDE` says how many rows of x are multiplied at once: what fits the registers.
macro_rules! kernels { ($features:literal) => {
    $crate::cpu::kernels::kernels! { $features,
        quantised { linear_q4 strip_q4 tile_q4 32 q4, linear_q8 strip_q8 tile_q8 64 q8 },
        elements {
            f32 load matvec matvec_rows combine combine_columns,
            u16 load_bf16 matvec_bf16 matvec_rows_bf16 combine_bf16 combine_columns_bf16
        }
    }
};
($features:literal,
    quantised { $($linear:ident $strip:ident $tile:ident $bytes:literal $weights:ident),* },
    elements { $($E:ident $load:ident $matvec:ident $matvec_rows:ident $combine:ident $combine_columns:ident),* }
) => {
    use $crate::cpu::kernels::{DeltaToken, Kernels, Taps};
    use $crate::cpu::memory::{Quantised, scale_and_bias};
    use $crate::cpu::scalar::Element;

    /// See [`Kernels`]. Only for machines that have the instruction set.
    pub static KERNELS: Kernels = Kernels {
        $(
            // SAFETY: who holds this table has detected the instruction set. So for all below.
            $linear: |w, cols, x, out| unsafe { $linear(w, cols, x, out) },
        )*
        $(
            // SAFETY: as above.
            $matvec: |m, x, out| unsafe { $matvec(m, x, out) },
            // SAFETY: as above.
            $combine: |m, a, out| unsafe { $combine(m, a, out) },
        )*
        // SAFETY: as above.
        delta: |step, known, state, o| unsafe { delta(step, known, state, o) },
        // SAFETY: as above.
        conv: |x, w, out| unsafe { conv(x, w, out) },
        // SAFETY: as above.
        silu: |x| unsafe { silu(x) },
        // SAFETY: as above.
        sigmoid: |x| unsafe { sigmoid(x) },
        // SAFETY: as above.
        exp: |x, most| unsafe { exp(x, most) },
    };

    $(
        #[target_feature(enable = $features)]
        fn $linear(w: Quantised, cols: usize, x: &[&[f32]], out: &mut [f32]) {
            let mut rest = x;
            while let [.., _] = rest {
                let t = x.len() - rest.len();
                let out = &mut out[t..];
                let n = match rest.len() {
                    n if n >= WIDE => $strip::<2, WIDE>(w, cols, rest, x.len(), out),
                    n if n >= 4 => $strip::<2, 4>(w, cols, rest, x.len(), out),
                    n if n >= 2 => $strip::<4, 2>(w, cols, rest, x.len(), out),
                    _ => $strip::<4, 1>(w, cols, rest, x.len(), out),
                };
                rest = &rest[n..];
            }
        }

        /// All rows of W times the first T rows of x, R rows of W at a time. Returns T.
        #[target_feature(enable = $features)]
        fn $strip<const R: usize, const T: usize>(
            w: Quantised,
            cols: usize,
            x: &[&[f32]],
            stride: usize,
            out: &mut [f32],
        ) -> usize {
            let groups = cols / 64;
            let rows = w.pairs.len() / groups;
            let mut strip = [[].as_slice(); T];
            for (strip, x) in strip.iter_mut().zip(x) {
                *strip = &x.as_chunks::<64>().0[..groups];
            }
            let mut r = 0;
            while r < rows {
                let n = if rows - r >= R { R } else { 1 };
                let w = w.part(r * cols, n * cols);
                let (codes, out) = (w.codes.as_chunks::<$bytes>().0, &mut out[r * stride..]);
                if n == R {
                    $tile::<R, T>(codes, w.pairs, strip, stride, out);
                } else {
                    $tile::<1, T>(codes, w.pairs, strip, stride, out);
                }
                r += n;
            }
            T
        }

        /// R rows of W times T rows of x: weights are unpacked once for all of them.
        #[target_feature(enable = $features)]
        #[inline]
        fn $tile<const R: usize, const T: usize>(
            codes: &[[u8; $bytes]],
            pairs: &[u32],
            x: [&[[f32; 64]]; T],
            stride: usize,
            out: &mut [f32],
        ) {
            let groups = x[0].len();
            let mut rows = [(codes, pairs); R];
            for (r, row) in rows.iter_mut().enumerate() {
                *row = (&codes[r * groups..][..groups], &pairs[r * groups..][..groups]);
            }
            // Codes of the next tiles, a page ahead: more than the processor looks ahead by itself.
            let ahead = (R * groups * $bytes) * 4096usize.div_ceil(R * groups * $bytes);
            let mut sums = [[zero(); T]; R];
            for g in 0..groups {
                for (codes, _) in rows {
                    prefetch(codes[g].as_ptr().wrapping_add(ahead));
                }
                for k in 0..64 / LANES {
                    for r in 0..R {
                        let (scale, bias) = scale_and_bias(rows[r].1[g]);
                        let w = $weights(&rows[r].0[g], splat(scale), splat(bias), k);
                        for t in 0..T {
                            let x = load(&x[t][g].as_chunks::<LANES>().0[k]);
                            sums[r][t] = fma(w, x, sums[r][t]);
                        }
                    }
                }
            }
            for r in 0..R {
                for t in 0..T {
                    out[r * stride + t] = sum(sums[r][t]);
                }
            }
        }
    )*

    $(
        #[target_feature(enable = $features)]
        fn $matvec(m: &[$E], x: &[f32], out: &mut [f32]) {
            let d = x.len();
            let mut r = 0;
            while r + 8 <= out.len() {
                $matvec_rows::<8>(&m[r * d..], x, &mut out[r..]);
                r += 8;
            }
            while r < out.len() {
                $matvec_rows::<1>(&m[r * d..], x, &mut out[r..]);
                r += 1;
            }
        }

        #[target_feature(enable = $features)]
        #[inline]
        fn $matvec_rows<const R: usize>(m: &[$E], x: &[f32], out: &mut [f32]) {
            let d = x.len();
            let mut rows = [m; R];
            for (r, row) in rows.iter_mut().enumerate() {
                *row = &m[r * d..][..d];
            }
            let (whole, _) = x.as_chunks::<LANES>();
            let mut sums = [zero(); R];
            for (i, x) in whole.iter().enumerate() {
                let x = load(x);
                for r in 0..R {
                    sums[r] = fma($load(&rows[r].as_chunks::<LANES>().0[i]), x, sums[r]);
                }
            }
            for r in 0..R {
                let mut total = sum(sums[r]);
                for i in whole.len() * LANES..d {
                    total = rows[r][i].load().mul_add(x[i], total);
                }
                out[r] = total;
            }
        }

        #[target_feature(enable = $features)]
        fn $combine(m: &[$E], a: &[f32], out: &mut [f32]) {
            let d = out.len();
            let m = &m[..a.len() * d];
            let mut start = 0;
            while start + 8 * LANES <= d {
                $combine_columns::<8>(m, a, start, out);
                start += 8 * LANES;
            }
            while start + 4 * LANES <= d {
                $combine_columns::<4>(m, a, start, out);
                start += 4 * LANES;
            }
            while start + LANES <= d {
                $combine_columns::<1>(m, a, start, out);
                start += LANES;
            }
            for i in start..d {
                let mut total = out[i];
                for (row, &a) in m.chunks_exact(d).zip(a) {
                    total = a.mul_add(row[i].load(), total);
                }
                out[i] = total;
            }
        }

        /// N vectors of columns from `start` on.
        #[target_feature(enable = $features)]
        #[inline]
        fn $combine_columns<const N: usize>(m: &[$E], a: &[f32], start: usize, out: &mut [f32]) {
            let d = out.len();
            let out = &mut out[start..].as_chunks_mut::<LANES>().0[..N];
            let mut sums = [zero(); N];
            for i in 0..N {
                sums[i] = load(&out[i]);
            }
            for (row, &a) in m.chunks_exact(d).zip(a) {
                let row = &row[start..].as_chunks::<LANES>().0[..N];
                for i in 0..N {
                    sums[i] = fma(splat(a), $load(&row[i]), sums[i]);
                }
            }
            for i in 0..N {
                store(&mut out[i], sums[i]);
            }
        }
    )*

    #[target_feature(enable = $features)]
    fn delta(step: &DeltaToken, known: &[f32], state: &mut [f32], o: &mut [f32]) {
        let &DeltaToken { decay, beta, q, k, v } = step;
        let d = k.len();
        let (k_whole, q_whole) = (k.as_chunks::<LANES>().0, q[..d].as_chunks::<LANES>().0);
        for (r, row) in state.chunks_exact_mut(d).enumerate() {
            let u = beta * (v[r] - decay * known[r]);
            let mut sums = zero();
            for ((s, k), q) in row.as_chunks_mut::<LANES>().0.iter_mut().zip(k_whole).zip(q_whole)
            {
                let new = fma(splat(u), load(k), mul(splat(decay), load(s)));
                store(s, new);
                sums = fma(new, load(q), sums);
            }
            let mut total = sum(sums);
            for i in k_whole.len() * LANES..d {
                row[i] = u.mul_add(k[i], decay * row[i]);
                total = row[i].mul_add(q[i], total);
            }
            o[r] = total;
        }
    }

    #[target_feature(enable = $features)]
    fn conv(x: Taps, w: &[[f32; 4]], out: &mut [f32]) {
        let n = out.len();
        let [x0, x1, x2, x3] = [&x[0][..n], &x[1][..n], &x[2][..n], &x[3][..n]];
        let w = &w[..n];
        for i in 0..n {
            let w = &w[i];
            let sum = x3[i].mul_add(w[3], x2[i].mul_add(w[2], x1[i].mul_add(w[1], x0[i] * w[0])));
            out[i] = $crate::cpu::kernels::silu(sum);
        }
    }

    #[target_feature(enable = $features)]
    fn silu(x: &mut [f32]) {
        for x in x {
            *x = $crate::cpu::kernels::silu(*x);
        }
    }

    #[target_feature(enable = $features)]
    fn sigmoid(x: &mut [f32]) {
        for x in x {
            *x = $crate::cpu::kernels::sigmoid(*x);
        }
    }

    #[target_feature(enable = $features)]
    fn exp(x: &mut [f32], most: f32) {
        for x in x {
            *x = $crate::cpu::kernels::exp(*x - most);
        }
    }
} }
pub(super) use kernels;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_right_to_the_last_places() {
        let mut worst = 0.0f64;
        for i in -87_000..88_000 {
            let x = i as f32 * 1e-3;
            let want = f64::from(x).exp();
            worst = worst.max((f64::from(exp(x)) - want).abs() / want);
        }
        assert!(worst < 1.5e-7, "off by {worst:e}");
        assert_eq!(exp(0.0), 1.0);
        assert!(exp(f32::NAN).is_nan());
        assert!(exp(f32::INFINITY) > 2e38 && exp(f32::INFINITY) < f32::INFINITY);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
    }

    #[test]
    fn silu_is_right_far_out() {
        assert_eq!(silu(100.0), 100.0);
        assert!(silu(-100.0) <= 0.0 && silu(-100.0) > -1e-36);
        assert_eq!(silu(0.0), 0.0);
        assert!((silu(1.0) - 0.731_058_6).abs() < 1e-7);
    }
}

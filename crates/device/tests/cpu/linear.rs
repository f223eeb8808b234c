//! `linear_q4` and `linear_q8`.

use crate::harness::*;
use lily_device::cpu::Isa;
use lily_device::ops::*;

fn run(m: &mut Machine, w: &Matrix, rows: usize, x: &[f32]) -> Vec<f32> {
    let cols = w.cols;
    let tokens = x.len() / cols;
    let (wv, xv, y) = (m.bytes(&w.bytes()), m.f32(x), m.out(tokens * rows));
    let (tokens, rows, cols) = (tokens as u32, rows as u32, cols as u32);
    match w.bits {
        4 => m.run(LinearQ4 { w: wv, x: xv, y, tokens, rows, cols }),
        _ => m.run(LinearQ8 { w: wv, x: xv, y, tokens, rows, cols }),
    }
    m.get(y)
}

/// A product may be off by 1e-6 of the sum of its terms' magnitudes: 16 rounding errors of f32,
/// where the longest chain of additions into one accumulator stands at cols / 8. Below the
/// normal numbers each term may lose 7e-46.
fn check(w: &Matrix, rows: usize, x: &[f32]) -> Vec<(Isa, Vec<f32>)> {
    let mut expected = Vec::new();
    for x in x.chunks_exact(w.cols) {
        for r in 0..rows {
            let (value, size) = w.dot(r, x);
            expected.push(Expected { value, within: 1e-6 * size + 1e-43 });
        }
    }
    let name = format!("q{} {rows} x {}, {} values", w.bits, w.cols, x.len());
    everywhere(&name, &expected, |m| run(m, w, rows, x))
}

fn every_tile_edge(bits: usize) {
    let mut rng = Rng(1);
    for rows in [1, 2, 3, 4, 5, 7, 8, 9, 17] {
        for tokens in [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 16, 17, 33] {
            let w = Matrix::random(&mut rng, bits, rows, 128);
            check(&w, rows, &rng.normals(tokens * 128));
        }
    }
    for cols in [64, 192, 320, 2048] {
        for tokens in [1, 2, 9] {
            let w = Matrix::random(&mut rng, bits, 33, cols);
            check(&w, 33, &rng.normals(tokens * cols));
        }
    }
}

#[test]
fn linear_q4() {
    every_tile_edge(4);
}

#[test]
fn linear_q8() {
    every_tile_edge(8);
}

#[test]
fn a_batch_is_its_rows_alone_and_threads_share_large_products() {
    let mut rng = Rng(2);
    for (bits, rows, cols, tokens) in [(4, 515, 512, 21), (8, 257, 512, 21), (4, 1031, 2048, 1)] {
        let w = Matrix::random(&mut rng, bits, rows, cols);
        let x = rng.normals(tokens * cols);
        let whole = check(&w, rows, &x);
        for t in [0, 1, tokens / 2, tokens - 1].into_iter().filter(|t| *t < tokens) {
            alone("linear", &whole, t * rows..(t + 1) * rows, |m| {
                run(m, &w, rows, &x[t * cols..][..cols])
            });
        }
        // Other company: the same rows in a batch of three.
        if tokens > 3 {
            alone("linear", &whole, 2 * rows..5 * rows, |m| {
                run(m, &w, rows, &x[2 * cols..5 * cols])
            });
        }
    }
}

#[test]
fn extremes() {
    let mut rng = Rng(3);
    for bits in [4, 8] {
        let w = Matrix::random(&mut rng, bits, 9, 128);
        // Activations from denormal to huge, zeros of both signs, and zero weights.
        for size in [1e-41, 1e-30, 1e18, 0.0, -0.0] {
            let x: Vec<f32> = rng.normals(3 * 128).iter().map(|x| x * size).collect();
            check(&w, 9, &x);
        }
        // Scales and biases from denormal to huge.
        for size in [1e-39, 1e-30, 1e15] {
            let mut w = w.clone();
            for pair in w.scales.iter_mut().chain(&mut w.biases) {
                *pair = half::bf16::from_f32(pair.to_f32() * size);
            }
            check(&w, 9, &rng.normals(3 * 128));
        }
        let mut zero = w.clone();
        zero.scales.fill(half::bf16::ZERO);
        zero.biases.fill(half::bf16::ZERO);
        for (isa, y) in check(&zero, 9, &rng.normals(2 * 128)) {
            assert!(y.iter().all(|y| *y == 0.0), "{isa}");
        }
    }
}

#[test]
fn a_nan_stays_in_its_own_row() {
    let mut rng = Rng(4);
    let w = Matrix::random(&mut rng, 4, 6, 64);
    let mut x = rng.normals(9 * 64);
    x[3 * 64 + 17] = f32::NAN;
    for isa in lily_device::cpu::isa::available() {
        let y = run(&mut Machine::new(isa, 1), &w, 6, &x);
        for (t, y) in y.chunks_exact(6).enumerate() {
            assert!(y.iter().all(|y| y.is_nan() == (t == 3)), "{isa}, row {t}: {y:?}");
        }
    }
}

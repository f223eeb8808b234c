//! The rows that work on vectors alone: embedding, norms, gates, zero.

use crate::harness::*;
use lily_device::cpu::{Isa, isa};
use lily_device::ops::*;

const EPS: f32 = 1e-6;
/// Sizes around every vector width.
const DIMS: [usize; 8] = [1, 4, 15, 16, 17, 64, 100, 2048];

/// x / rms(x) * w in f64. Rounding the result costs 6e-8 of it; f32 sums and steps some more.
fn normed(x: &[f32], w: &[f32]) -> Vec<Expected> {
    let squares: f64 = x.iter().map(|x| f64::from(*x).powi(2)).sum();
    let rms = (squares / x.len() as f64 + f64::from(EPS)).sqrt();
    let row = x.iter().zip(w).map(|(x, w)| f64::from(*x) / rms * f64::from(*w));
    row.map(|value| Expected { value, within: 1e-6 * value.abs() + 1e-40 }).collect()
}

#[test]
fn embed() {
    let mut rng = Rng(1);
    for dim in [64, 192, 2048] {
        let table = Matrix::random(&mut rng, 4, 11, dim);
        let ids = [3, 0, 10, 3, 7];
        // A weight is scale * q + bias, rounded once or twice to f32.
        let expected = ids.iter().flat_map(|&id| (0..dim).map(move |i| (id, i)));
        let expected = expected.map(|(id, i)| table.at(id as usize, i));
        let expected: Vec<_> =
            expected.map(|value| Expected { value, within: 1.2e-7 * value.abs() + 1e-8 }).collect();
        everywhere("embed", &expected, |m| {
            let x = m.out(ids.len() * dim);
            let op = Embed {
                ids: m.u32(&ids),
                table: m.bytes(&table.bytes()),
                x,
                tokens: ids.len() as u32,
                vocab: 11,
                dim: dim as u32,
            };
            m.run(op);
            m.get(x)
        });
    }
}

#[test]
#[should_panic(expected = "token id 11 of 11")]
fn embed_refuses_an_id_past_the_table() {
    let mut m = Machine::new(Isa::Scalar, 1);
    let table = Matrix::random(&mut Rng(1), 4, 11, 64);
    let op = Embed {
        ids: m.u32(&[11]),
        table: m.bytes(&table.bytes()),
        x: m.out(64),
        tokens: 1,
        vocab: 11,
        dim: 64,
    };
    m.run(op);
}

#[test]
fn rms_norm() {
    let mut rng = Rng(2);
    for dim in DIMS {
        for (tokens, size) in [(1, 1.0), (7, 1e-3), (40, 1e4), (3, 0.0), (3, 1e-40), (3, 1e18)] {
            let x: Vec<f32> = rng.normals(tokens * dim).iter().map(|x| x * size).collect();
            let w = rng.normals(dim);
            let expected: Vec<_> = x.chunks_exact(dim).flat_map(|x| normed(x, &w)).collect();
            let run = |m: &mut Machine, x: &[f32]| {
                let y = m.out(x.len());
                let tokens = (x.len() / dim) as u32;
                let op =
                    RmsNorm { x: m.f32(x), w: m.f32(&w), y, tokens, dim: dim as u32, eps: EPS };
                m.run(op);
                m.get(y)
            };
            let whole = everywhere(&format!("rms_norm {dim}"), &expected, |m| run(m, &x));
            alone("rms_norm", &whole, (tokens - 1) * dim..tokens * dim, |m| {
                run(m, &x[(tokens - 1) * dim..])
            });
        }
    }
}

#[test]
fn add_rms_norm() {
    let mut rng = Rng(3);
    for dim in DIMS {
        let tokens = 5;
        let (x, d, w) = (rng.normals(tokens * dim), rng.normals(tokens * dim), rng.normals(dim));
        let sum: Vec<f32> = x.iter().zip(&d).map(|(x, d)| x + d).collect();
        // The sum is one rounding: exact here.
        let mut expected: Vec<_> =
            sum.iter().map(|x| Expected { value: f64::from(*x), within: 0.0 }).collect();
        expected.extend(sum.chunks_exact(dim).flat_map(|x| normed(x, &w)));
        everywhere(&format!("add_rms_norm {dim}"), &expected, |m| {
            let (xv, y) = (m.f32(&x), m.out(tokens * dim));
            let (tokens, dim) = (tokens as u32, dim as u32);
            let op = AddRmsNorm { x: xv, d: m.f32(&d), w: m.f32(&w), y, tokens, dim, eps: EPS };
            m.run(op);
            [m.get(xv), m.get(y)].concat()
        });
    }
}

#[test]
fn output_norm() {
    let mut rng = Rng(4);
    for dim in DIMS {
        let (tokens, rows) = (6, [5, 0, 3]);
        let (x, d, w) = (rng.normals(tokens * dim), rng.normals(tokens * dim), rng.normals(dim));
        let sum: Vec<f32> = x.iter().zip(&d).map(|(x, d)| x + d).collect();
        let expected: Vec<_> =
            rows.iter().flat_map(|&r| normed(&sum[r as usize * dim..][..dim], &w)).collect();
        everywhere(&format!("output_norm {dim}"), &expected, |m| {
            let y = m.out(rows.len() * dim);
            let op = OutputNorm {
                x: m.f32(&x),
                d: m.f32(&d),
                rows: m.u32(&rows),
                w: m.f32(&w),
                y,
                tokens: tokens as u32,
                outputs: rows.len() as u32,
                dim: dim as u32,
                eps: EPS,
            };
            m.run(op);
            m.get(y)
        });
    }
}

#[test]
fn gated_norm() {
    let mut rng = Rng(5);
    for (heads, head_dim, tokens) in [(1, 1, 1), (3, 20, 4), (4, 32, 3), (2, 128, 5), (32, 128, 3)]
    {
        let (inner, z_at) = (heads * head_dim, 7);
        let width = inner + 12;
        let o = rng.normals(tokens * inner);
        // Gates far out on both sides: silu must neither overflow nor lose its tail.
        let p: Vec<f32> = rng.normals(tokens * width).iter().map(|x| x * 20.0).collect();
        let w = rng.normals(head_dim);
        let mut expected = Vec::new();
        for t in 0..tokens {
            for h in 0..heads {
                let row = normed(&o[t * inner + h * head_dim..][..head_dim], &w);
                for (i, e) in row.iter().enumerate() {
                    let z = f64::from(p[t * width + z_at + h * head_dim + i]);
                    let value = e.value * z * sigmoid(z);
                    expected.push(Expected { value, within: 2e-6 * value.abs() + 1e-37 });
                }
            }
        }
        let run = |m: &mut Machine, o: &[f32], p: &[f32]| {
            let ov = m.f32(o);
            let op = GatedNorm {
                o: ov,
                p: m.f32(p),
                w: m.f32(&w),
                tokens: (o.len() / inner) as u32,
                heads: heads as u32,
                head_dim: head_dim as u32,
                width: width as u32,
                z_at: z_at as u32,
                eps: EPS,
            };
            m.run(op);
            m.get(ov)
        };
        let whole = everywhere("gated_norm", &expected, |m| run(m, &o, &p));
        for t in 0..tokens {
            alone("gated_norm", &whole, t * inner..(t + 1) * inner, |m| {
                run(m, &o[t * inner..][..inner], &p[t * width..][..width])
            });
        }
    }
}

#[test]
fn zero_clears_its_words_and_no_more() {
    for isa in isa::available() {
        let mut m = Machine::new(isa, 2);
        let y = m.u32(&[9; 40]);
        m.run(Zero { y: y.slice(4, 36 * 4), words: 35 });
        assert_eq!(m.get_u32(y), [vec![9], vec![0; 35], vec![9; 4]].concat(), "{isa}");
    }
}

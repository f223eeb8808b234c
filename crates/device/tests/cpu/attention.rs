//! `qk_rope` and `attend`: positions, blocks, and both sizes of cache elements.

use crate::harness::*;
use half::bf16;
use lily_device::ops::*;

const EPS: f32 = 1e-6;
const BLOCK: usize = KV_BLOCK as usize;

#[derive(Clone, Copy)]
struct Shape {
    q_heads: usize,
    kv_heads: usize,
    head_dim: usize,
    rotary: usize,
    kv_bytes: usize,
}

impl Shape {
    fn width(&self) -> usize {
        (2 * self.q_heads + 2 * self.kv_heads) * self.head_dim
    }
}

/// Which block holds which part of each slot: all different, in random order.
struct Pages {
    slots: usize,
    max_blocks: usize,
    kv_blocks: usize,
    table: Vec<u32>,
}

impl Pages {
    fn random(rng: &mut Rng, slots: usize, max_blocks: usize) -> Pages {
        let kv_blocks = slots * max_blocks + 2;
        let table = rng.distinct(slots * max_blocks, kv_blocks);
        let table = table.into_iter().map(|b| b as u32).collect();
        Pages { slots, max_blocks, kv_blocks, table }
    }

    fn at(&self, shape: &Shape, slot: usize, head: usize, pos: usize) -> usize {
        let block = self.table[slot * self.max_blocks + pos / BLOCK] as usize;
        ((block * shape.kv_heads + head) * BLOCK + pos % BLOCK) * shape.head_dim
    }
}

/// Cache elements as bytes and back.
fn pack(shape: &Shape, values: &[f32]) -> Vec<u8> {
    match shape.kv_bytes {
        2 => values.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes()).collect(),
        _ => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
    }
}

fn unpack(shape: &Shape, words: &[u32]) -> Vec<f32> {
    let halves = |w: &u32| [f32::from_bits(w << 16), f32::from_bits(w & 0xffff_0000)];
    match shape.kv_bytes {
        2 => words.iter().flat_map(halves).collect(),
        _ => words.iter().map(|w| f32::from_bits(*w)).collect(),
    }
}

/// rope[pos]: cosines, then sines, as any angles would do.
fn angles(shape: &Shape, positions: usize) -> Vec<f32> {
    let half = shape.rotary / 2;
    let angle = |pos: usize, j: usize| pos as f64 * 1e4f64.powf(-(j as f64) / half as f64);
    let row = |pos: usize| {
        let a = (0..half).map(move |j| angle(pos, j));
        a.clone().map(f64::cos).chain(a.map(f64::sin)).map(|x| x as f32).collect::<Vec<_>>()
    };
    (0..positions).flat_map(row).collect()
}

struct Rope<'a> {
    shape: Shape,
    pages: &'a Pages,
    q_norm: &'a [f32],
    k_norm: &'a [f32],
    rope: &'a [f32],
    cache: &'a [f32],
}

impl Rope<'_> {
    /// Returns p, then the keys' and the values' cache.
    fn run(&self, m: &mut Machine, batch: &Batch, p: &[f32]) -> [Vec<f32>; 3] {
        let s = &self.shape;
        let cache = pack(s, self.cache);
        let (pv, k_cache, v_cache) = (m.f32(p), m.bytes(&cache), m.bytes(&cache));
        let op = QkRope {
            p: pv,
            q_norm: m.f32(self.q_norm),
            k_norm: m.f32(self.k_norm),
            rope: m.f32(self.rope),
            span_of: m.u32(&batch.span_of()),
            span: m.u32(&batch.spans()),
            blocks: m.u32(&self.pages.table),
            k_cache,
            v_cache,
            tokens: batch.tokens() as u32,
            spans: batch.0.len() as u32,
            slots: self.pages.slots as u32,
            max_blocks: self.pages.max_blocks as u32,
            kv_blocks: self.pages.kv_blocks as u32,
            positions: (self.rope.len() / s.rotary.max(1)) as u32,
            q_heads: s.q_heads as u32,
            kv_heads: s.kv_heads as u32,
            head_dim: s.head_dim as u32,
            rotary: s.rotary as u32,
            kv_bytes: s.kv_bytes as u32,
            eps: EPS,
        };
        m.run(op);
        let (k, v) = (m.get_u32(k_cache), m.get_u32(v_cache));
        [m.get(pv), unpack(s, &k), unpack(s, &v)]
    }
}

fn rotated(x: &[f32], w: &[f32], rope: &[f32]) -> Vec<f64> {
    let half = rope.len() / 2;
    let squares: f64 = x.iter().map(|x| f64::from(*x).powi(2)).sum();
    let rms = (squares / x.len() as f64 + f64::from(EPS)).sqrt();
    let mut y: Vec<f64> =
        x.iter().zip(w).map(|(x, w)| f64::from(*x) / rms * f64::from(*w)).collect();
    for j in 0..half {
        let (a, b, cos, sin) = (y[j], y[j + half], f64::from(rope[j]), f64::from(rope[j + half]));
        y[j] = a * cos - b * sin;
        y[j + half] = a * sin + b * cos;
    }
    y
}

#[test]
fn qk_rope() {
    let mut rng = Rng(1);
    for (q_heads, kv_heads, head_dim, rotary) in
        [(4, 2, 64, 16), (2, 2, 20, 20), (8, 1, 32, 8), (16, 2, 256, 64)]
    {
        for kv_bytes in [2, 4] {
            let shape = Shape { q_heads, kv_heads, head_dim, rotary, kv_bytes };
            let pages = Pages::random(&mut rng, 4, 3);
            let batch = Batch(vec![(1, 2, 0), (3, 0, 126), (1, 3, 383), (5, 1, 254)]);
            let elements = pages.kv_blocks * kv_heads * BLOCK * head_dim;
            let rope = Rope {
                shape,
                pages: &pages,
                q_norm: &rng.normals(head_dim),
                k_norm: &rng.normals(head_dim),
                rope: &angles(&shape, 384),
                cache: &vec![7.0; elements],
            };
            let p = rng.normals(batch.tokens() * shape.width());
            // f32 steps on f64 or f32 norms; a rotation adds two products of norms <= |w| 2.5.
            let exact = |value: f64| Expected { value, within: 2e-6 * value.abs() + 2e-6 };
            // bf16 keeps 8 bits: half a step is 2^-8 of the value at most.
            let stored = |value: f64| match kv_bytes {
                2 => Expected { value, within: value.abs() / 256.0 + 3e-6 },
                _ => exact(value),
            };
            let same = |value: f32| Expected { value: f64::from(value), within: 0.0 };
            let mut expect_p = Vec::new();
            let mut expect_k = vec![same(7.0); elements];
            let mut expect_v = expect_k.clone();
            for (p, (slot, pos, _)) in p.chunks_exact(shape.width()).zip(batch.rows()) {
                let angles = &rope.rope[pos * rotary..][..rotary];
                for head in p[..2 * q_heads * head_dim].chunks_exact(2 * head_dim) {
                    expect_p.extend(
                        rotated(&head[..head_dim], rope.q_norm, angles).into_iter().map(exact),
                    );
                    expect_p.extend(head[head_dim..].iter().map(|x| same(*x)));
                }
                let kv = &p[2 * q_heads * head_dim..];
                for head in 0..kv_heads {
                    let at = pages.at(&shape, slot, head, pos);
                    let k = rotated(&kv[head * head_dim..][..head_dim], rope.k_norm, angles);
                    let v = &kv[(kv_heads + head) * head_dim..][..head_dim];
                    for i in 0..head_dim {
                        expect_k[at + i] = stored(k[i]);
                        let rounded = match kv_bytes {
                            2 => bf16::from_f32(v[i]).to_f32(),
                            _ => v[i],
                        };
                        expect_v[at + i] = same(rounded);
                    }
                }
            }
            let expected = [expect_p, expect_k, expect_v].concat();
            let queries = 2 * q_heads * head_dim;
            // Keys and values need not stay in p: only its queries and gates are compared.
            let run = |m: &mut Machine, batch: &Batch, p: &[f32]| {
                let [p, k, v] = rope.run(m, batch, p);
                let p: Vec<f32> =
                    p.chunks_exact(shape.width()).flat_map(|p| p[..queries].to_vec()).collect();
                [p, k, v]
            };
            let whole = everywhere("qk_rope", &expected, |m| run(m, &batch, &p).concat());
            for (member, rows) in batch.members() {
                let part = rows.start * queries..rows.end * queries;
                alone("qk_rope", &whole, part, |m| {
                    let p = &p[rows.start * shape.width()..rows.end * shape.width()];
                    run(m, &member, p)[0].clone()
                });
            }
        }
    }
}

#[test]
fn values_are_stored_as_bf16_rounded_to_nearest_even() {
    let shape = Shape { q_heads: 1, kv_heads: 1, head_dim: 8, rotary: 0, kv_bytes: 2 };
    let pages = Pages { slots: 1, max_blocks: 1, kv_blocks: 1, table: vec![0] };
    let mut p = vec![1.0; shape.width()];
    let v = [0x3f80_8000, 0x3f81_8000, 0x3f80_8001, 0x3f80_7fff, 0x0000_8000, 0x8001_8000, 0, 1];
    p[24..].copy_from_slice(&v.map(f32::from_bits));
    let rounded = [0x3f80, 0x3f82, 0x3f81, 0x3f80, 0x0000, 0x8002, 0, 0];
    for isa in lily_device::cpu::isa::available() {
        let rope = Rope {
            shape,
            pages: &pages,
            q_norm: &[1.0; 8],
            k_norm: &[1.0; 8],
            rope: &[],
            cache: &[0.0; 8 * BLOCK],
        };
        let [.., values] = rope.run(&mut Machine::new(isa, 1), &Batch(vec![(1, 0, 0)]), &p);
        let bits: Vec<u32> = values[..8].iter().map(|v| v.to_bits() >> 16).collect();
        assert_eq!(bits, rounded, "{isa}");
    }
}

struct Attention<'a> {
    shape: Shape,
    pages: &'a Pages,
    k: &'a [f32],
    v: &'a [f32],
}

impl Attention<'_> {
    fn run(&self, m: &mut Machine, batch: &Batch, p: &[f32]) -> Vec<f32> {
        let s = &self.shape;
        let ends = batch.0.iter().map(|(rows, _, at)| (at + rows) as u32);
        let o = m.out(batch.tokens() * s.q_heads * s.head_dim);
        let op = Attend {
            p: m.f32(p),
            k_cache: m.bytes(&pack(s, self.k)),
            v_cache: m.bytes(&pack(s, self.v)),
            span_of: m.u32(&batch.span_of()),
            span: m.u32(&batch.spans()),
            blocks: m.u32(&self.pages.table),
            o,
            tokens: batch.tokens() as u32,
            spans: batch.0.len() as u32,
            slots: self.pages.slots as u32,
            max_blocks: self.pages.max_blocks as u32,
            kv_blocks: self.pages.kv_blocks as u32,
            context: ends.clone().sum(),
            longest: ends.max().unwrap_or(0),
            q_heads: s.q_heads as u32,
            kv_heads: s.kv_heads as u32,
            head_dim: s.head_dim as u32,
            kv_bytes: s.kv_bytes as u32,
        };
        m.run(op);
        m.get(o)
    }

    /// Scores of size s are off by 1e-6 s at most, and so are the weights, relatively; the
    /// weighted sum adds roundings of its own. `size` bounds the values' magnitude.
    fn expected(&self, batch: &Batch, p: &[f32], size: f64) -> Vec<Expected> {
        let s = &self.shape;
        let d = s.head_dim;
        let mut expected = Vec::new();
        for (p, (slot, pos, _)) in p.chunks_exact(s.width()).zip(batch.rows()) {
            for h in 0..s.q_heads {
                let q = &p[2 * h * d..][..d];
                let gate = &p[(2 * h + 1) * d..][..d];
                let at = |pos| self.pages.at(s, slot, h / (s.q_heads / s.kv_heads), pos);
                let (mut scores, mut most) = (Vec::new(), 0.0f64);
                for pos in 0..=pos {
                    let k = &self.k[at(pos)..][..d];
                    let terms = || q.iter().zip(k).map(|(q, k)| f64::from(*q) * f64::from(*k));
                    scores.push(terms().sum::<f64>() / (d as f64).sqrt());
                    most = most.max(terms().map(f64::abs).sum::<f64>() / (d as f64).sqrt());
                }
                let top = scores.iter().fold(f64::MIN, |a, b| a.max(*b));
                let weights: Vec<f64> = scores.iter().map(|s| (s - top).exp()).collect();
                let total: f64 = weights.iter().sum();
                for i in 0..d {
                    let v = |pos: usize| f64::from(self.v[at(pos) + i]);
                    let sum: f64 = weights.iter().enumerate().map(|(pos, w)| w * v(pos)).sum();
                    let gate = sigmoid(f64::from(gate[i]));
                    let within = (1e-6 * most + 2e-6) * size * gate + 1e-37;
                    expected.push(Expected { value: sum / total * gate, within });
                }
            }
        }
        expected
    }

    fn check(&self, name: &str, batch: &Batch, p: &[f32], size: f64) {
        let row = self.shape.q_heads * self.shape.head_dim;
        let expected = self.expected(batch, p, size);
        let whole = everywhere(name, &expected, |m| self.run(m, batch, p));
        for (member, rows) in batch.members() {
            let p = &p[rows.start * self.shape.width()..rows.end * self.shape.width()];
            alone(name, &whole, rows.start * row..rows.end * row, |m| self.run(m, &member, p));
        }
    }
}

#[test]
fn attend() {
    let mut rng = Rng(2);
    for (q_heads, kv_heads, head_dim) in [(4, 2, 64), (3, 3, 20), (8, 1, 32), (16, 2, 256)] {
        for kv_bytes in [2, 4] {
            let shape = Shape { q_heads, kv_heads, head_dim, rotary: 0, kv_bytes };
            let pages = Pages::random(&mut rng, 6, 3);
            let elements = pages.kv_blocks * kv_heads * BLOCK * head_dim;
            let bf16s = |rng: &mut Rng| -> Vec<f32> {
                rng.normals(elements).iter().map(|x| bf16::from_f32(*x).to_f32()).collect()
            };
            let (k, v) = (bf16s(&mut rng), bf16s(&mut rng));
            let attention = Attention { shape, pages: &pages, k: &k, v: &v };
            // Contexts on both sides of a block's edge, decode and prefill in one batch.
            let batch = Batch(vec![
                (1, 0, 0),
                (1, 1, 126),
                (1, 2, 127),
                (1, 3, 128),
                (4, 4, 254),
                (2, 5, 300),
            ]);
            let p = rng.normals(batch.tokens() * shape.width());
            attention.check("attend", &batch, &p, 5.0);
        }
    }
}

#[test]
fn attend_at_extremes() {
    let mut rng = Rng(3);
    let shape = Shape { q_heads: 2, kv_heads: 1, head_dim: 32, rotary: 0, kv_bytes: 4 };
    let pages = Pages::random(&mut rng, 1, 8);
    let elements = pages.kv_blocks * BLOCK * 32;
    let (k, v) = (rng.normals(elements), rng.normals(elements));
    let attention = Attention { shape, pages: &pages, k: &k, v: &v };
    let batch = Batch(vec![(3, 0, 1000)]);
    // From all weights equal to all weight on one position, and gates shut or open.
    for size in [0.0, 1e-40, 1.0, 50.0, 300.0] {
        let p: Vec<f32> = rng.normals(3 * shape.width()).iter().map(|x| x * size).collect();
        attention.check("attend", &batch, &p, 5.0);
    }
    // Scores that overflow exp by far, and agree: a plain mean of the values.
    let far = vec![1e3; elements];
    let attention = Attention { shape, pages: &pages, k: &far, v: &v };
    attention.check("attend", &batch, &vec![1.0; 3 * shape.width()], 5.0);
}

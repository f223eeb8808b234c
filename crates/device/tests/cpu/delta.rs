//! The delta net: convolution and gates, the state of both, the recurrence in its two forms.

use crate::harness::*;
use lily_device::View;
use lily_device::cpu::isa;
use lily_device::ops::*;

#[derive(Clone, Copy)]
struct Shape {
    k_heads: usize,
    v_heads: usize,
    head_dim: usize,
}

impl Shape {
    fn channels(&self) -> usize {
        (2 * self.k_heads + self.v_heads) * self.head_dim
    }
    fn width(&self) -> usize {
        self.channels() + self.v_heads * self.head_dim + 2 * self.v_heads
    }
    fn inner(&self) -> usize {
        self.v_heads * self.head_dim
    }
    fn state(&self) -> usize {
        self.inner() * self.head_dim
    }
}

const SHAPES: [Shape; 4] = [
    Shape { k_heads: 2, v_heads: 4, head_dim: 32 },
    Shape { k_heads: 1, v_heads: 3, head_dim: 20 },
    Shape { k_heads: 2, v_heads: 2, head_dim: 7 },
    Shape { k_heads: 1, v_heads: 2, head_dim: 128 },
];

struct Conv {
    shape: Shape,
    w: Vec<f32>,
    a_log: Vec<f32>,
    dt_bias: Vec<f32>,
    /// Of all slots.
    conv: Vec<f32>,
    slots: usize,
}

impl Conv {
    fn random(rng: &mut Rng, shape: Shape, slots: usize) -> Conv {
        Conv {
            shape,
            w: rng.normals(shape.channels() * 4),
            a_log: rng.normals(shape.v_heads),
            dt_bias: rng.normals(shape.v_heads).iter().map(|x| x * 5.0).collect(),
            conv: rng.normals(slots * 3 * shape.channels()),
            slots,
        }
    }

    /// qkv and gates.
    fn run(&self, m: &mut Machine, batch: &Batch, p: &[f32]) -> [Vec<f32>; 2] {
        let s = &self.shape;
        let tokens = batch.tokens();
        let (qkv, gates) = (m.out(tokens * s.channels()), m.out(tokens * 2 * s.v_heads));
        let op = DeltaConv {
            p: m.f32(p),
            w: m.f32(&self.w),
            a_log: m.f32(&self.a_log),
            dt_bias: m.f32(&self.dt_bias),
            conv: m.f32(&self.conv),
            span_of: m.u32(&batch.span_of()),
            span: m.u32(&batch.spans()),
            qkv,
            gates,
            tokens: tokens as u32,
            spans: batch.0.len() as u32,
            slots: self.slots as u32,
            k_heads: s.k_heads as u32,
            v_heads: s.v_heads as u32,
            head_dim: s.head_dim as u32,
        };
        m.run(op);
        [m.get(qkv), m.get(gates)]
    }

    fn run_state(&self, m: &mut Machine, batch: &Batch, p: &[f32]) -> Vec<f32> {
        let conv = m.f32(&self.conv);
        let op = ConvState {
            p: m.f32(p),
            span: m.u32(&batch.spans()),
            conv,
            tokens: batch.tokens() as u32,
            spans: batch.0.len() as u32,
            slots: self.slots as u32,
            channels: self.shape.channels() as u32,
            width: self.shape.width() as u32,
        };
        m.run(op);
        m.get(conv)
    }

    /// The rows of one span behind those of its slot: f32 (3 + rows, channels).
    fn window(&self, slot: usize, p: &[f32]) -> Vec<f32> {
        let n = self.shape.channels();
        let mut rows = self.conv[slot * 3 * n..][..3 * n].to_vec();
        p.chunks_exact(self.shape.width()).for_each(|p| rows.extend(&p[..n]));
        rows
    }

    fn expected(&self, batch: &Batch, p: &[f32]) -> [Vec<Expected>; 2] {
        let s = &self.shape;
        let (n, d) = (s.channels(), s.head_dim);
        let (mut qkv, mut gates) = (Vec::new(), Vec::new());
        for (member, rows) in batch.members() {
            let p = &p[rows.start * s.width()..rows.end * s.width()];
            let window = self.window(member.0[0].1, p);
            for (i, p) in p.chunks_exact(s.width()).enumerate() {
                let mut row = Vec::new();
                for ch in 0..n {
                    let terms = (0..4).map(|j| {
                        f64::from(window[(i + j) * n + ch]) * f64::from(self.w[ch * 4 + j])
                    });
                    let sum: f64 = terms.clone().sum();
                    let size: f64 = terms.map(f64::abs).sum();
                    row.push((sum * sigmoid(sum), size));
                }
                for (head, c) in row.chunks_exact(d).enumerate() {
                    let length = (c.iter().map(|c| c.0 * c.0).sum::<f64>() + 1e-6).sqrt();
                    let scale = match head {
                        h if h < s.k_heads => 1.0 / length / (d as f64).sqrt(),
                        h if h < 2 * s.k_heads => 1.0 / length,
                        _ => 1.0,
                    };
                    // Four products and a silu in f32, then the length, whose own error is that
                    // of the channels.
                    let size = c.iter().map(|c| c.1).fold(0.0, f64::max);
                    for (c, _) in c {
                        let within = 1e-6 * size * scale + 1e-6 * (c * scale).abs();
                        qkv.push(Expected { value: c * scale, within });
                    }
                }
                let (b, a) = p[s.width() - 2 * s.v_heads..].split_at(s.v_heads);
                let g = (0..s.v_heads).map(|j| {
                    let x = f64::from(a[j]) + f64::from(self.dt_bias[j]);
                    let softplus = if x > 30.0 { x } else { x.exp().ln_1p() };
                    -f64::from(self.a_log[j]).exp() * softplus
                });
                let beta = b.iter().map(|b| sigmoid(f64::from(*b)));
                let both = g.chain(beta).map(|value| {
                    // The sum a + dt_bias is rounded, and softplus has slope 1 at most.
                    Expected { value, within: 4e-6 * value.abs() + 1e-37 }
                });
                gates.extend(both);
            }
        }
        [qkv, gates]
    }
}

/// Spans shorter than the taps, and longer; slots out of order.
fn ragged() -> Batch {
    Batch(vec![(1, 3, 5), (2, 0, 0), (3, 4, 9), (4, 1, 0), (9, 2, 70)])
}

#[test]
fn delta_conv() {
    let mut rng = Rng(1);
    for shape in SHAPES {
        let conv = Conv::random(&mut rng, shape, 5);
        for (batch, size) in [(ragged(), 1.0), (Batch(vec![(70, 1, 3)]), 1.0), (ragged(), 30.0)] {
            let tokens = batch.tokens();
            let p: Vec<f32> =
                rng.normals(tokens * shape.width()).iter().map(|x| x * size).collect();
            let run = |m: &mut Machine, batch: &Batch, p: &[f32]| conv.run(m, batch, p);
            let [qkv, gates] = conv.expected(&batch, &p);
            let whole = everywhere("delta_conv qkv", &qkv, |m| run(m, &batch, &p)[0].clone());
            everywhere("delta_conv gates", &gates, |m| run(m, &batch, &p)[1].clone());
            for (member, rows) in batch.members() {
                let n = shape.channels();
                let p = &p[rows.start * shape.width()..rows.end * shape.width()];
                alone("delta_conv", &whole, rows.start * n..rows.end * n, |m| {
                    run(m, &member, p)[0].clone()
                });
            }
        }
    }
}

#[test]
fn delta_conv_at_extremes() {
    let shape = SHAPES[0];
    for size in [0.0, 1e-40, 1e18] {
        let mut rng = Rng(2);
        let conv = Conv::random(&mut rng, shape, 5);
        let p: Vec<f32> =
            rng.normals(ragged().tokens() * shape.width()).iter().map(|x| x * size).collect();
        for isa in isa::available() {
            for out in conv.run(&mut Machine::new(isa, 1), &ragged(), &p) {
                assert!(out.iter().all(|x| x.is_finite()), "{isa}, size {size}");
            }
        }
    }
}

#[test]
fn conv_state_keeps_the_last_three_raw_rows() {
    let mut rng = Rng(3);
    for shape in SHAPES {
        let conv = Conv::random(&mut rng, shape, 6);
        let batch = ragged();
        let p = rng.normals(batch.tokens() * shape.width());
        let n = 3 * shape.channels();
        // Slot 5 is in no span and stays.
        let mut expected = conv.conv.clone();
        for (member, rows) in batch.members() {
            let slot = member.0[0].1;
            let window =
                conv.window(slot, &p[rows.start * shape.width()..rows.end * shape.width()]);
            expected[slot * n..][..n].copy_from_slice(&window[window.len() - n..]);
        }
        for isa in isa::available() {
            let got = conv.run_state(&mut Machine::new(isa, 3), &batch, &p);
            assert_eq!(got, expected, "{isa}");
        }
    }
}

/// Inputs of the recurrence, and its state before them.
struct Rule {
    shape: Shape,
    slots: usize,
    state: Vec<f32>,
}

/// Which of the two forms.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Form {
    Step,
    Chunk,
}

impl Rule {
    fn random(rng: &mut Rng, shape: Shape, slots: usize) -> Rule {
        let state = rng.normals(slots * shape.state()).iter().map(|x| x * 0.3).collect();
        Rule { shape, slots, state }
    }

    /// Unit keys, queries of length 1 / sqrt(head_dim), values of size 1.
    fn qkv(&self, rng: &mut Rng, tokens: usize) -> Vec<f32> {
        let s = &self.shape;
        let mut qkv = rng.normals(tokens * s.channels());
        for row in qkv.chunks_exact_mut(s.channels()) {
            let keys = row[..2 * s.k_heads * s.head_dim].chunks_exact_mut(s.head_dim);
            for (head, x) in keys.enumerate() {
                let mut length = x.iter().map(|x| x * x).sum::<f32>().sqrt();
                if head < s.k_heads {
                    length *= (s.head_dim as f32).sqrt();
                }
                x.iter_mut().for_each(|x| *x /= length);
            }
        }
        qkv
    }

    fn gates(&self, rng: &mut Rng, tokens: usize, mut g: impl FnMut(&mut Rng) -> f64) -> Vec<f32> {
        let mut gates = Vec::new();
        for _ in 0..tokens {
            gates.extend((0..self.shape.v_heads).map(|_| g(rng) as f32));
            gates.extend((0..self.shape.v_heads).map(|_| rng.uniform() as f32));
        }
        gates
    }

    /// Outputs, then the state of all slots.
    fn run(&self, m: &mut Machine, form: Form, batch: &Batch, x: &[Vec<f32>; 2]) -> Vec<f32> {
        let state = m.f32(&self.state);
        let o = self.enqueue(m, form, batch, x, state);
        [m.get(o), m.get(state)].concat()
    }

    fn enqueue(
        &self,
        m: &mut Machine,
        form: Form,
        batch: &Batch,
        x: &[Vec<f32>; 2],
        state: View,
    ) -> View {
        let tokens = batch.tokens() as u32;
        let (qkv, gates, span) = (m.f32(&x[0]), m.f32(&x[1]), m.u32(&batch.spans()));
        let o = m.out(batch.tokens() * self.shape.inner());
        let (spans, slots) = (batch.0.len() as u32, self.slots as u32);
        let (k_heads, v_heads) = (self.shape.k_heads as u32, self.shape.v_heads as u32);
        let head_dim = self.shape.head_dim as u32;
        match form {
            Form::Step => m.run(DeltaStep {
                qkv,
                gates,
                span,
                state,
                o,
                tokens,
                spans,
                slots,
                k_heads,
                v_heads,
                head_dim,
            }),
            Form::Chunk => m.run(DeltaChunk {
                qkv,
                gates,
                span,
                state,
                o,
                tokens,
                spans,
                slots,
                k_heads,
                v_heads,
                head_dim,
            }),
        }
        o
    }

    /// The definition, S_t = e^g S (I - beta k k^T) + beta v k^T and o = S q, all in f64.
    fn expected(&self, batch: &Batch, x: &[Vec<f32>; 2], tolerance: f64) -> Vec<Expected> {
        let s = &self.shape;
        let d = s.head_dim;
        let mut o = vec![0.0; batch.tokens() * s.inner()];
        let mut state: Vec<f64> = self.state.iter().map(|x| f64::from(*x)).collect();
        for (t, (slot, ..)) in batch.rows().into_iter().enumerate() {
            let qkv: Vec<f64> =
                x[0][t * s.channels()..][..s.channels()].iter().map(|x| f64::from(*x)).collect();
            for j in 0..s.v_heads {
                let key = j * s.k_heads / s.v_heads;
                let q = &qkv[key * d..][..d];
                let k = &qkv[(s.k_heads + key) * d..][..d];
                let v = &qkv[(2 * s.k_heads + j) * d..][..d];
                let decay = f64::from(x[1][t * 2 * s.v_heads + j]).exp();
                let beta = f64::from(x[1][(t * 2 + 1) * s.v_heads + j]);
                let state = &mut state[(slot * s.v_heads + j) * d * d..][..d * d];
                for (r, row) in state.chunks_exact_mut(d).enumerate() {
                    let known: f64 = row.iter().zip(k).map(|(s, k)| decay * s * k).sum();
                    for (s, k) in row.iter_mut().zip(k) {
                        *s = decay * *s + beta * (v[r] - known) * k;
                    }
                    o[t * s.inner() + j * d + r] = row.iter().zip(q).map(|(s, q)| s * q).sum();
                }
            }
        }
        // Errors are relative to the size of the whole result: values of 1 through queries of
        // length 1 / sqrt(d), and states of a few.
        let o_within = tolerance * 3.0 / (d as f64).sqrt();
        let o = o.into_iter().map(|value| Expected { value, within: o_within });
        let state = state.into_iter().map(|value| Expected { value, within: tolerance });
        o.chain(state).collect()
    }

    /// The batch, and its members alone. `tolerance` in units of the values' size.
    fn check(&self, name: &str, form: Form, batch: &Batch, x: &[Vec<f32>; 2], tolerance: f64) {
        let expected = self.expected(batch, x, tolerance);
        let name = format!("{name} {form:?}");
        let whole = everywhere(&name, &expected, |m| self.run(m, form, batch, x));
        for (member, rows) in batch.members() {
            let part = rows.start * self.shape.inner()..rows.end * self.shape.inner();
            let of = |x: &[f32]| {
                let width = x.len() / batch.tokens();
                x[rows.start * width..rows.end * width].to_vec()
            };
            let n = part.len();
            alone(&name, &whole, part, |m| {
                self.run(m, form, &member, &[of(&x[0]), of(&x[1])])[..n].to_vec()
            });
        }
    }
}

/// Rounding a state of size 1 costs 6e-8 a token, and old errors decay with the state; a few
/// f32 dot products of 128 terms add to it.
const SHORT: f64 = 3e-6;

fn every_length(form: Form) {
    let mut rng = Rng(4);
    for shape in SHAPES {
        let rule = Rule::random(&mut rng, shape, 5);
        let lengths = [vec![1], vec![63], vec![64], vec![65], vec![130], vec![1, 3, 66, 1]];
        for lengths in lengths {
            let spans = lengths.iter().enumerate().map(|(i, n)| (*n, (i * 2 + 1) % 5, 0));
            let batch = Batch(spans.collect());
            let gates = rule.gates(&mut rng, batch.tokens(), |rng| -3.0 * rng.uniform().powi(3));
            let x = [rule.qkv(&mut rng, batch.tokens()), gates];
            rule.check(&format!("delta {lengths:?}"), form, &batch, &x, SHORT);
        }
    }
}

#[test]
fn delta_step() {
    every_length(Form::Step);
}

#[test]
fn delta_chunk() {
    every_length(Form::Chunk);
}

fn extreme_decay(form: Form) {
    let mut rng = Rng(5);
    let rule = Rule::random(&mut rng, SHAPES[0], 1);
    let batch = Batch(vec![(150, 0, 0)]);
    let qkv = rule.qkv(&mut rng, 150);
    type Decay = fn(&mut Rng) -> f64;
    let decays: [(&str, Decay); 5] = [
        ("strong", |_| -20.0),
        ("to nothing", |_| -300.0),
        ("none", |_| 0.0),
        ("denormal", |_| -1e-40),
        ("strong or weak", |rng| if rng.below(3) == 0 { -25.0 } else { -1e-3 }),
    ];
    for (name, decay) in decays {
        let gates = rule.gates(&mut rng, 150, decay);
        rule.check(name, form, &batch, &[qkv.clone(), gates], SHORT);
    }
}

#[test]
fn delta_step_at_extreme_decay() {
    extreme_decay(Form::Step);
}

#[test]
fn delta_chunk_at_extreme_decay() {
    extreme_decay(Form::Chunk);
}

/// A thousand tokens that forget almost nothing: rounding errors of the state add up, as a
/// random walk of 1000 steps of 6e-8 times a state of a few.
fn weak_decay(form: Form) {
    let mut rng = Rng(6);
    let rule = Rule::random(&mut rng, SHAPES[0], 1);
    let x = [rule.qkv(&mut rng, 1000), rule.gates(&mut rng, 1000, |rng| -1e-4 * rng.uniform())];
    rule.check("weak decay", form, &Batch(vec![(1000, 0, 0)]), &x, 1e-5);
}

#[test]
fn delta_step_over_a_thousand_tokens_of_weak_decay() {
    weak_decay(Form::Step);
}

#[test]
fn delta_chunk_over_a_thousand_tokens_of_weak_decay() {
    weak_decay(Form::Chunk);
}

/// Cutting a span anywhere and carrying the state gives the same result, in either form.
#[test]
fn delta_rule_cut_in_parts() {
    let mut rng = Rng(7);
    let shape = SHAPES[0];
    let rule = Rule::random(&mut rng, shape, 2);
    let x = [rule.qkv(&mut rng, 150), rule.gates(&mut rng, 150, |rng| -rng.uniform())];
    let expected = rule.expected(&Batch(vec![(150, 1, 0)]), &x, SHORT);
    for form in [Form::Step, Form::Chunk] {
        for cuts in [vec![1, 149], vec![64, 64, 22], vec![63, 2, 85], vec![70, 3, 77]] {
            everywhere(&format!("{form:?} cut {cuts:?}"), &expected, |m| {
                let state = m.f32(&rule.state);
                let (mut at, mut o) = (0, Vec::new());
                for n in &cuts {
                    let part = [&x[0], &x[1]].map(|x| {
                        let width = x.len() / 150;
                        x[at * width..(at + n) * width].to_vec()
                    });
                    let out = rule.enqueue(m, form, &Batch(vec![(*n, 1, at)]), &part, state);
                    o.extend(m.get(out));
                    at += n;
                }
                [o, m.get(state)].concat()
            });
        }
    }
}

/// A part of the step's spans: other rows and slots stay as they were.
#[test]
fn delta_rule_on_some_spans_touches_no_others() {
    let mut rng = Rng(8);
    let shape = SHAPES[0];
    let rule = Rule::random(&mut rng, shape, 3);
    let tokens = 9;
    let x = [rule.qkv(&mut rng, tokens), rule.gates(&mut rng, tokens, |_| -0.1)];
    for isa in isa::available() {
        for form in [Form::Step, Form::Chunk] {
            let mut m = Machine::new(isa, 2);
            let (qkv, gates) = (m.f32(&x[0]), m.f32(&x[1]));
            let (state, o) = (m.f32(&rule.state), m.f32(&vec![5.0; tokens * shape.inner()]));
            let span = m.u32(&[4, 3, 1, 0]);
            let (tokens, k_heads, v_heads) = (9, 2, 4);
            match form {
                Form::Step => m.run(DeltaStep {
                    qkv,
                    gates,
                    span,
                    state,
                    o,
                    tokens,
                    spans: 1,
                    slots: 3,
                    k_heads,
                    v_heads,
                    head_dim: 32,
                }),
                Form::Chunk => m.run(DeltaChunk {
                    qkv,
                    gates,
                    span,
                    state,
                    o,
                    tokens,
                    spans: 1,
                    slots: 3,
                    k_heads,
                    v_heads,
                    head_dim: 32,
                }),
            }
            for (t, row) in m.get(o).chunks_exact(shape.inner()).enumerate() {
                let touched = row.iter().any(|x| *x != 5.0);
                assert_eq!(touched, (4..7).contains(&t), "{isa} {form:?} row {t}");
            }
            let now = m.get(state);
            for slot in 0..3 {
                let part = slot * shape.state()..(slot + 1) * shape.state();
                let same = now[part.clone()] == rule.state[part];
                assert_eq!(same, slot != 1, "{isa} {form:?} slot {slot}");
            }
        }
    }
}

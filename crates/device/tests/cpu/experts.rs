//! Routing and the experts' products.

use crate::harness::*;
use lily_device::cpu::isa;
use lily_device::ops::*;

fn route(m: &mut Machine, logits: &[f32], experts: usize, top: usize) -> (Vec<u32>, Vec<f32>) {
    let tokens = logits.len() / (experts + 1);
    let (ids, weights) = (m.out(tokens * (top + 1)), m.out(tokens * (top + 1)));
    let op = Route {
        logits: m.f32(logits),
        ids,
        weights,
        tokens: tokens as u32,
        experts: experts as u32,
        top: top as u32,
    };
    m.run(op);
    (m.get_u32(ids), m.get(weights))
}

#[test]
fn route_is_a_softmax_cut_to_the_largest() {
    let mut rng = Rng(1);
    for (experts, top, tokens) in [(8, 2, 5), (256, 8, 9), (5, 5, 2), (1, 1, 1), (67, 3, 70)] {
        // Few distinct values, so that there are ties; one row with a hopeless shared gate.
        let mut logits: Vec<f32> =
            (0..tokens * (experts + 1)).map(|_| (rng.normal() * 8.0).round() / 4.0).collect();
        logits[experts] = -200.0;
        let mut want_ids = Vec::new();
        let mut expected = Vec::new();
        for row in logits.chunks_exact(experts + 1) {
            let p: Vec<f64> = row[..experts].iter().map(|l| f64::from(*l).exp()).collect();
            let mut order: Vec<usize> = (0..experts).collect();
            order.sort_by(|a, b| p[*b].total_cmp(&p[*a]).then(a.cmp(b)));
            let total: f64 = order[..top].iter().map(|e| p[*e]).sum();
            want_ids.extend(order[..top].iter().chain([&experts]).map(|e| *e as u32));
            expected.extend(order[..top].iter().map(|e| p[*e] / total));
            expected.push(sigmoid(f64::from(row[experts])));
        }
        // A few roundings in f32 at most; e^-200 is below the smallest f32.
        let expected: Vec<_> = expected
            .iter()
            .map(|&value| Expected { value, within: 1e-6 * value + 1e-45 })
            .collect();
        everywhere("route", &expected, |m| {
            let (ids, weights) = route(m, &logits, experts, top);
            assert_eq!(ids, want_ids);
            weights
        });
    }
}

#[test]
fn route_survives_any_logits() {
    for isa in isa::available() {
        let mut m = Machine::new(isa, 1);
        for extreme in [f32::MAX, f32::MIN, f32::INFINITY, f32::NEG_INFINITY, f32::NAN] {
            let (ids, _) = route(&mut m, &[extreme, 0.0, extreme, 1.0, 0.5], 4, 3);
            let mut sorted = ids.clone();
            sorted.sort();
            sorted.dedup();
            assert!(sorted.len() == 4 && sorted[3] == 4, "{isa}, {extreme}: {ids:?}");
        }
        let (_, weights) = route(&mut m, &[f32::MAX, f32::MIN, 1e30, -1e30, 0.0], 4, 4);
        assert_eq!(weights, [1.0, 0.0, 0.0, 0.0, 0.5], "{isa}");
    }
}

struct Layer {
    experts: usize,
    top: usize,
    hidden: usize,
    dim: usize,
    up: Matrix,
    down: Matrix,
}

impl Layer {
    fn random(rng: &mut Rng, (experts, top, hidden, dim): (usize, usize, usize, usize)) -> Layer {
        let up = Matrix::random(rng, 4, (experts + 1) * 2 * hidden, dim);
        let down = Matrix::random(rng, 4, (experts + 1) * dim, hidden);
        Layer { experts, top, hidden, dim, up, down }
    }

    /// Distinct experts for each token, then the shared one; a few experts are crowded.
    fn ids(&self, rng: &mut Rng, tokens: usize) -> Vec<u32> {
        let mut ids = Vec::new();
        for t in 0..tokens {
            let of = if t % 2 == 0 { self.experts } else { self.top + 1 };
            let chosen = rng.distinct(self.top, of.min(self.experts));
            ids.extend(chosen.iter().map(|e| *e as u32));
            ids.push(self.experts as u32);
        }
        ids
    }

    fn run_up(&self, m: &mut Machine, x: &[f32], ids: &[u32]) -> Vec<f32> {
        let h = m.out(ids.len() * self.hidden);
        let op = ExpertUp {
            w: m.bytes(&self.up.bytes()),
            x: m.f32(x),
            ids: m.u32(ids),
            h,
            tokens: (x.len() / self.dim) as u32,
            experts: self.experts as u32,
            top: self.top as u32,
            hidden: self.hidden as u32,
            dim: self.dim as u32,
        };
        m.run(op);
        m.get(h)
    }

    fn run_down(&self, m: &mut Machine, h: &[f32], ids: &[u32], weights: &[f32]) -> Vec<f32> {
        let tokens = ids.len() / (self.top + 1);
        let y = m.out(tokens * self.dim);
        let op = ExpertDown {
            w: m.bytes(&self.down.bytes()),
            h: m.f32(h),
            ids: m.u32(ids),
            weights: m.f32(weights),
            y,
            tokens: tokens as u32,
            experts: self.experts as u32,
            top: self.top as u32,
            hidden: self.hidden as u32,
            dim: self.dim as u32,
        };
        m.run(op);
        m.get(y)
    }

    /// Tolerances as for `linear`: 1e-6 of the magnitudes that were added, times what silu and
    /// the second factor make of them (|silu'| <= 1.1).
    fn check_up(&self, rng: &mut Rng, tokens: usize) {
        let (chosen, hidden, dim) = (self.top + 1, self.hidden, self.dim);
        let name = format!("experts {} top {} tokens {tokens}", self.experts, self.top);
        let x = rng.normals(tokens * dim);
        let ids = self.ids(rng, tokens);
        let mut expected = Vec::new();
        for (n, &e) in ids.iter().enumerate() {
            let x = &x[n / chosen * dim..][..dim];
            for r in 0..hidden {
                let row = e as usize * 2 * hidden + r;
                let (gate, gate_size) = self.up.dot(row, x);
                let (up, up_size) = self.up.dot(row + hidden, x);
                let value = gate * sigmoid(gate) * up;
                let within = 1.1 * gate_size * up.abs() + gate.abs() * up_size + value.abs();
                expected.push(Expected { value, within: 2e-6 * within });
            }
        }
        let whole = everywhere(&name, &expected, |m| self.run_up(m, &x, &ids));
        for t in [0, tokens - 1] {
            let part = t * chosen * hidden..(t + 1) * chosen * hidden;
            alone(&name, &whole, part, |m| {
                self.run_up(m, &x[t * dim..][..dim], &ids[t * chosen..][..chosen])
            });
        }
    }

    /// Tolerances as for `linear`.
    fn check_down(&self, rng: &mut Rng, tokens: usize) {
        let (chosen, hidden, dim) = (self.top + 1, self.hidden, self.dim);
        let name = format!("experts {} top {} tokens {tokens}", self.experts, self.top);
        let ids = self.ids(rng, tokens);
        let h = rng.normals(ids.len() * hidden);
        let weights: Vec<f32> = ids.iter().map(|_| rng.uniform() as f32).collect();
        let mut expected = vec![Expected { value: 0.0, within: 0.0 }; tokens * dim];
        for (n, &e) in ids.iter().enumerate() {
            let h = &h[n * hidden..][..hidden];
            for r in 0..dim {
                let (value, size) = self.down.dot(e as usize * dim + r, h);
                let y = &mut expected[n / chosen * dim + r];
                y.value += f64::from(weights[n]) * value;
                y.within += 2e-6 * f64::from(weights[n]) * size;
            }
        }
        let whole = everywhere(&name, &expected, |m| self.run_down(m, &h, &ids, &weights));
        for t in [0, tokens - 1] {
            let n = t * chosen..(t + 1) * chosen;
            alone(&name, &whole, t * dim..(t + 1) * dim, |m| {
                let h = &h[n.start * hidden..n.end * hidden];
                self.run_down(m, h, &ids[n.clone()], &weights[n.clone()])
            });
        }
    }
}

/// Few and many tokens an expert, odd counts, and a size that threads share.
fn every_shape(check: fn(&Layer, &mut Rng, usize)) {
    let mut rng = Rng(2);
    for shape in [(4, 2, 64, 64), (7, 3, 64, 128), (5, 5, 192, 64), (1, 1, 64, 192)] {
        let layer = Layer::random(&mut rng, shape);
        for tokens in [1, 2, 3, 8, 9, 31] {
            check(&layer, &mut rng, tokens);
        }
    }
    let layer = Layer::random(&mut rng, (9, 4, 128, 320));
    for tokens in [1, 40] {
        check(&layer, &mut rng, tokens);
    }
}

#[test]
fn expert_up() {
    every_shape(Layer::check_up);
}

#[test]
fn expert_down() {
    every_shape(Layer::check_down);
}

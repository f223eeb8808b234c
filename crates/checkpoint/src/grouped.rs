//! Problems of many tensors, joined where they differ only in the number of the layer, so that a
//! report of a thousand differences can be read.

use std::collections::HashMap;

use crate::error::shown;

/// Problems by name, in the order in which they came.
#[derive(Debug, Default)]
pub(crate) struct Grouped {
    groups: Vec<Group>,
    by_key: HashMap<(String, String), usize>,
    total: usize,
}

#[derive(Debug)]
struct Group {
    /// The first name.
    name: String,
    /// The name with `*` for each number.
    pattern: String,
    problem: String,
    /// What is said after the problem where it is the same for all.
    detail: Option<String>,
    /// The number in each name, as long as each has exactly one.
    layers: Option<Vec<usize>>,
    count: usize,
}

impl Grouped {
    /// Adds a problem of the tensor or module `name`. `detail` does not keep groups apart; it is
    /// shown where a whole group shares it.
    pub fn add(&mut self, name: &str, problem: &str, detail: &str) {
        self.total += 1;
        let mut numbers = Vec::new();
        let parts: Vec<&str> = name
            .split('.')
            .map(|part| match part.parse::<usize>() {
                Ok(number) => {
                    numbers.push(number);
                    "*"
                }
                Err(_) => part,
            })
            .collect();
        let pattern = parts.join(".");
        let layer = if let [one] = numbers[..] { Some(one) } else { None };
        let key = (pattern, problem.to_string());
        if let Some(&i) = self.by_key.get(&key) {
            let group = &mut self.groups[i];
            group.count += 1;
            group.detail.take_if(|known| known != detail);
            match (&mut group.layers, layer) {
                (Some(layers), Some(layer)) => layers.push(layer),
                (layers, _) => *layers = None,
            }
            return;
        }
        self.groups.push(Group {
            name: name.into(),
            pattern: key.0.clone(),
            problem: problem.into(),
            detail: Some(detail.into()),
            layers: layer.map(|layer| vec![layer]),
            count: 1,
        });
        self.by_key.insert(key, self.groups.len() - 1);
    }

    /// How many problems were added.
    pub fn total(&self) -> usize {
        self.total
    }

    /// One line a group, at most `most` of them and one that counts the rest.
    pub fn lines(&self, most: usize) -> Vec<String> {
        let mut lines: Vec<_> = self.groups.iter().take(most).map(Group::line).collect();
        let rest: usize = self.groups.iter().skip(most).map(|group| group.count).sum();
        if rest > 0 {
            lines.push(format!("and {rest} more"));
        }
        lines
    }
}

impl Group {
    fn line(&self) -> String {
        let mut line = match (&self.layers, self.count) {
            (_, 1) => shown(&self.name),
            (Some(layers), _) => format!("{} ({})", shown(&self.pattern), ranges(layers)),
            (None, count) => format!("{} ({count} of them)", shown(&self.pattern)),
        };
        if !self.problem.is_empty() {
            line += ": ";
            line += &self.problem;
        }
        line += self.detail.as_deref().unwrap_or("");
        line
    }
}

/// `layers 0-2, 4-6`, or `30 layers from 0 to 38` where there are many runs.
fn ranges(numbers: &[usize]) -> String {
    let mut numbers = numbers.to_vec();
    numbers.sort_unstable();
    numbers.dedup();
    let mut runs: Vec<(usize, usize)> = Vec::new();
    for &number in &numbers {
        match runs.last_mut() {
            Some((_, last)) if last.checked_add(1) == Some(number) => *last = number,
            _ => runs.push((number, number)),
        }
    }
    match (&runs[..], &numbers[..]) {
        ([_, _, _, _, _, ..], [first, .., last]) => {
            format!("{} layers from {first} to {last}", numbers.len())
        }
        (runs, _) => {
            let run = |&(a, b): &(usize, usize)| {
                if a == b { a.to_string() } else { format!("{a}-{b}") }
            };
            format!("layers {}", runs.iter().map(run).collect::<Vec<_>>().join(", "))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_differ_in_the_layer_are_one_line() {
        let mut grouped = Grouped::default();
        for layer in [0, 1, 2, 4, 5, 6, 9] {
            grouped.add(&format!("layers.{layer}.gate"), "wrong", " in a");
        }
        grouped.add("norm", "wrong", " in a");
        grouped.add("layers.3.gate", "missing", "");
        for expert in 0..3 {
            grouped.add(&format!("layers.1.experts.{expert}"), "", "");
        }
        grouped.add("layers.7.gate", "wrong", " in b");
        assert_eq!(grouped.total(), 13);
        assert_eq!(
            grouped.lines(9),
            [
                "layers.*.gate (layers 0-2, 4-7, 9): wrong",
                "norm: wrong in a",
                "layers.3.gate: missing",
                "layers.*.experts.* (3 of them)",
            ]
        );
        assert_eq!(grouped.lines(2)[2], "and 4 more");
        assert_eq!(ranges(&[3, 7, 11, 15, 19]), "5 layers from 3 to 19");
    }
}

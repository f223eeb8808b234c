//! The vision tower of the published checkpoint: 333 tensors that Lily passes over. A checkpoint
//! that has them tests that it does.

use crate::config::Config;
use crate::tensors::{Dtype, Tensor};

const LAYERS: usize = 27;
const DIM: usize = 1152;
const HIDDEN: usize = 4304;
const POSITIONS: usize = 2304;
const MERGED: usize = 4 * DIM;

/// Every tensor of the tower, which maps to the text model's width.
pub fn table(config: &Config) -> Vec<Tensor> {
    let mut table = Table::default();
    table.plain("patch_embed.proj.weight", &[DIM, 2, 16, 16, 3]);
    table.plain("patch_embed.proj.bias", &[DIM]);
    table.plain("pos_embed.weight", &[POSITIONS, DIM]);
    for layer in 0..LAYERS {
        table.linear(&format!("blocks.{layer}.attn.qkv"), 3 * DIM, DIM);
        table.linear(&format!("blocks.{layer}.attn.proj"), DIM, DIM);
        table.linear(&format!("blocks.{layer}.mlp.linear_fc1"), HIDDEN, DIM);
        table.linear(&format!("blocks.{layer}.mlp.linear_fc2"), DIM, HIDDEN);
        table.norm(&format!("blocks.{layer}.norm1"));
        table.norm(&format!("blocks.{layer}.norm2"));
    }
    table.norm("merger.norm");
    table.linear("merger.linear_fc1", MERGED, MERGED);
    table.linear("merger.linear_fc2", config.dim, MERGED);
    table.0
}

#[derive(Default)]
struct Table(Vec<Tensor>);

impl Table {
    fn plain(&mut self, name: &str, shape: &[usize]) {
        let name = format!("vision_tower.{name}");
        self.0.push(Tensor { name, dtype: Dtype::BF16, shape: shape.to_vec() });
    }

    fn linear(&mut self, name: &str, rows: usize, columns: usize) {
        self.plain(&format!("{name}.weight"), &[rows, columns]);
        self.plain(&format!("{name}.bias"), &[rows]);
    }

    fn norm(&mut self, name: &str) {
        self.plain(&format!("{name}.weight"), &[DIM]);
        self.plain(&format!("{name}.bias"), &[DIM]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tower_is_the_published_one() {
        let tower = table(&Config::full());
        assert_eq!(tower.len(), 333);
        assert_eq!(tower.iter().map(Tensor::bytes).sum::<u64>(), 893_142_496);
        let Some(shared) = crate::testing::shared() else { return };
        let manifest = std::fs::read_to_string(shared.join("spec/manifest.tsv")).unwrap();
        let found: std::collections::HashSet<String> = tower
            .iter()
            .map(|t| {
                let shape: Vec<_> = t.shape.iter().map(usize::to_string).collect();
                format!("{}\t{}\t{}", t.name, t.dtype.name(), shape.join("x"))
            })
            .collect();
        let published = manifest.lines().filter(|line| line.starts_with("vision_tower."));
        for line in published {
            let start: Vec<_> = line.split('\t').take(3).collect();
            assert!(found.contains(&start.join("\t")), "{line}");
        }
    }
}

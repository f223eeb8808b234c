//! The whole model: against the reference, and against itself.
//!
//! - [`golden`]: logits of the random model in `reference/golden`, on every instruction set, each
//!   beside the error that bf16 activations make on the same weights;
//! - [`laws`]: what must hold on any weights, such as that a prompt may be cut anywhere;
//! - [`spec_tiny`]: a second random model, with logits that others computed;
//! - [`synthesized`]: what random checkpoints promise.

mod golden;
mod laws;
mod machine;
mod spec_tiny;
mod synthesized;

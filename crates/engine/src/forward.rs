//! What the engine needs of a model: slots that absorb tokens and give logits.

use lily_model::{Model, Span};

/// A model as the engine sees it. The trait exists so that the engine, and the server above it,
/// can be tested with models that are slow, fail or panic at will.
pub trait Forward: Send + 'static {
    /// Columns of the logits; ids are below it.
    fn vocab(&self) -> usize;
    /// Sequences that can be kept at once.
    fn slots(&self) -> usize;
    /// Longest sequence, in tokens.
    fn max_seq(&self) -> usize;
    /// Most tokens one step may carry; at least [`Forward::slots`].
    fn chunk(&self) -> usize;
    /// Most rows of logits one step may give; at least [`Forward::slots`].
    fn outputs(&self) -> usize;
    /// Makes a slot ready for a new sequence.
    fn reset(&mut self, slot: usize);
    /// One forward pass, waited for: f32 (outputs, vocab), row-major, in the order of the spans.
    /// `None`: `go_on`, asked between layers, said no. After that, or an error (in words for
    /// people), the slots of the spans are good for nothing but [`Forward::reset`].
    fn step(
        &mut self,
        spans: &[Span],
        go_on: &mut dyn FnMut() -> bool,
    ) -> Result<Option<&[f32]>, String>;
}

impl Forward for Model {
    fn vocab(&self) -> usize {
        self.config().vocab
    }
    fn slots(&self) -> usize {
        self.slots()
    }
    fn max_seq(&self) -> usize {
        self.max_seq()
    }
    fn chunk(&self) -> usize {
        self.chunk()
    }
    fn outputs(&self) -> usize {
        self.outputs()
    }
    fn reset(&mut self, slot: usize) {
        self.reset(slot);
    }
    fn step(
        &mut self,
        spans: &[Span],
        go_on: &mut dyn FnMut() -> bool,
    ) -> Result<Option<&[f32]>, String> {
        let Some(ticket) = self.step(spans, go_on) else { return Ok(None) };
        self.logits(ticket).map(Some).map_err(|error| error.to_string())
    }
}

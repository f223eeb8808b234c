//! What the engine needs of a model: slots that absorb tokens and give logits.

/// The new tokens of one sequence in a step.
#[derive(Clone, Copy, Debug)]
pub struct Span<'a> {
    /// The place of the sequence.
    pub slot: usize,
    /// Its new tokens, at least one; they follow what the slot has absorbed so far.
    pub ids: &'a [u32],
    /// Of which of them the logits are wanted.
    pub outputs: Outputs,
}

/// Which rows of a span end in logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outputs {
    /// None: a part of a prompt that is not its end.
    None,
    /// Those after the last token, from which the next is sampled.
    Last,
    /// Those after every token.
    All,
}

impl Outputs {
    /// How many rows a span of `tokens` gives.
    pub(crate) fn rows(self, tokens: usize) -> usize {
        match self {
            Outputs::None => 0,
            Outputs::Last => 1,
            Outputs::All => tokens,
        }
    }
}

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

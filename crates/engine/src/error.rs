//! Everything that can go wrong between a request and its tokens.

/// Why a request was refused or lost. Refusals ([`crate::Engine::submit`]) happen before anything
/// is allocated or computed.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Error {
    /// A prompt of no tokens.
    #[error("the prompt has no tokens; at least one is needed")]
    EmptyPrompt,
    /// The prompt leaves no room for a reply.
    #[error(
        "this model's maximum context length is {max_seq} tokens; the prompt has {prompt} tokens \
         and the reply needs at least one more"
    )]
    PromptTooLong {
        /// Tokens of the prompt.
        prompt: usize,
        /// Tokens a sequence can have.
        max_seq: usize,
    },
    /// An id that the model has no embedding for.
    #[error("token id {id} is out of range: the model has {vocab} ids")]
    TokenId {
        /// The offending id.
        id: u32,
        /// Ids of the model.
        vocab: usize,
    },
    /// A sampling parameter out of its range.
    #[error("{field}: expected {expected}, found {value}")]
    Sampling {
        /// The field's name in [`crate::Sampling`].
        field: &'static str,
        /// What it held.
        value: f32,
        /// What it may hold.
        expected: String,
    },
    /// As many requests wait as are allowed to.
    #[error("the engine is busy: {waiting} requests are waiting already; try again later")]
    QueueFull {
        /// Requests that wait.
        waiting: usize,
    },
    /// [`crate::Engine::shutdown`] was called.
    #[error("the engine is shutting down")]
    ShuttingDown,
    /// The model or its device failed while it computed this request; others are not affected.
    #[error("the model failed: {0}")]
    Model(String),
    /// The model gave no finite logit for any known token.
    #[error("the model gave no finite logits: its weights are damaged, or this is a bug")]
    NoFiniteLogit,
    /// The engine's thread is gone, with the panic's message; only a restart helps.
    #[error("the engine has stopped after an internal error, restart it: {0}")]
    Dead(String),
}

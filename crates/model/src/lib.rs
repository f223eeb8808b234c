//! Tokens and state in, logits out.
#![forbid(unsafe_code)]

//! Which tokens to compute next. Knows tokens, never text.
#![forbid(unsafe_code)]

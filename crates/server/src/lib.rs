//! The OpenAI-compatible HTTP API: HTTP and nothing else.
#![forbid(unsafe_code)]

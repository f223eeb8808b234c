//! The `lily` command.
#![forbid(unsafe_code)]
fn main() {}

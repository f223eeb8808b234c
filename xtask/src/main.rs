//! `cargo xtask`: the chores of the project.
#![forbid(unsafe_code)]
fn main() {}

//! The real `openai` client in Python against the server with a model that parrots.

mod common;

use std::process::Command;

use common::{Parrot, Running};
use lily_server::Settings;

/// The exit status with which the script says that the client is not installed.
const NOT_INSTALLED: i32 = 77;

#[tokio::test(flavor = "multi_thread")]
async fn the_openai_client_is_content() {
    let server = Running::start(Parrot::default(), Settings::default()).await;
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/openai_client.py");
    let base = format!("http://{}/v1", server.address);
    let client =
        tokio::task::spawn_blocking(move || Command::new("python3").args([script, &base]).output());
    let output = match client.await.unwrap() {
        Ok(output) if !matches!(output.status.code(), Some(NOT_INSTALLED | 127)) => output,
        _ => return eprintln!("skipped: needs python3 with the package openai"),
    };
    let said = String::from_utf8_lossy(&output.stdout);
    let complaints = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}{complaints}");
    server.is_well().await;
}

//! The real `openai` client in Python against `lily serve` with the demo model.

mod lily;

use lily::Server;
use std::process::Command;

/// The exit status with which the script says that the client is not installed.
const NOT_INSTALLED: i32 = 77;

#[test]
fn the_openai_client_is_content() {
    let server = Server::start(&["--slots", "4", "--max-seq", "4096"]);
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../server/tests/openai_client.py");
    let base = format!("http://{}/v1", server.address);
    let output = match Command::new("python3").args([script, &base]).output() {
        Ok(output) if !matches!(output.status.code(), Some(NOT_INSTALLED | 127)) => output,
        _ => return eprintln!("skipped: needs python3 with the package openai"),
    };
    let said = String::from_utf8_lossy(&output.stdout);
    let complaints = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}{complaints}");
}

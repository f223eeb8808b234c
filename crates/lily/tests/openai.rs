//! A session of the real `openai` Python client with `lily serve` and the embedded demo.

mod lily;

use lily::Server;
use std::process::Command;

#[test]
fn the_openai_client_is_served() {
    let server = Server::start(&[]);
    server.wait_until_ready();
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../server/tests/openai_client.py");
    let base = format!("http://{}/v1", server.address);
    let Ok(output) = Command::new("python3").args(["-B", script, &base]).output() else {
        eprintln!("skipped: needs python3 with the package openai");
        return;
    };
    let said = [output.stdout, output.stderr].map(|t| String::from_utf8_lossy(&t).into_owned());
    eprintln!("{}", said.concat());
    match output.status.code() {
        // 77: the script says that the package is not there; 127: so does a shell without python3.
        Some(77 | 127) => eprintln!("skipped: needs python3 with the package openai"),
        code => assert_eq!(code, Some(0), "{}", said.concat()),
    }
}

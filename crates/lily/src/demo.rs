//! The toy model inside this program, so that a fresh clone can answer something. See
//! demo/README.md for what it is and what it can do.

/// What is said aloud whenever it is used for want of another.
pub const NOTICE: &str = "\
no --model: using the toy model inside this program (2.67 M parameters). It can answer greetings, \
\"Who are you?\", capitals and simple unit conversions, and nothing else. `lily pull` fetches the \
real one; then give --model DIR or set LILY_MODEL.";

/// What the API calls it.
pub const ID: &str = "lily-demo";

/// Its weights.
pub const WEIGHTS: &[u8] = include_bytes!("../../../demo/model.safetensors");

/// Its config.json.
pub const CONFIG: &str = include_str!("../../../demo/config.json");

/// Its tokenizer.json.
pub const TOKENIZER: &str = include_str!("../../../demo/tokenizer.json");

/// A text file of the checkpoint, by name.
pub fn file(name: &str) -> Option<&'static str> {
    Some(match name {
        "config.json" => CONFIG,
        "generation_config.json" => include_str!("../../../demo/generation_config.json"),
        "tokenizer.json" => TOKENIZER,
        "tokenizer_config.json" => include_str!("../../../demo/tokenizer_config.json"),
        "chat_template.jinja" => include_str!("../../../demo/chat_template.jinja"),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use sha2::{Digest, Sha256};

    #[test]
    fn the_model_card_has_the_checksums_of_the_files() {
        let card = include_str!("../../../demo/README.md");
        let mut compared = 0;
        for line in card.lines() {
            let Some((sum, name)) = line.split_once("  ").filter(|(sum, _)| sum.len() == 64) else {
                continue;
            };
            let bytes = match name {
                "model.safetensors" => super::WEIGHTS,
                _ => super::file(name).unwrap_or_else(|| panic!("no file {name}")).as_bytes(),
            };
            let found: String = Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect();
            assert_eq!(found, sum, "{name}");
            compared += 1;
        }
        assert_eq!(compared, 6, "files with a checksum");
    }
}

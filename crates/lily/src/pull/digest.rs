//! The two checksums the Hub gives for a file: SHA-256 for those in large-file storage, the Git
//! blob id (SHA-1 over a header and the bytes) for the others.

use std::fmt;

use sha2::Digest as _;

/// What a file's bytes must hash to. It is also the file's name in a cache's `blobs` folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Digest(String);

impl Digest {
    /// Reads 64 hexadecimal digits (SHA-256) or 40 (Git blob id), as an ETag writes them: with
    /// or without quotes and `W/`. `None` for anything else.
    pub fn parse(text: &str) -> Option<Digest> {
        let hex = text.trim().trim_start_matches("W/").trim_matches('"');
        let known = matches!(hex.len(), 40 | 64) && hex.bytes().all(|b| b.is_ascii_hexdigit());
        known.then(|| Digest(hex.to_ascii_lowercase()))
    }

    /// A hasher for a file of `size` bytes.
    pub fn hasher(&self, size: u64) -> Hasher {
        if self.0.len() == 64 {
            Hasher::Sha256(sha2::Sha256::new())
        } else {
            Hasher::Git(sha1::Sha1::new_with_prefix(format!("blob {size}\0")))
        }
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A running checksum.
pub enum Hasher {
    /// SHA-256 of the bytes.
    Sha256(sha2::Sha256),
    /// SHA-1 of `blob SIZE\0` and the bytes.
    Git(sha1::Sha1),
}

impl Hasher {
    /// Takes the file's next bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        match self {
            Hasher::Sha256(h) => h.update(bytes),
            Hasher::Git(h) => h.update(bytes),
        }
    }

    /// The checksum of all bytes taken.
    pub fn finish(self) -> Digest {
        let hex = |bytes: &[u8]| bytes.iter().map(|b| format!("{b:02x}")).collect();
        match self {
            Hasher::Sha256(h) => Digest(hex(&h.finalize())),
            Hasher::Git(h) => Digest(hex(&h.finalize())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(expected: &str, bytes: &[u8]) -> String {
        let mut hasher = Digest::parse(expected).unwrap().hasher(bytes.len() as u64);
        hasher.update(bytes);
        hasher.finish().to_string()
    }

    #[test]
    fn known_answers() {
        // FIPS 180-2, "abc"; and `printf abc | git hash-object --stdin`.
        let sha = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        let git = "f2ba8f84ab5c1bce84a7b441cb1959cfc7093b7f";
        assert_eq!(of(sha, b"abc"), sha);
        assert_eq!(of(git, b"abc"), git);
    }

    #[test]
    fn etags_of_all_shapes() {
        let hex = "F2ba8f84ab5c1bce84a7b441cb1959cfc7093b7f";
        for text in [hex.to_string(), format!("\"{hex}\""), format!("W/\"{hex}\"")] {
            assert_eq!(Digest::parse(&text).unwrap().to_string(), hex.to_ascii_lowercase());
        }
        for bad in ["", "\"abc\"", "zz", &"g".repeat(40), "5f3-18c"] {
            assert_eq!(Digest::parse(bad), None, "{bad}");
        }
    }
}

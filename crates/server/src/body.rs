//! Reads request bodies: in time, within limits, as JSON, with errors that name the field.

use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::{HeaderMap, header};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use hyper::body::Body as _;
use serde::de::DeserializeOwned;
use serde_json::error::Category;

use crate::error::Error;

/// A whole body that says it is JSON.
pub struct JsonBody(Bytes);

impl JsonBody {
    /// Reads a body of at most `limit` bytes.
    pub async fn read(
        headers: &HeaderMap,
        body: Body,
        limit: usize,
        timeout: Duration,
    ) -> Result<JsonBody, Error> {
        let kind = headers.get(header::CONTENT_TYPE).map(|kind| kind.as_bytes());
        // Besides honesty: a page of another origin may send other types without being asked.
        if !kind.is_some_and(is_json) {
            let found = kind.map_or("nothing".into(), String::from_utf8_lossy);
            let message = format!("expected the header to say application/json, found {found}");
            return Err(Error::field("content-type", message));
        }
        if let Some(encoding) = headers.get(header::CONTENT_ENCODING)
            && encoding != "identity"
        {
            let message = "compressed bodies are not read: send the JSON as it is";
            return Err(Error::field("content-encoding", message));
        }
        // What says beforehand that it is too long need not be waited for.
        if body.size_hint().lower() > limit as u64 {
            return Err(Error::TooLarge(limit));
        }
        let collected = tokio::time::timeout(timeout, Limited::new(body, limit).collect()).await;
        match collected {
            Err(_) => Err(Error::SlowBody(timeout.as_secs())),
            Ok(Ok(body)) => Ok(JsonBody(body.to_bytes())),
            Ok(Err(error)) if error.is::<LengthLimitError>() => Err(Error::TooLarge(limit)),
            Ok(Err(error)) => Err(Error::Request(format!("the body broke off: {error}"))),
        }
    }

    /// The body as a `T`. May be called for several types, each of which knows a part of it.
    pub fn parse<T: DeserializeOwned>(&self) -> Result<T, Error> {
        if !self.0.trim_ascii_start().starts_with(b"{") && !self.0.trim_ascii().is_empty() {
            // Lists would be taken for the fields in order.
            serde_json::from_slice::<serde::de::IgnoredAny>(&self.0).map_err(not_json)?;
            return Err(Error::Request("the body: expected an object in JSON".to_owned()));
        }
        let mut json = serde_json::Deserializer::from_slice(&self.0);
        let value = serde_path_to_error::deserialize(&mut json).map_err(|error| {
            let path = error.path().to_string();
            let inner = error.into_inner();
            match inner.classify() {
                Category::Data if path != "." => Error::field(path, in_words(&inner)),
                Category::Data => Error::Request(format!("the body: {}", in_words(&inner))),
                _ => not_json(inner),
            }
        })?;
        json.end().map_err(not_json)?;
        Ok(value)
    }
}

fn not_json(error: serde_json::Error) -> Error {
    Error::Request(format!("the body is not valid JSON: {error}"))
}

/// What serde says, in JSON's words instead of Rust's.
fn in_words(error: &serde_json::Error) -> String {
    let text = error.to_string();
    let (text, place) = text.split_once(" at line ").unwrap_or((&text, ""));
    let (found, expected) = text.rsplit_once("expected ").unwrap_or((text, ""));
    let expected = match expected {
        "" => return text.to_owned(),
        "f64" => "a number",
        "i64" | "i128" | "u32" => "a whole number",
        "a boolean" => "true or false",
        "a sequence" => "a list",
        "a map" => "an object",
        kind if kind.starts_with("struct ") => "an object",
        other => other,
    };
    let place = if place.is_empty() { String::new() } else { format!(" (line {place})") };
    format!("{found}expected {expected}{place}")
}

/// `application/json`, or a type made of it, with or without parameters.
fn is_json(kind: &[u8]) -> bool {
    let essence = kind.split(|&byte| byte == b';').next().unwrap_or_default().trim_ascii();
    let essence = essence.to_ascii_lowercase();
    essence == b"application/json"
        || essence.starts_with(b"application/") && essence.ends_with(b"+json")
}

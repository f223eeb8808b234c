//! Reads request bodies: in time, within limits, as JSON, with errors that name the field.

use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::{HeaderMap, header};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use hyper::body::Body as _;
use serde::de::DeserializeOwned;

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
        let mut json = serde_json::Deserializer::from_slice(&self.0);
        let value = serde_path_to_error::deserialize(&mut json).map_err(|error| {
            let path = error.path().to_string();
            let inner = error.into_inner();
            match inner.classify() {
                serde_json::error::Category::Data if path != "." => {
                    Error::field(path, inner.to_string())
                }
                serde_json::error::Category::Data => Error::Request(format!("the body: {inner}")),
                _ => Error::Request(format!("the body is not valid JSON: {inner}")),
            }
        })?;
        json.end()
            .map_err(|error| Error::Request(format!("the body is not valid JSON: {error}")))?;
        Ok(value)
    }
}

/// `application/json`, or a type made of it, with or without parameters.
fn is_json(kind: &[u8]) -> bool {
    let essence = kind.split(|&byte| byte == b';').next().unwrap_or_default().trim_ascii();
    let essence = essence.to_ascii_lowercase();
    essence == b"application/json"
        || essence.starts_with(b"application/") && essence.ends_with(b"+json")
}

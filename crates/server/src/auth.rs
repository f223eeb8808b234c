//! Who may use the server: the API key, and the origins of browsers' pages.

use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use subtle::ConstantTimeEq;
use tower_http::cors::{AllowHeaders, AllowOrigin, CorsLayer};

use crate::App;
use crate::error::Error;

/// Schemes of desktop programs and editors, whose pages are as local as the server.
const LOCAL_SCHEMES: [&str; 5] = ["app", "file", "tauri", "vscode-webview", "vscode-file"];

/// Whether pages of this origin may use the server: local ones, those of desktop programs, and
/// those that were `added` (`*`: any).
fn origin_is_allowed(origin: &str, added: &[String]) -> bool {
    if added.iter().any(|a| a == "*" || a.trim_end_matches('/').eq_ignore_ascii_case(origin)) {
        return true;
    }
    let Some((scheme, rest)) = origin.split_once("://") else { return false };
    if LOCAL_SCHEMES.contains(&scheme) {
        return true;
    }
    // An IPv6 address has colons of its own, within brackets.
    let host = match rest.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None => rest.split(':').next().unwrap_or_default(),
    };
    matches!(scheme, "http" | "https" | "tauri" | "wails")
        && (matches!(host, "localhost" | "127.0.0.1" | "::1" | "0.0.0.0")
            || host.ends_with(".localhost"))
}

/// What browsers ask for before and after they let a page use the server.
pub fn cors(app: &App) -> CorsLayer {
    let added = app.settings().allow_origins.clone();
    let allowed = move |origin: &HeaderValue, _: &_| {
        origin.to_str().is_ok_and(|origin| origin_is_allowed(origin, &added))
    };
    CorsLayer::new()
        .allow_origin(AllowOrigin::predicate(allowed))
        .allow_methods([Method::GET, Method::POST, Method::OPTIONS])
        // Whatever headers the page's library likes to send.
        .allow_headers(AllowHeaders::mirror_request())
        .max_age(std::time::Duration::from_secs(86_400))
}

/// Lets a request pass if its page may use the server. Browsers tell the origin with every
/// request that does something; this also stops pages that made a name of their own point here.
pub async fn check_origin(State(app): State<App>, request: Request, next: Next) -> Response {
    if let Some(origin) = request.headers().get(header::ORIGIN) {
        let origin = String::from_utf8_lossy(origin.as_bytes());
        if !origin_is_allowed(&origin, &app.settings().allow_origins) {
            return Error::Origin(origin.into_owned()).into_response();
        }
    }
    next.run(request).await
}

/// Lets a request pass if it has the key, or if the server has none.
pub async fn check_key(State(app): State<App>, request: Request, next: Next) -> Response {
    let refused = |key: &String| !has_key(request.headers(), key);
    if app.settings().api_key.as_ref().is_some_and(refused) {
        return Error::Key.into_response();
    }
    next.run(request).await
}

fn has_key(headers: &HeaderMap, key: &str) -> bool {
    let bearer = headers.get(header::AUTHORIZATION).and_then(|value| {
        let (scheme, token) = value.to_str().ok()?.split_once(' ')?;
        scheme.eq_ignore_ascii_case("bearer").then_some(token.trim())
    });
    let plain = headers.get("x-api-key").and_then(|value| value.to_str().ok());
    // Takes the same time wherever the first difference is.
    [bearer, plain].into_iter().flatten().any(|given| given.as_bytes().ct_eq(key.as_bytes()).into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn local_origins_are_allowed_and_others_only_by_name() {
        for origin in [
            "http://localhost",
            "http://localhost:3000",
            "https://localhost:8443",
            "http://127.0.0.1:8080",
            "http://[::1]:5173",
            "http://chat.localhost:1420",
            "app://obsidian.md",
            "file://",
            "tauri://localhost",
            "vscode-webview://1a2b3c",
        ] {
            assert!(origin_is_allowed(origin, &[]), "{origin}");
        }
        for origin in [
            "http://evil.example",
            "https://localhost.evil.example",
            "http://localhostevil",
            "http://127.0.0.1.evil.example",
            "https://[::2]",
            "null",
            "",
            "http://",
            "chrome-extension://abc",
        ] {
            assert!(!origin_is_allowed(origin, &[]), "{origin}");
            assert!(origin_is_allowed(origin, &["*".into()]), "{origin}");
        }
        let added = ["https://chat.example/".to_owned()];
        assert!(origin_is_allowed("https://chat.example", &added));
        assert!(!origin_is_allowed("https://chat.example.evil", &added));
        assert!(!origin_is_allowed("http://chat.example", &added));
    }

    #[test]
    fn a_key_comes_in_either_header() {
        let headers = |name: &'static str, value: &'static str| {
            HeaderMap::from_iter([(
                header::HeaderName::from_static(name),
                HeaderValue::from_static(value),
            )])
        };
        assert!(has_key(&headers("authorization", "Bearer secret"), "secret"));
        assert!(has_key(&headers("authorization", "bearer  secret"), "secret"));
        assert!(has_key(&headers("x-api-key", "secret"), "secret"));
        for (name, value) in [
            ("authorization", "secret"),
            ("authorization", "Basic secret"),
            ("authorization", "Bearer secre"),
            ("authorization", "Bearer secrets"),
            ("x-api-key", ""),
            ("x-api-key", "Secret"),
            ("x-other", "secret"),
        ] {
            assert!(!has_key(&headers(name, value), "secret"), "{name}: {value}");
        }
        assert!(!has_key(&HeaderMap::new(), "secret"));
    }
}

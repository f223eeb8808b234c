//! Everything around the generation: health, models, keys, origins, unknown routes. In-process.

mod common;

use axum::body::Body;
use axum::http::{Method, Request, StatusCode, header};
use common::{Parrot, get, json, post, ready, send, served, text_of};
use lily_server::{App, Settings};
use serde_json::{Value, json};

const ROUTES: [(&str, &str); 3] =
    [("GET", "/models"), ("GET", "/models/test/parrot"), ("POST", "/completions")];

fn request(method: &str, path: &str) -> Request<Body> {
    match method {
        "POST" => {
            post(path, r#"{"messages": [{"role": "user", "content": "hi"}], "prompt": "hi"}"#)
        }
        _ => get(path),
    }
}

#[tokio::test]
async fn while_loading_everything_says_so() {
    let state = App::loading(Settings::default());
    for prefix in ["", "/v1"] {
        for (method, path) in ROUTES.into_iter().chain([("GET", "/health")]) {
            let response = send(&state, request(method, &format!("{prefix}{path}"))).await;
            assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE, "{path}");
            assert!(response.headers().contains_key(header::RETRY_AFTER), "{path}");
            let body: Value = serde_json::from_str(&text_of(response).await).unwrap();
            let error = json!({
                "message": "Loading model", "type": "unavailable_error", "param": null, "code": 503
            });
            assert_eq!(body, json!({"error": error}), "{path}");
        }
    }
    let engine = Parrot::default().engine();
    state.ready(served(&engine));
    let (status, body) = json(&state, get("/health")).await;
    assert_eq!(status, StatusCode::OK);
    assert_eq!(
        body,
        json!({"status": "ok", "slots": 4, "running": 0, "waiting": 0, "longest_step_ms": 0.0})
    );
    assert_eq!(json(&state, get("/v1/health")).await.0, StatusCode::OK);
}

#[tokio::test]
async fn when_loading_failed_requests_are_told_why() {
    let state = App::loading(Settings::default());
    state.failed("needs 24 GB, this machine has 16 GB".to_owned());
    let (status, body) = json(&state, get("/health")).await;
    assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(body["error"]["message"], "needs 24 GB, this machine has 16 GB");
}

#[tokio::test]
async fn a_model_is_listed_with_its_context_length_under_every_usual_name() {
    let engine = Parrot::default().engine();
    let state = ready(&engine, Settings::default());
    let (status, list) = json(&state, get("/v1/models")).await;
    assert_eq!((status, &list["object"]), (StatusCode::OK, &json!("list")));
    let model = &list["data"][0];
    assert_eq!((&model["id"], &model["object"]), (&json!("test/parrot"), &json!("model")));
    assert!(model["created"].as_u64().unwrap() > 1_700_000_000);
    for path in ["/max_model_len", "/context_length", "/meta/n_ctx_train", "/meta/context_length"] {
        assert_eq!(model.pointer(path), Some(&json!(2000)), "{path}");
    }
    assert_eq!(&json(&state, get("/v1/models/test/parrot")).await.1, model);
    let (status, body) = json(&state, get("/v1/models/gpt-4")).await;
    assert_eq!(status, StatusCode::NOT_FOUND);
    assert_eq!(body["error"]["code"], "model_not_found");
}

#[tokio::test]
async fn without_the_key_nothing_but_health_answers() {
    let engine = Parrot::default().engine();
    let settings = Settings { api_key: Some("secret".to_owned()), ..Settings::default() };
    let state = ready(&engine, settings);
    assert_eq!(json(&state, get("/health")).await.0, StatusCode::OK);
    for (method, path) in ROUTES {
        let response = send(&state, request(method, path)).await;
        assert_eq!(response.status(), StatusCode::UNAUTHORIZED, "{path}");
        assert_eq!(response.headers()[header::WWW_AUTHENTICATE], "Bearer");
        let body: Value = serde_json::from_str(&text_of(response).await).unwrap();
        assert_eq!(body["error"]["code"], "invalid_api_key", "{path}");
    }
    for (name, value) in [("authorization", "Bearer secret"), ("x-api-key", "secret")] {
        let mut request = get("/v1/models");
        request.headers_mut().insert(name, value.parse().unwrap());
        assert_eq!(send(&state, request).await.status(), StatusCode::OK, "{name}");
    }
}

#[tokio::test]
async fn unknown_routes_and_methods_are_errors_like_all_others() {
    let engine = Parrot::default().engine();
    let state = ready(&engine, Settings::default());
    let (status, body) = json(&state, get("/v1/embeddings")).await;
    assert_eq!(status, StatusCode::NOT_FOUND);
    assert_eq!(body["error"]["message"], "unknown route: GET /v1/embeddings");
    assert_eq!(body["error"]["type"], "invalid_request_error");
    for (method, path) in ROUTES {
        let other = if method == "GET" { post(path, "{}") } else { get(path) };
        let response = send(&state, other).await;
        assert_eq!(response.status(), StatusCode::METHOD_NOT_ALLOWED, "{path}");
        assert!(response.headers().contains_key(header::ALLOW), "{path}");
        let body: Value = serde_json::from_str(&text_of(response).await).unwrap();
        assert_eq!(body["error"]["code"], "method_not_allowed", "{path}");
    }
}

#[tokio::test]
async fn local_pages_may_use_the_server_and_foreign_ones_may_not() {
    let engine = Parrot::default().engine();
    // The key is not asked for before a page has been allowed to send it.
    let settings = Settings {
        api_key: Some("secret".to_owned()),
        allow_origins: vec!["https://chat.example".to_owned()],
        ..Settings::default()
    };
    let state = ready(&engine, settings);
    let preflight = |origin: &str| {
        Request::builder()
            .method(Method::OPTIONS)
            .uri("/v1/chat/completions")
            .header("origin", origin)
            .header("access-control-request-method", "POST")
            .header("access-control-request-headers", "authorization,content-type,x-stainless-os")
            .body(Body::empty())
            .unwrap()
    };
    for origin in ["http://localhost:3000", "app://obsidian.md", "https://chat.example"] {
        let response = send(&state, preflight(origin)).await;
        assert_eq!(response.status(), StatusCode::OK, "{origin}");
        let headers = response.headers();
        assert_eq!(headers["access-control-allow-origin"], origin);
        assert_eq!(
            headers["access-control-allow-headers"],
            "authorization,content-type,x-stainless-os"
        );
        assert!(headers["access-control-allow-methods"].to_str().unwrap().contains("POST"));
        // Errors can be read by the page as well.
        let mut wrong = get("/v1/models");
        wrong.headers_mut().insert("origin", origin.parse().unwrap());
        let response = send(&state, wrong).await;
        assert_eq!(response.status(), StatusCode::UNAUTHORIZED);
        assert_eq!(response.headers()["access-control-allow-origin"], origin);
    }
    let foreign = "https://evil.example";
    let response = send(&state, preflight(foreign)).await;
    assert!(!response.headers().contains_key("access-control-allow-origin"));
    let mut request = get("/health");
    request.headers_mut().insert("origin", foreign.parse().unwrap());
    let (status, body) = json(&state, request).await;
    assert_eq!(status, StatusCode::FORBIDDEN);
    assert_eq!(body["error"]["code"], "origin_not_allowed");
}

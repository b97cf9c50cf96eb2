//! What a client is told when a request cannot be served: OpenAI's error shape with vLLM's statuses.

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use engine::api::RequestError;
use serde_json::{Value, json};

/// Seconds after which a client may try again when this worker is loading, full or going away.
const RETRY_AFTER_SECS: HeaderValue = HeaderValue::from_static("1");

/// An error and its causes in one line: no backtrace, and no cause that the text before it has named already.
pub fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = String::new();
    for cause in std::iter::successors(Some(error), |error| error.source()).map(ToString::to_string) {
        if text.is_empty() {
            text = cause;
        } else if !cause.is_empty() && !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}

/// An answer other than success.
#[derive(Clone, Debug, PartialEq)]
pub struct ApiError {
    pub status: StatusCode,
    pub message: String,
    /// The field of the request that is at fault.
    pub param: Option<String>,
}

impl ApiError {
    pub fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self { status, message: message.into(), param: None }
    }

    /// 400: the request as a whole.
    pub fn bad_request(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, message)
    }

    /// 400: `field` of the request.
    pub fn bad_field(field: impl Into<String>, message: impl Into<String>) -> Self {
        Self { param: Some(field.into()), ..Self::bad_request(message) }
    }

    /// 400: `field` has `value`, which is shown shortened.
    pub fn bad_value(field: impl Into<String>, value: &Value, expected: impl AsRef<str>) -> Self {
        let field = field.into();
        let message = format!("{field} is {}, expected {}", shown(value), expected.as_ref());
        Self::bad_field(field, message)
    }

    pub fn not_found(message: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, message)
    }

    /// 503 with `Retry-After`.
    pub fn unavailable(message: impl Into<String>) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, message)
    }

    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, message)
    }

    /// `{"error":{"message":…,"type":…,"param":…,"code":…}}`, for a body and for an event in a stream.
    pub fn body(&self) -> Value {
        let (kind, code) = (self.kind(), self.status.as_u16());
        json!({ "error": { "message": self.message, "type": kind, "param": self.param, "code": code } })
    }

    fn kind(&self) -> &'static str {
        match self.status.as_u16() {
            404 => "NotFoundError",
            405 => "MethodNotAllowedError",
            413 => "RequestTooLargeError",
            429 => "RateLimitError",
            503 => "ServiceUnavailableError",
            504 => "TimeoutError",
            400..500 => "BadRequestError",
            _ => "InternalServerError",
        }
    }
}

impl From<RequestError> for ApiError {
    fn from(error: RequestError) -> Self {
        let status = StatusCode::from_u16(error.status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let param = match &error {
            RequestError::BadParameter { field, .. } => Some((*field).to_owned()),
            RequestError::EmptyPrompt
            | RequestError::TokenOutOfRange { .. }
            | RequestError::PromptTooLong { .. }
            | RequestError::PromptNeverFits { .. } => Some("prompt".to_owned()),
            _ => None,
        };
        Self { status, message: error.to_string(), param }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let retry = matches!(self.status, StatusCode::SERVICE_UNAVAILABLE | StatusCode::TOO_MANY_REQUESTS);
        let mut response = (self.status, Json(self.body())).into_response();
        if retry {
            response.headers_mut().insert(header::RETRY_AFTER, RETRY_AFTER_SECS);
        }
        response
    }
}

/// A value for a message: JSON, at most some 80 characters of it.
pub fn shown(value: &Value) -> String {
    const MAX_CHARS: usize = 80;
    match value {
        Value::Array(items) if items.len() > 8 => format!("a list of {} items", items.len()),
        Value::Object(fields) if fields.len() > 4 => format!("an object with {} fields", fields.len()),
        _ => {
            let text = value.to_string();
            match text.char_indices().nth(MAX_CHARS) {
                Some((end, _)) => format!("{}…", &text[..end]),
                None => text,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn engine_errors_keep_their_status_and_name_the_field() {
        let too_long = RequestError::PromptTooLong { prompt: 600, max_model_len: 512 };
        let error = ApiError::from(too_long);
        assert_eq!(error.status, 400);
        assert!(error.message.contains("600") && error.message.contains("512"));
        assert_eq!(error.body()["error"]["param"], "prompt");
        assert_eq!(error.body()["error"]["code"], 400);
    }

    #[test]
    fn only_errors_that_pass_say_when_to_retry() {
        let full = ApiError::from(RequestError::QueueFull { queued: 8, limit: 8 }).into_response();
        assert_eq!(full.status(), 429);
        assert!(full.headers().contains_key(header::RETRY_AFTER));
        let wrong = ApiError::bad_request("no").into_response();
        assert!(!wrong.headers().contains_key(header::RETRY_AFTER));
    }

    #[test]
    fn long_values_are_shortened_at_a_character_border() {
        let text = shown(&Value::String("é".repeat(1000)));
        assert!(text.chars().count() <= 82 && text.ends_with('…'));
        assert_eq!(shown(&vec![1; 9].into()), "a list of 9 items");
    }
}
